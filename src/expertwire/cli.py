"""The command line: ``expertwire info``, ``run``, ``bench`` and ``compile``.

A command imports what it needs when it is called, so that ``info`` answers where the rest cannot even be loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from expertwire.bench.command import Combine, Experts, Hidden, Layout, Payload, Ranks, Tokens, Topk, Workload
from expertwire.errors import BackendError, Error, InvalidArgumentError, UnsupportedError

#: Exit statuses besides 0.
FAILED, BAD_USAGE = 1, 2
#: The exit status of a command that a signal has ended is this and its number.
_SIGNALLED = 128
#: What is raised for a command line that cannot be parsed: a class of Typer's or, in older versions, of Click's.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _show_version(asked: bool) -> None:
    if asked:
        import expertwire

        typer.echo(f"expertwire {expertwire.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
]


def _before_command(_version: Version = False) -> None:
    """Take the options that stand before a command. Each has acted by itself already."""


def _model(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Model")


def _kinds(text: str, name: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel="Communicators made with more than a shape")


def _ranks(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Ranks")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Show what this machine offers, which backend would be used, and what to do about each shortfall."""
    from expertwire.info import collect, show

    found = collect()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show(found)


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts to read; none: the Python standard library.", show_default=False)
    ] = None,
    *,
    tokens: Annotated[int, typer.Option(help="Most tokens to take from the text.")] = 32768,
    layers: Annotated[int, _model("Mixture-of-experts layers.")] = 2,
    experts: Annotated[int, _model("Experts of a layer; a multiple of --ranks.")] = 64,
    topk: Annotated[int, _model("Experts that a token chooses.")] = 6,
    hidden: Annotated[int, _model("Elements of a token's state.")] = 1024,
    intermediate: Annotated[int, _model("Inner width of an expert.")] = 128,
    vocabulary: Annotated[int, _model("Rows of the embedding table.")] = 8192,
    seed: Annotated[int, _model("Of all parameters.")] = 0,
    ranks: Annotated[int, _ranks("Processes; each holds its share of the experts.")] = 4,
    max_tokens_per_rank: Annotated[int, _ranks("Most tokens of a rank in a step.")] = 128,
    layout: Annotated[str, _ranks("expert-major, rank-major.")] = "expert-major",
    combine_mode: Annotated[str, _ranks("rank-local-reduce, direct-send.")] = "rank-local-reduce",
    dispatch_dtype: Annotated[str, _ranks("bf16, fp8-e4m3, mxfp8.")] = "bf16",
    timeout: Annotated[float, _ranks("Longest wait for a rank, seconds.")] = 100.0,
    check: Annotated[bool, typer.Option(help="Hold every bit against the single-process reference.")] = True,
    save_trace: Annotated[Path | None, typer.Option(help="Write the routing of every token (npz).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where a failure came from.")] = False,
) -> None:
    """Run mixture-of-experts layers over real text on several ranks, and hold every bit against the reference.

    Exit status: 0; 1 if a bit differs or a rank fails; 2 if an option is wrong.
    """
    from expertwire.run.execute import Request, execute
    from expertwire.run.model import ModelConfig
    from expertwire.run.plan import JobConfig, choice
    from expertwire.types import CombineMode, DispatchDataType, DispatchLayout

    try:
        config = JobConfig(
            ModelConfig(experts, topk, hidden, intermediate, layers, vocabulary, seed),
            ranks,
            max_tokens_per_rank,
            choice("--layout", layout, DispatchLayout),
            choice("--combine-mode", combine_mode, CombineMode),
            choice("--dispatch-dtype", dispatch_dtype, DispatchDataType),
            timeout,
        )
        identical = execute(Request(files or [], tokens, config, check, save_trace, json_file))
    except Exception as error:  # whatever a rank raised comes here; a user reads one line, and more on request
        if traceback:
            raise
        _leave("run", error)
    if not identical:
        raise typer.Exit(FAILED)


def compile_kernels(
    *,
    architecture: Annotated[str, typer.Option(help="GPUs, by comma, such as sm_90,sm_100.", show_default=False)],
    workload: Workload = None,
    experts: Experts = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    topk: Topk = None,
    ranks: Ranks = None,
    layout: Layout = "expert-major",
    combine_mode: Combine = "rank-local-reduce",
    dispatch_dtype: Payload = "bf16",
    validate: Annotated[bool, _kinds("For validate=True.", "--validate")] = False,
    mask: Annotated[bool, _kinds('For on_peer_loss="mask".', "--mask")] = False,
    two_phase: Annotated[bool, _kinds("For two_phase=True.", "--two-phase")] = False,
    block_overlap: Annotated[bool, _kinds("For block_overlap=True.", "--block-overlap")] = False,
) -> None:
    """Compile CUDA kernels ahead of time, so that communicators of these shapes find them in the cache.

    Needs no GPU. Exit status 1: kernels do not compile, or cannot be kept. 2: an option cannot be used, or there is no
    compiler.
    """
    from expertwire.bench.request import Sweep
    from expertwire.precompile import precompile_all
    from expertwire.types import PeerLossPolicy

    sweep = Sweep(experts, tokens, hidden, topk, ranks, layout, combine_mode, dispatch_dtype, workload=workload)
    fields: dict[str, Any] = {"validate": validate, "two_phase": two_phase, "block_overlap": block_overlap}
    if mask:
        fields["on_peer_loss"] = PeerLossPolicy.MASK
    num_lost = 0
    try:
        for result in precompile_all(sweep.problems(), [word.strip() for word in architecture.split(",")], **fields):
            typer.echo(result)
            num_lost += result.num_lost
    except Error as error:
        _leave("compile", error)
    if num_lost:
        which = f"{num_lost} kernels were compiled and could not be kept"
        _leave("compile", BackendError(f"{which}: set EXPERTWIRE_CACHE_DIR to a folder that can be written"))


def make_app() -> typer.Typer:
    """Returns the application with all commands."""
    from expertwire.bench.subcommands import make_bench

    app = typer.Typer(
        name="expertwire",
        help="Expert-parallel dispatch and combine for mixture-of-experts models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_before_command)
    for command in (info, run):
        app.command()(command)
    app.add_typer(make_bench(), name="bench")
    app.command("compile")(compile_kernels)
    return app


def main() -> NoReturn:
    """Runs the command line and ends the process."""
    with _signals_raise():
        status = _status_of(sys.argv[1:] or ["--help"])
    if status > _SIGNALLED and threading.active_count() > 1:
        # Ranks that are threads may be inside of a library: nobody waits for them, nor lets them see Python go.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Have what ends this process raise SystemExit, so that neither temporary folders nor other processes stay."""

    def leave(number: int, _frame: object) -> NoReturn:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)  # nothing interrupts the tidying up
        sys.exit(_SIGNALLED + number)

    # What is ignored stays ignored: nohup does so.
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


def _status_of(arguments: list[str]) -> int:
    """Runs a command and returns its exit status."""
    try:
        status = make_app()(arguments, prog_name="expertwire", standalone_mode=False)
    except _UsageError as error:
        _say_usage(error, arguments)
        return BAD_USAGE
    except typer.Abort:  # older versions of Typer make it of an interrupt
        return _SIGNALLED + signal.SIGINT
    except SystemExit as ended:
        status = ended.code
    return int(status or 0)


def _say_usage(error: Any, arguments: list[str]) -> None:
    """Tells in one line what is wrong with a command line."""
    command = error.ctx.command_path if error.ctx else f"expertwire {arguments[0]}"
    typer.secho(f"{command}: {' '.join(error.format_message().split())}", fg="red", err=True)


def _leave(command: str, error: Exception) -> NoReturn:
    """Tells in one line what went wrong and ends the command."""
    kind = "" if isinstance(error, (Error, OSError)) else f"{type(error).__name__}: "
    typer.secho(f"expertwire {command}: {kind}{error}", fg="red", err=True)
    raise typer.Exit(BAD_USAGE if isinstance(error, (InvalidArgumentError, UnsupportedError)) else FAILED)
