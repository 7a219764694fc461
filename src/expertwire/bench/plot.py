"""Writes reports as a page or a picture, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from expertwire.bench.outputs import check_file, write_whole
from expertwire.bench.schema import Report
from expertwire.errors import InvalidArgumentError

Named = Sequence[tuple[str, Report]]


def check_plot(option: str, path: Path) -> Callable[[Named], bytes]:
    """Return what makes the content of a ``.html`` or ``.png`` file from reports by name.

    Args:
        option: names the file on the command line, and errors begin with it.
        path: of the file.

    Raises:
        InvalidArgumentError: another ending, or a path that cannot be written.
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
        raise InvalidArgumentError(f"{option} {path}: must end with .html or .png")
    check_file(option, path)
    return make


def write_plot(option: str, path: Path, reports: Named) -> None:
    """Write reports by name to a ``.html`` or ``.png`` file. Raises what :func:`check_plot` does."""
    make = check_plot(option, path)
    write_whole(option, path, make(reports))
