"""``expertwire bench``: options in, exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expertwire.bench.outputs import Outputs
from expertwire.errors import Error, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from expertwire.bench.request import Request

WIDTH_WITHOUT_TERMINAL = 150
_MOST, _MOST_PER_GRAPH = 1 << 20, 10000  # as expertwire-bench has them


def _shape(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Shape (comma lists: every combination)")


def _method(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Method", **more)


def _mpi(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Ranks over MPI")


def _gpu(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="GPUs", **more)


def _built(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Programs of others that you have built")


# Written out: the module that holds them needs NumPy, which is loaded when a command is called.
WORKLOAD_HELP = (
    "Shapes by name, by comma: mscclpp-latency, mscclpp-bench, deepseek-decode, single-token, nemotron-latent, kimi-k3."
)
_ROUTING_HELP = "uniform, zipf:S, one-hot, empty-experts, observed-skew, or a trace of expertwire run."
_LIBS_HELP = (
    "Libraries, by comma: expertwire, expertwire-cpp, nccl-ep, deepep, mscclpp, flashinfer, torch-a2a, floor; or all."
)
Libs = Annotated[str, typer.Option(help=_LIBS_HELP)]
Workload = Annotated[str | None, _shape(WORKLOAD_HELP)]
Experts = Annotated[str | None, _shape("Experts of all ranks. [128]", "-e", "--experts")]
Tokens = Annotated[str | None, _shape("Tokens of a rank. [128]", "-t", "--tokens")]
Hidden = Annotated[str | None, _shape("Elements of a row. [7168]", "-d", "--hidden")]
Topk = Annotated[str | None, _shape("Experts of a token. [8]", "-k", "--topk")]
Ranks = Annotated[str | None, _shape("Ranks of a host. [2]", "--ranks", "--nproc-per-node")]
Layout = Annotated[str, _shape("expert-major, rank-major.")]
Combine = Annotated[str, _shape("rank-local-reduce, direct-send.")]
Payload = Annotated[str, _shape("bf16, fp8-e4m3, mxfp8.")]
RoutingName = Annotated[str, _shape(_ROUTING_HELP)]
Seed = Annotated[int, _method("Of tokens, routing and weights.", min=0)]
Threads = Annotated[bool, _method("What ranks are.", "--threads/--processes")]
Timeout = Annotated[float, _method("Longest wait for a rank, seconds.")]
Warmup = Annotated[int, _method("Untimed pairs of each library.", "-w", "--warmup", min=0, max=_MOST)]
Iters = Annotated[int, _method("Timed pairs of each library.", "-i", "--iters", min=1, max=_MOST)]
Rounds = Annotated[int, _method("Turns in which the libraries alternate.", min=1, max=_MOST)]
Validate = Annotated[bool, _method("Check every timed pair.", "--validate")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and measure nothing.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the result: a .html page or a .png picture.")]
Device = Annotated[str, _gpu("cpu, cuda, or auto: GPUs if there are some.", "--device")]
CudaGraph = Annotated[bool | None, _gpu("Time captured graphs. [yes]", "--cuda-graph/--no-cuda-graph")]
ItersPerGraph = Annotated[
    int | None, _gpu("Pairs in a captured graph. [50]", "--iters-per-graph", min=1, max=_MOST_PER_GRAPH)
]
KernelOnly = Annotated[
    bool | None, _gpu("Time the kernels alone; or leave that out. [both]", "--kernel-only/--no-kernel-rows")
]
NumBlocks = Annotated[
    str | None, _gpu("Grid sizes: N, DISPATCH:COMBINE or all, by comma. [the library's own]", "--num-blocks")
]
Overlap = Annotated[
    str | None, _gpu("gemm: time pairs of expertwire beside a GEMM, too, and say how much it hides.", "--overlap")
]
NcclLibPath = Annotated[str, _built("Folder of the NCCL libraries for the next one.", "--nccl-lib-path")]
NcclEpBenchPath = Annotated[str, _built("ep_bench of NCCL EP, for nccl-ep-bench.", "--nccl-ep-bench")]
MscclppBenchPath = Annotated[str, _built("mscclpp_ep_bench, for mscclpp-cpp-bench.", "--mscclpp-cpp-bench")]
NodeList = Annotated[
    str | None, _mpi('Hosts on which mpirun starts ranks: "IP IP". [none: this host, no MPI]', "--nodes")
]
Interface = Annotated[str | None, _mpi("Network interface that MPI uses. [its own choice]", "--iface")]
MpiPrefix = Annotated[str | None, _mpi("Folder of the MPI installation. [mpirun of the PATH]", "--mpi-prefix")]


# One parameter an option: this is how typer declares a command line.
def bench(
    context: typer.Context,
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
    plot_file: PlotFile = None,
    device: Device = "auto",
    cuda_graph: CudaGraph = None,
    iters_per_graph: ItersPerGraph = None,
    kernel_only: KernelOnly = None,
    num_blocks: NumBlocks = None,
    overlap: Overlap = None,
    nccl_lib_path: NcclLibPath = "",
    nccl_ep_bench: NcclEpBenchPath = "",
    mscclpp_cpp_bench: MscclppBenchPath = "",
    nodes: NodeList = None,
    iface: Interface = None,
    mpi_prefix: MpiPrefix = None,
) -> None:
    """Check several libraries against the reference, then time their dispatch and combine.

    Exit status 1: a library was wrong or broke. 2: an option cannot be used.
    """
    if context.invoked_subcommand is not None:
        return
    from expertwire.bench.adapters import parse_libs
    from expertwire.bench.nodes import Nodes
    from expertwire.bench.request import Request, Sweep, parse_device, parse_overlap
    from expertwire.bench.schema import Settings

    gpu_options: dict[str, object] = {"cuda-graph": cuda_graph, "iters-per-graph": iters_per_graph}
    gpu_options |= {"kernel-only": kernel_only, "overlap": overlap}
    sweep = Sweep(
        experts, tokens, hidden, topk, ranks, layout, combine_mode, dispatch_dtype, routing, workload, seed, num_blocks
    )
    try:
        libs, captures, host_rows = parse_libs(ep_lib), cuda_graph is not False, kernel_only is not True
        settings = Settings(
            *(warmup, iters, rounds, threads, validate, timeout, parse_device(device, gpu_options)),
            cuda_graph=captures,
            iters_per_graph=iters_per_graph or Settings.iters_per_graph,
            kernel_rows=kernel_only is not False,
            host_rows=host_rows,
            overlap=parse_overlap(overlap, libs, cuda_graph=captures, host_rows=host_rows),
            nccl_lib_path=nccl_lib_path,
            nccl_ep_bench=nccl_ep_bench,
            mscclpp_cpp_bench=mscclpp_cpp_bench,
        )
        where = Nodes.parse(nodes, iface, mpi_prefix)
        problems = sweep.problems(where.num_nodes if where else 1)
        request = Request(libs, problems, settings, ("expertwire", *sys.argv[1:]), where)
        right = _carry_out(request, dry_run, Outputs(json_file, plot_file))
    except (Error, OSError, MemoryError) as error:
        typer.secho(f"expertwire bench: {error}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, (InvalidArgumentError, UnsupportedError)) else 1) from None
    if not right:
        raise typer.Exit(1)


def _carry_out(request: Request, dry_run: bool, outputs: Outputs) -> bool:
    """Measure and show, or show what would be measured. Returns whether every library that ran was right."""
    from rich.console import Console

    from expertwire.bench.report import print_report
    from expertwire.bench.request import print_plan, run_request

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    outputs.check()
    if dry_run:
        print_plan(request, console)
        return True
    report = run_request(request, Console(stderr=True, soft_wrap=True))
    try:
        outputs.write(report)
    finally:  # a full disk does not cost the table, nor a closed terminal the file
        print_report(report, console)
    return not report.failed
