"""The stub file of the C++ module is what the module says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import expertwire

STUB = Path(__file__).resolve().parent.parent / "src" / "expertwire" / "_core.pyi"


def test_stub_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("nanobind", reason="the stub is written by nanobind")
    made = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "expertwire._core", "-o", str(made)]
    subprocess.run(command, check=True, timeout=60)
    same = made.read_text(encoding="utf-8") == STUB.read_text(encoding="utf-8")
    assert same, "make it anew: python -m nanobind.stubgen -m expertwire._core -o src/expertwire/_core.pyi"


def test_public_names_are_there() -> None:
    assert set(expertwire.__all__) <= set(dir(expertwire))
    for name in expertwire.__all__:
        assert getattr(expertwire, name) is not None
    assert expertwire.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'dispatch'"):
        _ = expertwire.dispatch
