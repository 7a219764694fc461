"""Writes reports as a page or a picture, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from expertwire.bench.schema import Report
from expertwire.errors import InvalidArgumentError

Named = Sequence[tuple[str, Report]]


def check_plot(path: Path) -> Callable[[Named], bytes]:
    """Return what makes the content of a ``.html`` or ``.png`` file from reports by name.

    Raises:
        InvalidArgumentError: another ending, or a folder that is not there or cannot be written.
        UnsupportedError: a picture, without matplotlib.
    """
    if path.suffix == ".html":
        from expertwire.bench.page import make_page

        make: Callable[[Named], bytes] = lambda reports: make_page(reports).encode()  # noqa: E731
    elif path.suffix == ".png":
        from expertwire.bench.png import check_matplotlib, make_picture

        check_matplotlib()
        make = make_picture
    else:
        raise InvalidArgumentError(f"{path}: must end with .html or .png")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgumentError(f"{path}: cannot be written there")
    return make


def write_plot(path: Path, reports: Named) -> None:
    """Write reports by name to a ``.html`` or ``.png`` file. Raises what :func:`check_plot` does."""
    make = check_plot(path)
    try:
        write_whole(path, make(reports))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot be written ({error.strerror})") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside and move it to its place. Raises OSError, and leaves what was there."""
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(aside).unlink()
