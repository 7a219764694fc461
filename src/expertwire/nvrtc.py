"""Where pip has put NVRTC, the library that compiles CUDA kernels. The C++ core cannot know of Python's folders."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from expertwire import _core

#: Folder of the library below the ``nvidia`` package: of the wheels for CUDA 13, then of those for CUDA 12.
_WHEEL_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")


def find_nvrtc_folders() -> list[str]:
    """Returns the folders of the installed NVRTC wheels, the newest CUDA first. Imports none of them."""
    spec = find_spec("nvidia")
    parents = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    folders = [parent / below for below in _WHEEL_FOLDERS for parent in parents]
    return [str(folder) for folder in folders if any(folder.glob("libnvrtc.so.*"))]


def use_installed_nvrtc() -> None:
    """Tells the core of the installed wheels. Counts until the core has loaded a compiler."""
    _core.set_nvrtc_search_path(find_nvrtc_folders())
