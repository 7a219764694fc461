"""The benchmark on GPUs, as far as it can be tried without one; and all of it where there are two."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertwire as ew
from expertwire.bench import crew, gpus, measure
from expertwire.bench.adapters import ADAPTERS, ON_GPUS, adapters_of_others, obstacle
from expertwire.bench.adapters.base import Belongings, RankContext
from expertwire.bench.adapters.floor import Floor
from expertwire.bench.adapters.floor_gpu import ExchangeParams, in_words
from expertwire.bench.adapters.peer import Peer, far_apart
from expertwire.bench.adapters.prebuilt import NcclEpBench, parse_summary
from expertwire.bench.gpu_module import compile_source
from expertwire.bench.gpu_timing import split_records
from expertwire.bench.gpus import Gpus, find_gpus
from expertwire.bench.inputs import Observation, observe_dispatch, rank_input, reference_observations
from expertwire.bench.job import Job, RankTimes
from expertwire.bench.kernel_trace import KernelRecord, kernels_of_trace
from expertwire.bench.overlap_timing import WAYS
from expertwire.bench.request import Request, Sweep, parse_device, parse_overlap
from expertwire.bench.schema import PHASES, Problem, Run, Settings, Status
from expertwire.errors import BackendError, InvalidArgumentError, UnsupportedError
from expertwire.nvrtc import find_nvrtc_folders
from expertwire.types import CombineMode, DispatchDataType, DispatchLayout
from test_bench import QUICK, SMALL

ON_GPU = Settings(warmup=1, iters=6, rounds=2, device="cuda", iters_per_graph=3, timeout_s=20.0)
LAYOUTS = list(DispatchLayout)[:2]


# Kernels


def records(*names: str) -> list[KernelRecord]:
    """One kernel after the other; the i-th takes 10 + i ns."""
    return [KernelRecord(name, 100 * i, 100 * i + 10 + i) for i, name in enumerate(names)]


def test_kernels_are_told_apart_by_their_place_in_a_pair() -> None:
    ran = records(*("prepare", "dispatch", "combine") * 3)
    times, missing = split_records(ran[::-1], (["prepare", "dispatch"], ["combine"]), num_pairs=3, skipped=1)
    assert missing == {}
    assert times == {"dispatch-kernel": [13 + 14, 16 + 17], "combine-kernel": [15, 18]}


@pytest.mark.parametrize(
    ("ran", "names"),
    [
        (records("d", "c", "d"), (["d"], ["c"])),
        (records("d", "c", "x", "c"), (["d"], ["c"])),
        (records(), ([], [])),
    ],
)
def test_kernels_that_do_not_make_up_pairs_give_a_reason(
    ran: list[KernelRecord], names: tuple[list[str], list[str]]
) -> None:
    times, missing = split_records(ran, names, num_pairs=2, skipped=0)
    assert times == {}
    assert missing.keys() == {"dispatch-kernel", "combine-kernel"}
    assert f"{len(ran)} kernels were recorded in 2 pairs" in missing["combine-kernel"]


def test_a_trace_of_torch_gives_its_kernels_alone() -> None:
    events = [
        {"cat": "cpu_op", "name": "a", "ts": 1.0, "dur": 2.0},
        {"cat": "kernel", "name": "k", "ts": 1234567.125, "dur": 3.456},
        {"name": "process_name", "ph": "M"},
    ]
    assert kernels_of_trace(events) == [KernelRecord("k", 1234567125, 1234567125 + 3456)]


needs_nvrtc = pytest.mark.skipif(not find_nvrtc_folders(), reason="needs the nvidia-cuda-nvrtc package")
FLOOR = Path(gpus.__file__).with_name("floor.cu").read_text(encoding="utf-8")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_floor_compiles_and_its_parameters_are_the_kernels(architecture: str) -> None:
    struct = re.search(r"struct ExchangeParams {(.*?)};", FLOOR, re.DOTALL)
    assert struct
    fields = re.findall(r"^ [^/\n]*?(\w+)(?:\[kMaxRanks\])?;", struct[1], re.MULTILINE)
    assert fields == [name for name, *_ in ExchangeParams._fields_]
    same_size = f"static_assert(sizeof(ExchangeParams) == {ctypes.sizeof(ExchangeParams)});"
    assert compile_source(f"{FLOOR}\n{same_size}", architecture).startswith(b"\x7fELF")


@needs_nvrtc
def test_what_does_not_compile_is_said_with_the_compilers_words() -> None:
    with pytest.raises(BackendError, match=r"NVRTC: .*expected an expression"):
        compile_source("__global__ void f() { int x = ; }", "sm_90")


def test_rows_of_the_floor_are_whole_words() -> None:
    assert in_words(np.ones((2, 132), np.uint8)).shape == (2, 144)
    assert in_words(np.ones((2, 144), np.uint8)).shape == (2, 144)
    assert in_words(np.ones((0, 20), np.uint8)).shape == (0, 32)


# Arrays


@pytest.mark.parametrize("dtype", DispatchDataType)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_in_tensors_are_observed_like_arrays(layout: DispatchLayout, dtype: DispatchDataType) -> None:
    pytest.importorskip("torch")
    from expertwire.bench.torch_arrays import output_to_host, to_tensor

    problem = replace(SMALL, layout=layout, dispatch_dtype=dtype, routing="empty-experts")
    expected = reference_observations(problem, [rank_input(problem, rank) for rank in range(2)])

    def received(group: ew.Group) -> dict[str, Any]:
        own = rank_input(problem, group.rank)
        with ew.MoECommunicator(group, problem.config(20.0)) as comm:
            arrays = (to_tensor(array, "cpu") for array in (own.x, own.topk_ids, own.weights) if array is not None)
            output, _ = comm.dispatch(*arrays)
            return observe_dispatch(output_to_host(output))

    with ThreadPoolExecutor(2) as pool:
        for rank, observed in enumerate(pool.map(received, ew.local_group(2))):
            wanted = expected[rank]
            assert ON_GPUS["expertwire"].difference(Observation(observed, wanted.combined), wanted) == ""


# Which machine, and what is asked of it


def test_ranks_need_a_gpu_each() -> None:
    problems = Sweep(experts="8", hidden="128", topk="3", tokens="5", ranks="2,3").problems()
    request = Request(["floor"], problems, ON_GPU, ())
    request.check(Gpus(names=("a", "b", "c")))
    with pytest.raises(InvalidArgumentError, match=re.escape("--ranks 3: this machine shows 2 GPU(s)")):
        request.check(Gpus(names=("a", "b")))
    with pytest.raises(InvalidArgumentError, match="--device cuda: no driver"):
        request.check(Gpus(problem="no driver"))
    with pytest.raises(InvalidArgumentError, match="--threads: on GPUs"):
        replace(request, settings=replace(ON_GPU, threads=True)).check(Gpus(names=("a", "b", "c")))


def test_auto_takes_gpus_only_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"now": Gpus(names=("a",), driver="1", cuda="13.0")}
    monkeypatch.setattr("expertwire.bench.request.find_gpus", lambda: found["now"])
    assert parse_device("auto", {}) == "cuda"
    assert parse_device("cpu", {}) == "cpu"
    found["now"] = replace(found["now"], problem="needs torch")
    assert parse_device("auto", {}) == "cpu"
    with pytest.raises(InvalidArgumentError, match="--iters-per-graph: needs NVIDIA GPUs"):
        parse_device("auto", {"cuda-graph": None, "iters-per-graph": 3})


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str, *_: object) -> None:
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert find_gpus() == Gpus(problem="no NVIDIA driver: libcuda.so.1: not found")


@pytest.mark.parametrize(("text", "grids"), [("16,32:64,all", [(16,), (32, 64), ()])])
def test_grid_sizes_are_swept(text: str, grids: list[tuple[int, ...]]) -> None:
    problems = Sweep(num_blocks=text).problems()
    assert [problem.num_blocks for problem in problems] == grids
    configs = [problem.config(device="cuda:0").num_blocks for problem in problems]
    assert configs == [(16, 16), (32, 64), None]
    assert [problem.title().rpartition("  ")[2] for problem in problems[:2]] == ["blocks 16", "blocks 32:64"]


# Libraries of others


@pytest.mark.parametrize("peer", adapters_of_others(), ids=lambda peer: str(peer.name))
def test_a_library_that_is_not_there_says_how_to_get_it(peer: type[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertwire.bench.adapters.peer.find_spec", lambda _module: None)
    assert obstacle(peer.name, SMALL, QUICK) == "needs NVIDIA GPUs: --device cuda"
    assert obstacle(peer.name, SMALL, ON_GPU) == f"not installed: {peer.install}"
    monkeypatch.setattr("expertwire.bench.adapters.peer.find_spec", lambda module: module)
    supported = replace(SMALL, layout=peer.layouts[0])
    assert obstacle(peer.name, supported, ON_GPU) == ""
    assert obstacle(peer.name, replace(supported, num_experts=7), ON_GPU) == "refused: 7 experts on 2 ranks are uneven"
    for layout in set(LAYOUTS) - set(peer.layouts):
        assert "refused: expert-major is not among" in obstacle(peer.name, replace(SMALL, layout=layout), ON_GPU)


@pytest.mark.parametrize("peer", adapters_of_others(), ids=lambda peer: str(peer.name))
def test_what_a_library_raises_at_first_is_a_refusal(peer: type[Peer]) -> None:
    pytest.importorskip("torch")
    problem = replace(SMALL, num_ranks=1)
    (group,) = ew.local_group(1)
    context = RankContext(group, problem, QUICK, rank_input(problem, 0), lambda word: [word], Belongings())
    with pytest.raises(UnsupportedError, match=r"ModuleNotFoundError: No module named"):
        peer(context)


class Refuses(Floor):
    """Does not like the shape, on one rank alone."""

    name = "refuses"

    def __init__(self, context: RankContext) -> None:
        if context.group.rank == 1:
            raise UnsupportedError("top-k 3 > 2")
        super().__init__(context)


def test_a_refusal_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, Refuses.name, Refuses)
    refused, floor = measure.measure(SMALL, QUICK, ["refuses", "floor"]).results
    assert (refused.status, refused.reason) == (Status.SKIPPED, "refused: top-k 3 > 2")
    assert floor.status is Status.OK


@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_may_return_rows_in_any_order_and_round_elsewhere(layout: DispatchLayout) -> None:
    problem = replace(SMALL, layout=layout)
    (expected, _) = Peer.expected(problem, [rank_input(problem, rank) for rank in range(2)])
    rounded = (expected.combined.astype(np.float32) * (1 + 2.0**-8)).astype(expected.combined.dtype)
    assert Peer.difference(Observation(expected.dispatch, rounded), expected) == ""
    twice = (expected.combined.astype(np.float32) * 2).astype(expected.combined.dtype)
    assert "differ by more than rounding" in Peer.difference(Observation(expected.dispatch, twice), expected)
    nothing = np.full_like(expected.combined, np.nan)
    assert "differ by more than rounding" in Peer.difference(Observation(expected.dispatch, nothing), expected)
    lost = {**expected.dispatch, "rows": np.roll(expected.dispatch["rows"], 1)}
    assert "dispatch rows" in Peer.difference(Observation(lost, expected.combined), expected)
    assert far_apart(expected.combined[1:], expected.combined, relative=1, of_largest=1).startswith("combined tokens: ")


def test_programs_of_others_are_told_the_shape_and_their_summary_is_read(tmp_path: Path) -> None:
    text = """
    === Summary (Low Latency, across 2 ranks) ===
    Dispatch (BF16): avg=12.50 us, min=12.1 us, max=13.0 us
    Combine (BF16):  avg=9.25 us, min=9.0 us, max=10.0 us
    Total (D+C):     avg=21.75 us, min=21.1 us, max=23.0 us
    Dispatch: avg=1.0 us, min=1.0 us, max=1.0 us
    """
    averages = {phase: samples.tolist() for phase, samples in parse_summary(text).items()}
    assert averages == {"dispatch-launch": [[12500]], "combine-launch": [[9250]], "pair-launch": [[21750]]}
    assert parse_summary("no such thing") == {}
    program = tmp_path / "ep_bench"
    program.write_text("#!/bin/sh\n")
    asked = replace(ON_GPU, nccl_ep_bench=str(program))
    assert NcclEpBench.command(replace(SMALL, layout=DispatchLayout.RANK_MAJOR), asked) == [
        *(str(program), "-a", "ll", "-t", "5", "-d", "128", "-k", "3", "-e", "8", "-w", "1", "-i", "6", "-L", "rm")
    ]
    assert "is no program" in obstacle("nccl-ep-bench", SMALL, asked)
    assert obstacle("nccl-ep-bench", SMALL, ON_GPU) == "not installed: build it and name it with --nccl-ep-bench"


# Ranks that break


class Ends:
    """Stands where mpirun does: ranks are threads of this process, and are killed when it is the turn of one library.

    Attributes:
        killer: the library.
        times: how often that happens.
        runs: the libraries of all jobs of each run.
    """

    def __init__(self, killer: str, times: int) -> None:
        self.killer, self.times = killer, times
        self.runs: list[list[tuple[str, ...]]] = []

    def run(self, num_ranks: int, target: Callable[..., None], jobs: list[Job]) -> None:
        """See Nodes.run."""
        self.runs.append([job.libs for job in jobs])
        fatal = next((job for job in jobs if self.killer in job.libs), None) if len(self.runs) <= self.times else None
        before = jobs[: jobs.index(fatal)] if fatal else jobs
        with ThreadPoolExecutor(num_ranks) as pool:
            list(pool.map(target, ew.local_group(num_ranks), [before] * num_ranks) if before else ())
        if fatal:
            for _ in range(fatal.libs.index(self.killer)):
                fatal.count_step()
            raise BackendError("rank 1 was killed by SIGSEGV")


def run_with(ends: Ends, problems: list[Problem], libs: list[str]) -> list[Run]:
    listener = measure._Told(lambda _count, _doing: None)
    return measure.measure_all(problems, QUICK, libs, listener, ends)  # type: ignore[arg-type]


def test_what_breaks_the_ranks_gets_the_blame_and_the_others_go_on() -> None:
    ends = Ends("floor", times=1)
    first, second = run_with(ends, [SMALL, replace(SMALL, num_tokens=3)], ["expertwire", "floor"])
    assert ends.runs == [[("expertwire", "floor")] * 2, [("expertwire",), ("expertwire", "floor")]]
    assert [result.status for result in first.results] == [Status.OK, Status.FAILED]
    assert first.result("floor").reason == "BackendError: rank 1 was killed by SIGSEGV"
    assert [result.status for result in second.results] == [Status.OK, Status.OK]


def test_what_breaks_the_ranks_again_and_again_is_left_out() -> None:
    problems = [replace(SMALL, num_tokens=tokens) for tokens in (2, 3, 4)]
    runs = run_with(Ends("floor", times=9), problems, ["floor", "expertwire"])
    assert [run.result("floor").reason for run in runs] == [
        "BackendError: rank 1 was killed by SIGSEGV",
        "BackendError: rank 1 was killed by SIGSEGV",
        "left out: it broke the processes of all ranks before",
    ]
    assert [run.result("expertwire").status for run in runs] == [Status.OK] * 3


def test_a_failure_among_kernels_does_not_cost_the_other_figures(tmp_path: Path) -> None:
    job = Job(SMALL, ON_GPU, ("a",), kernels=True, folder=tmp_path)
    for failure, lost in (("no CUPTI", False), ("rank 0: Error: wrong result: tokens", True)):
        found = crew.Found("title", {"a": [RankTimes({"pair": [1]}) for _ in range(2)]})
        found.add(job, {"a": [RankTimes(failure=failure) for _ in range(2)]})
        assert bool(found.times["a"][0].failure) is lost
        assert (found.times["a"][0].missing == {}) is lost


def test_times_travel_through_files(tmp_path: Path) -> None:
    job = Job(SMALL, QUICK, ("a", "b"), kernels=False, folder=tmp_path)
    times = RankTimes({"pair": [1, 2]}, {"dispatch": "why"})
    job.write_times(0, {"a": times, "b": times})
    assert job.read_times() == {}
    job.write_times(1, {"a": times})
    assert job.read_times() == {"a": [times, times]}
    assert job.again().read_times() == {}
    assert [job.without({"a"}).libs, job.lib_in_turn()] == [("b",), "a"]
    job.count_step()
    assert (job.steps_done(), job.lib_in_turn()) == (1, "b")


def test_overlap_is_asked_for_with_all_that_it_takes() -> None:
    assert parse_overlap(None, ["floor"], cuda_graph=False, host_rows=False) == ""
    assert parse_overlap("gemm", ["floor", "expertwire"], cuda_graph=True, host_rows=True) == "gemm"
    for name, libs, cuda_graph, host_rows, words in (
        ("sleep", ["expertwire"], True, True, "--overlap sleep: must be gemm"),
        ("gemm", ["floor"], True, True, "measures expertwire, which --ep-lib leaves out"),
        ("gemm", ["expertwire"], False, True, "captured graphs, which --no-cuda-graph leaves out"),
        ("gemm", ["expertwire"], True, False, "captured graphs, which --kernel-only leaves out"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            parse_overlap(name, libs, cuda_graph=cuda_graph, host_rows=host_rows)


def test_every_order_of_micro_batches_is_a_phase() -> None:
    assert list(WAYS) == [phase for phase in PHASES if phase.startswith("batches-")]


# With GPUs


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_timed_beside_a_gemm(layout: DispatchLayout) -> None:
    problem = replace(SMALL, hidden_size=1024, num_tokens=32, layout=layout)
    settings = replace(ON_GPU, overlap="gemm", kernel_rows=False)
    ours, floor = measure.measure(problem, settings, ["expertwire", "floor"]).results
    assert ours.status is Status.OK, ours.reason
    assert ours.phases.keys() >= set(WAYS)
    assert ours.hidden_us.keys() == {"batches-two-streams", "batches-two-phases"}
    assert not floor.hidden_us
    assert not floor.phases.keys() & set(WAYS)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", DispatchDataType)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_are_measured(layout: DispatchLayout, dtype: DispatchDataType) -> None:
    problem = replace(SMALL, hidden_size=1024, layout=layout, dispatch_dtype=dtype)
    problem = replace(problem, combine_mode=CombineMode.DIRECT_SEND)
    run = measure.measure(problem, replace(ON_GPU, validate=True), ["expertwire", "torch-a2a", "floor"])
    ours, torch_a2a, floor = run.results
    for result in (ours, floor):
        assert result.status is Status.OK, result.reason
        assert {"pair", "pair-launch", "dispatch-host"} <= result.phases.keys()
        assert {"dispatch-kernel", "combine-kernel"} <= result.phases.keys(), result.missing
    assert torch_a2a.status is (Status.OK if dtype is DispatchDataType.BF16 else Status.SKIPPED), torch_a2a.reason
