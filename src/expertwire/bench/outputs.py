"""The files that a benchmark writes: refused before anything is measured, then written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertwire.errors import InvalidArgumentError

if TYPE_CHECKING:
    from expertwire.bench.schema import Report


@dataclass(frozen=True)
class Outputs:
    """The files to write, as far as they are asked for."""

    json_file: Path | None
    plot_file: Path | None

    def check(self) -> None:
        """Raise if a file could not be written, before anything has been measured.

        Raises:
            InvalidArgumentError: a path that cannot be written, or is no place for such a file.
            UnsupportedError: a picture, without matplotlib.
        """
        if self.json_file is not None:
            check_file("--json", self.json_file)
        if self.plot_file is not None:
            from expertwire.bench.plot import check_plot

            check_plot("--plot", self.plot_file)
        if self.json_file and self.plot_file and _target(self.json_file) == _target(self.plot_file):
            raise InvalidArgumentError(f"--plot {self.plot_file}: is the file of --json, too")

    def write(self, report: Report) -> None:
        """Write the files, each whole or not at all. Raises what :meth:`check` does."""
        try:
            if self.json_file is not None:
                text = json.dumps(report.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
                write_whole("--json", self.json_file, text.encode())
        finally:  # one file that cannot be written does not cost the other
            if self.plot_file is not None:
                from expertwire.bench.plot import write_plot

                write_plot("--plot", self.plot_file, [(self.plot_file.stem, report)])


def check_file(option: str, path: Path) -> None:
    """Raise InvalidArgumentError, which names the option, unless a regular file can be written to ``path``."""
    target = _target(path)
    try:
        if not target.parent.is_dir():
            raise InvalidArgumentError(f"{option} {path}: cannot be written there: its folder does not exist")
        if target.is_dir():
            raise InvalidArgumentError(f"{option} {path}: cannot be written there: is a folder")
        if os.path.lexists(target):
            if not stat.S_ISREG(path.stat().st_mode):
                raise InvalidArgumentError(f"{option} {path}: is no regular file")
            os.close(os.open(path, os.O_WRONLY))  # protected files could be replaced, but are meant to stay
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(f"{option} {path}: cannot be written ({error.strerror})") from error


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Write a file aside and move it to its place; a link stays, and what it leads to is written.

    Raises:
        InvalidArgumentError: it cannot be written. The text names the option; what was there is left.
    """
    check_file(option, path)
    target = _target(path)
    aside = target.with_name(f".expertwire-{secrets.token_hex(8)}")
    try:
        with aside.open("xb") as file:
            file.write(content)
        if target.exists():
            shutil.copymode(target, aside)
        aside.replace(target)
    except OSError as error:
        raise InvalidArgumentError(f"{option} {path}: cannot be written ({error.strerror})") from error
    finally:
        aside.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links that lead to themselves
