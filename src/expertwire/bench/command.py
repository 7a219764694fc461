"""``expertwire bench``: options in, exit status out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertwire.errors import Error, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from expertwire.bench.request import Request

_WIDTH_WITHOUT_TERMINAL = 150


def _shape(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Shape (comma lists: every combination)")


def _method(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Method", **more)


# Written out: the module that holds them needs NumPy, which is loaded when a command is called.
WORKLOAD_HELP = (
    "A shape by name: mscclpp-latency, mscclpp-bench, deepseek-decode, single-token, nemotron-latent, kimi-k3."
)
_ROUTING_HELP = "uniform, zipf:S, one-hot, empty-experts, observed-skew, or a trace of expertwire run."
Libs = Annotated[str, typer.Option(help="Libraries, by comma: expertwire, torch-a2a, floor; or all.")]
Workload = Annotated[str | None, _shape(WORKLOAD_HELP)]
Experts = Annotated[str | None, _shape("Experts of all ranks. [128]", "-e", "--experts")]
Tokens = Annotated[str | None, _shape("Tokens of a rank. [128]", "-t", "--tokens")]
Hidden = Annotated[str | None, _shape("Elements of a row. [7168]", "-d", "--hidden")]
Topk = Annotated[str | None, _shape("Experts of a token. [8]", "-k", "--topk")]
Ranks = Annotated[str | None, _shape("Ranks on this host. [2]", "--ranks", "--nproc-per-node")]
Layout = Annotated[str, _shape("expert-major, rank-major.")]
Combine = Annotated[str, _shape("rank-local-reduce, direct-send.")]
Payload = Annotated[str, _shape("bf16, fp8-e4m3.")]
RoutingName = Annotated[str, _shape(_ROUTING_HELP)]
Seed = Annotated[int, _method("Of tokens, routing and weights.", min=0)]
Threads = Annotated[bool, _method("What ranks are.", "--threads/--processes")]
Timeout = Annotated[float, _method("Longest wait for a rank, seconds.")]
Warmup = Annotated[int, _method("Untimed pairs of each library.", "-w", "--warmup", min=0)]
Iters = Annotated[int, _method("Timed pairs of each library.", "-i", "--iters", min=1)]
Rounds = Annotated[int, _method("Turns in which the libraries alternate.", min=1)]
Validate = Annotated[bool, _method("Check every timed pair.", "--validate")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and measure nothing.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
CudaGraph = Annotated[bool | None, typer.Option("--cuda-graph/--no-cuda-graph", hidden=True)]
ItersPerGraph = Annotated[int | None, typer.Option(hidden=True)]
KernelOnly = Annotated[bool, typer.Option("--kernel-only", hidden=True)]
Nodes = Annotated[str | None, typer.Option(hidden=True)]


# One parameter an option: this is how typer declares a command line.
def bench(
    *,
    ep_lib: Libs = "expertwire,floor",
    workload: Workload = None,
    experts: Experts = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    topk: Topk = None,
    ranks: Ranks = None,
    layout: Layout = "expert-major",
    combine_mode: Combine = "rank-local-reduce",
    dispatch_dtype: Payload = "bf16",
    routing: RoutingName = "uniform",
    warmup: Warmup = 10,
    iters: Iters = 100,
    rounds: Rounds = 5,
    threads: Threads = False,
    seed: Seed = 1,
    timeout: Timeout = 100.0,
    validate: Validate = False,
    dry_run: DryRun = False,
    json_file: JsonFile = None,
    cuda_graph: CudaGraph = None,
    iters_per_graph: ItersPerGraph = None,
    kernel_only: KernelOnly = False,
    nodes: Nodes = None,
) -> None:
    """Check several libraries against the reference, then time their dispatch and combine.

    Exit status 1: a library was wrong or broke. 2: an option cannot be used.
    """
    from expertwire.bench.adapters import parse_libs
    from expertwire.bench.request import Request, Sweep
    from expertwire.bench.schema import Settings

    gpu_only = {
        "cuda_graph": cuda_graph,
        "iters_per_graph": iters_per_graph,
        "kernel_only": kernel_only,
        "nodes": nodes,
    }
    sweep = Sweep(experts, tokens, hidden, topk, ranks, layout, combine_mode, dispatch_dtype, routing, workload, seed)
    settings = Settings(warmup, iters, rounds, threads, validate, timeout)
    try:
        _refuse_gpu_options(gpu_only)
        request = Request(parse_libs(ep_lib), sweep.problems(), settings, ("expertwire", *sys.argv[1:]))
        right = _carry_out(request, dry_run, json_file)
    except (Error, OSError) as error:
        typer.secho(f"expertwire bench: {error}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, (InvalidArgumentError, UnsupportedError)) else 1) from None
    if not right:
        raise typer.Exit(1)


def _refuse_gpu_options(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{option}: needs NVIDIA GPUs, which this version of the benchmark does not use")


def _carry_out(request: Request, dry_run: bool, json_file: Path | None) -> bool:
    """Measure and show, or show what would be measured. Returns whether every library that ran was right."""
    from rich.console import Console

    from expertwire.bench.report import print_report
    from expertwire.bench.request import print_plan, run_request

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)
    if dry_run:
        print_plan(request, console)
        return True
    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidArgumentError(f"--json {json_file}: its folder does not exist")
    report = run_request(request, Console(stderr=True, soft_wrap=True))
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json()) + "\n", encoding="utf-8")
    finally:  # a full disk does not cost the table, nor a closed terminal the file
        print_report(report, console)
    return not report.failed
