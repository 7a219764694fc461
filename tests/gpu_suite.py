"""A pytest plugin for tools/gpu_check.sh: what tests have told is kept when another one hangs or kills the process.

pytest -p gpu_suite --journal FILE       appends a line of JSON when a test begins and when it ends, leaves out tests
                                         that the file already names, and ends the process when a test takes too long
pytest -p gpu_suite --list-kernels FILE  runs tests up to their communicators only, and writes which kernels they need
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

#: Seconds that a test may take if it names no bound of its own (``pytest.mark.timeout``).
LIMIT_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, help="file of results, continued if it exists")
    parser.addoption("--list-kernels", type=Path, help="file for the kernels that the tests need; nothing is run")
    parser.addoption("--gpu", default="", help="architecture and multiprocessors for --list-kernels, such as sm_90:132")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("journal"):
        config.pluginmanager.register(Journal(config.getoption("journal")))
    if config.getoption("list_kernels"):
        config.pluginmanager.register(KernelList(config.getoption("list_kernels"), config.getoption("gpu")))


class Journal:
    """Writes what becomes of each test as it is known, and bounds it."""

    def __init__(self, file: Path) -> None:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.known = {json.loads(line).get("test") for line in lines}
        self.file: TextIO = file.open("a", encoding="utf-8", buffering=1)
        # Where this process wrote before pytest began to capture: a process that is ended tells where each thread was.
        self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")  # type: ignore[union-attr]
        faulthandler.enable(self.stderr)

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if item.nodeid in self.known]
        items[:] = [item for item in items if item.nodeid not in self.known]
        config.hook.pytest_deselected(items=known)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(test=item.nodeid, outcome="began")
        marker = item.get_closest_marker("timeout")
        faulthandler.dump_traceback_later(marker.args[0] if marker else LIMIT_S, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        text = ""
        if report.failed:
            text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
        elif report.skipped:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        seconds = round(report.duration, 3)
        self.write(test=report.nodeid, outcome=report.outcome, seconds=seconds, text=text[:2000])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", text=str(report.longrepr).strip().splitlines()[-1])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(status=int(exitstatus))


class KernelList:
    """Lets every communicator of :mod:`cuda_driving` note its configuration and skip the rest of the test."""

    def __init__(self, file: Path, gpu: str) -> None:
        import cuda_driving

        self.file = file
        self.listing = cuda_driving.start_listing(*_parse(gpu))

    def pytest_sessionfinish(self) -> None:
        self.file.write_bytes(pickle.dumps(list(self.listing.wanted.values())))
        print(f"\n{len(self.listing.wanted)} communicators need kernels")


def _parse(gpu: str) -> tuple[str, int]:
    """Return architecture and number of multiprocessors; without words for them, those of the first GPU."""
    if gpu:
        architecture, _, num_sms = gpu.partition(":")
        return architecture, int(num_sms)
    import torch

    found = torch.cuda.get_device_properties(0)
    return f"sm_{found.major}{found.minor}", found.multi_processor_count
