"""``expertwire bench report`` and ``compare``: what is done with the JSON files of ``expertwire bench``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from expertwire.bench.command import WIDTH_WITHOUT_TERMINAL, bench
from expertwire.errors import InvalidArgumentError, UnsupportedError

Files = Annotated[list[Path], typer.Argument(help="Files of expertwire bench --json.", show_default=False)]
Output = Annotated[Path, typer.Option("-o", "--output", help="A .html page, or the charts alone as a .png picture.")]
Before = Annotated[Path, typer.Argument(help="The file to compare with.", show_default=False)]
After = Annotated[Path, typer.Argument(help="The file that is compared.", show_default=False)]
Threshold = Annotated[float, typer.Option(help="Percent by which a median may grow, if beyond the spread.")]
OnlyLibs = Annotated[str | None, typer.Option("--ep-lib", help="Compare these libraries alone, by comma.")]
DifferentMachines = Annotated[bool, typer.Option("--allow-different-machines", help="Compare them nevertheless.")]


def make_bench() -> typer.Typer:
    """Returns ``expertwire bench`` with its sub-commands; without one, it measures."""
    app = typer.Typer(invoke_without_command=True, pretty_exceptions_enable=False)
    app.callback()(bench)
    app.command()(report)
    app.command()(compare)
    return app


def report(context: typer.Context, files: Files, *, output: Output = Path("report.html")) -> None:
    """Draw results as one self-contained page, or as a picture.

    Exit status 2: a file cannot be used or the output not be written.
    """
    from expertwire.bench.plot import write_plot
    from expertwire.bench.stored import read_report

    try:
        _no_options_before(context)
        write_plot("-o", output, [(path.name, read_report(path)) for path in files])
    except (InvalidArgumentError, UnsupportedError) as error:
        typer.secho(f"expertwire bench report: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


def compare(
    context: typer.Context,
    before: Before,
    after: After,
    *,
    threshold: Threshold = 5.0,
    ep_lib: OnlyLibs = None,
    allow_different_machines: DifferentMachines = False,
) -> None:
    """Say what got faster or slower between two results, beyond the spread of their rounds.

    Exit status 1: something is slower by more than the threshold, or failed. 2: the files cannot be compared.
    """
    import sys

    from rich.console import Console

    from expertwire.bench.compare import compare as compare_reports
    from expertwire.bench.compare import print_comparison
    from expertwire.bench.stored import read_report

    try:
        _no_options_before(context)
        if not 0 <= threshold < math.inf:
            raise InvalidArgumentError(f"--threshold {threshold:g}: must be a percentage of at least 0")
        libs = None if ep_lib is None else [word.strip() for word in ep_lib.split(",")]
        found = compare_reports(
            read_report(before), read_report(after), libs=libs, any_machine=allow_different_machines
        )
    except InvalidArgumentError as error:
        typer.secho(f"expertwire bench compare: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    print_comparison(found, threshold / 100, console)
    if found.gone or found.regressions(threshold / 100):
        raise typer.Exit(1)


def _no_options_before(context: typer.Context) -> None:
    """Raises InvalidArgumentError if options of the measurement stand before a sub-command, which does not use them."""
    measuring = context.parent
    for name in measuring.params if measuring else ():
        if measuring is not None and str(measuring.get_parameter_source(name)).endswith("COMMANDLINE"):
            option = name.replace("_", "-")
            raise InvalidArgumentError(f"--{option} stands before {context.info_name}, which does not measure")
