"""Markers and settings of the whole suite. Nothing here needs torch or a GPU."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
from hypothesis import settings

MARKERS = {
    "cpu": "runs on any machine (given to every test that names no other marker)",
    "gpu": "needs one CUDA device",
    "multi_gpu": "needs two CUDA devices or more",
}

#: Of the tests that run side by side, these do so one after the other: they have times of their own, or keep all
#: processors busy. So do those that need a GPU, whose kernels wait for each other.
CLOCKS = {
    *("test_confinement", "test_errors", "test_failures", "test_groups", "test_lifetimes", "test_masking"),
    *("test_overlap", "test_specialisations", "test_two_phase"),
}

# Timings of a shared machine say nothing, and a failure must be repeatable from its printed text alone.
settings.register_profile("expertwire", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("expertwire")


@cache
def num_cuda_devices() -> int:
    """Devices that the CUDA driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def missing_for(num_devices: int) -> str:
    """Say why tests that need this many CUDA devices cannot run here; nothing if they can."""
    if num_cuda_devices() < num_devices:
        return f"needs {num_devices} CUDA device(s), found {num_cuda_devices()}"
    try:
        import torch
    except ImportError:
        return "needs torch"
    return "" if torch.cuda.is_available() else "needs a torch that was built with CUDA"


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_listing = config.getoption("list_kernels", None) is not None  # of gpu_suite: no GPU is touched
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if config.pluginmanager.hasplugin("xdist") and (needed or item.path.stem in CLOCKS):
            item.add_marker(pytest.mark.xdist_group("gpu" if needed else "clocks"))
        if needed == 0:
            item.add_marker("cpu")
        elif not is_listing and (reason := missing_for(needed)):
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.pluginmanager.hasplugin("xdist"):
        # Those that take turns begin first: else they keep one process busy when the other has nothing left.
        items.sort(key=lambda item: item.path.stem not in CLOCKS)
