"""Where ``expertwire bench`` writes its results: whole or not at all, and never over what is no regular file."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import reports
from reports import run_cli


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
    "link to a folder": lambda path: path.symlink_to("folder"),
    "link to nowhere": lambda path: path.symlink_to("nosuch/out"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
OUTPUTS = {
    "--json": ["--json", "out.html"],
    "--plot": ["--plot", "out.html"],
    "-o": ["report", "a.json", "-o", "out.html"],
}


def what_is_there(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.lstat().st_ino, path.lstat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL.keys())
@pytest.mark.parametrize("option", OUTPUTS)
def test_what_is_no_regular_file_is_neither_written_nor_replaced(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    make: Callable[[Path], object],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("expertwire.bench.request.measure_all", None)
    (tmp_path / "folder").mkdir()
    reports.save(reports.simple(), tmp_path / "a.json")
    make(Path("out.html"))
    before = what_is_there(tmp_path)
    assert run_cli(monkeypatch, *OUTPUTS[option]) == 2
    printed = capsys.readouterr()
    assert f": {option} out.html: " in printed.err
    assert any(why in printed.err for why in ("is no regular file", "is a folder", "folder does not", "symbolic links"))
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert what_is_there(tmp_path) == before


@pytest.mark.parametrize("option", OUTPUTS)
@pytest.mark.parametrize("exists", [True, False])
def test_links_stay_and_lead_to_what_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, exists: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("expertwire.bench.request.run_request", lambda *_: reports.simple())
    (tmp_path / "kept").mkdir()
    reports.save(reports.simple(), tmp_path / "a.json")
    target = tmp_path / "kept" / "real"
    if exists:
        target.write_text("old", encoding="utf-8")
        target.chmod(0o640)
    Path("out.html").symlink_to("kept/real")
    assert run_cli(monkeypatch, *OUTPUTS[option]) == 0
    assert Path("out.html").readlink() == Path("kept/real")
    assert target.read_bytes()[:2] in (b"<!", b'{"')
    assert not exists or target.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in target.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("plot", ["out.html", "./out.html", "folder/../out.html", "link.html"])
def test_one_file_for_two_results_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, plot: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.html").symlink_to("out.html")
    assert run_cli(monkeypatch, "--json", "out.html", "--plot", plot) == 2
    assert f"--plot {Path(plot)}: is the file of --json, too\n" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_file_that_cannot_be_written_in_the_end_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    def full(path: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("expertwire.bench.request.run_request", lambda *_: reports.simple())
    monkeypatch.setattr(Path, "replace", full)
    reports.save(reports.simple(), tmp_path / "a.json")
    (tmp_path / "out.html").write_text("old", encoding="utf-8")
    assert run_cli(monkeypatch, *OUTPUTS[option]) == 2
    printed = capsys.readouterr()
    assert printed.err.endswith(f": {option} out.html: cannot be written (No space left on device)\n")
    assert printed.err.count("\n") == 1
    assert option == "-o" or "expertwire" in printed.out  # the table is printed all the same
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "out.html"]
