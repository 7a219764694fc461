"""Shows a job: progress while it runs, tables and the load of the experts afterwards, and the same numbers as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from expertwire.run.board import COMBINE, DISPATCH, EXPERTS, Difference
from expertwire.run.job import JobResult
from expertwire.run.plan import JobConfig
from expertwire.run.text import TokenizedText

#: Experts shown in a chart: all if they are no more than this, else the busiest and the idlest.
MAX_BARS, NUM_BUSIEST, NUM_IDLEST = 16, 10, 5
_BAR_WIDTH = 40
_PLAIN_LINES = 4


class BarProgress:
    """A progress bar for terminals; the methods are those of :class:`expertwire.run.job.Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, phase: str, num_tokens: int) -> None:
        """Starts a new bar."""
        columns = TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task(phase, total=num_tokens)
        self._bar.start()

    def update(self, num_tokens: int) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=num_tokens)

    def end(self) -> None:
        """Leaves the bar where it is."""
        if self._bar is not None:
            self._bar.stop()


class LineProgress:
    """A line at every quarter, for logs; the methods are those of :class:`expertwire.run.job.Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase, self._total, self._shown = "", 0, 0

    def begin(self, phase: str, num_tokens: int) -> None:
        """Prints nothing yet."""
        self._phase, self._total, self._shown = phase, num_tokens, 0

    def update(self, num_tokens: int) -> None:
        """Prints a line if another quarter is done."""
        part = num_tokens * _PLAIN_LINES // self._total
        if part > self._shown:
            self._shown = part
            self._console.print(f"{self._phase}: {num_tokens:,} of {self._total:,} tokens")

    def end(self) -> None:
        """Lines need no cleaning up."""


def percentiles(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    """Returns min, median, p99 and max of some times, in microseconds."""
    values = np.percentile(seconds * 1e6, (0, 50, 99, 100))
    return dict(zip(("min", "median", "p99", "max"), map(float, values), strict=True))


def latencies(result: JobResult) -> dict[str, dict[str, dict[str, float]]]:
    """Returns percentiles in microseconds over all calls of dispatch and combine.

    Of each collective call the slowest rank counts, and apart from that the fastest: it arrived last, so its time holds
    the least waiting for others.
    """
    return {
        name: {
            "slowest_rank": percentiles(result.seconds[which].max(axis=0)),
            "fastest_rank": percentiles(result.seconds[which].min(axis=0)),
        }
        for name, which in (("dispatch", DISPATCH), ("combine", COMBINE))
    }


def as_json(config: JobConfig, text: TokenizedText, result: JobResult) -> dict[str, Any]:
    """Returns all numbers of a job. Seconds, bytes and rows; latencies in microseconds."""
    model = asdict(config.model)
    return {
        "config": {
            **model,
            "num_ranks": config.num_ranks,
            "max_tokens_per_rank": config.max_tokens_per_rank,
            "layout": config.layout.value,
            "combine_mode": config.combine_mode.value,
            "dispatch_dtype": config.dispatch_dtype.value,
            "timeout_s": config.timeout_s,
        },
        "text": {"source": text.source, "num_files": text.num_files, "num_tokens": result.num_tokens},
        "num_steps": config.schedule(result.num_tokens).num_steps,
        "seconds": result.loop_seconds,
        "tokens_per_second": result.num_tokens / result.loop_seconds,
        "latency_us": latencies(result),
        "ranks": [
            {**asdict(rank), "expert_seconds": float(result.seconds[EXPERTS, number].sum())}
            for number, rank in enumerate(result.ranks)
        ],
        "bytes_sent": sum(rank.bytes_sent for rank in result.ranks),
        "expert_load": result.expert_load(config.model.num_experts).tolist(),
        "check": {
            "processes": result.num_checks,
            "seconds": result.check_seconds,
            "identical": result.difference is None if result.num_checks else None,
            "difference": None if result.difference is None else asdict(result.difference),
        },
    }


def show(console: Console, config: JobConfig, result: JobResult) -> None:
    """Prints speed, latencies, bytes, the load of the experts of the first and the last layer, and the verdict."""
    console.print(
        f"{result.num_tokens:,} tokens through all layers in {result.loop_seconds:.2f} s: "
        f"{result.num_tokens / result.loop_seconds:,.0f} tokens/s"
    )
    console.print(_latency_table(result))
    console.print(_rank_table(config, result))
    load = result.expert_load(config.model.num_experts)
    for layer in sorted({0, config.model.num_layers - 1}):
        console.print(_load_chart(console, layer, load[layer]))
    console.print(_verdict(config, result), soft_wrap=True)


def _latency_table(result: JobResult) -> Table:
    table = Table(title="latency per call, microseconds", title_justify="left")
    table.add_column("call")
    for name in ("min", "median", "p99", "max"):
        table.add_column(name, justify="right")
    for call, by_rank in latencies(result).items():
        for which, values in by_rank.items():
            table.add_row(f"{call}, {which.replace('_', ' ')}", *(f"{value:,.0f}" for value in values.values()))
    return table


def _rank_table(config: JobConfig, result: JobResult) -> Table:
    table = Table(
        title="work and traffic of each rank; exchange is dispatch and combine, waiting included", title_justify="left"
    )
    for name in (
        "rank",
        "tokens",
        "rows",
        "MB sent",
        "MB received",
        "s experts",
        "s exchange",
    ):
        table.add_column(name, justify="right")
    offsets = config.schedule(result.num_tokens).rank_offsets
    load = result.expert_load(config.model.num_experts).sum(axis=0)
    for number, rank in enumerate(result.ranks):
        experts = config.experts(number)
        exchange = result.seconds[DISPATCH, number].sum() + result.seconds[COMBINE, number].sum()
        table.add_row(
            str(number),
            f"{offsets[number + 1] - offsets[number]:,}",
            f"{load[experts.start : experts.stop].sum():,}",
            f"{rank.bytes_sent / 1e6:,.1f}",
            f"{rank.bytes_received / 1e6:,.1f}",
            f"{result.seconds[EXPERTS, number].sum():.2f}",
            f"{exchange:.2f}",
        )
    return table


def _load_chart(console: Console, layer: int, load: npt.NDArray[np.int64]) -> Table:
    order = np.argsort(-load, kind="stable")
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    title = f"rows per expert of layer {layer}: busiest / mean = {load.max() / load.mean():.2f}"
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column("expert", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("bar")
    whole = len(order) <= MAX_BARS
    for expert in order if whole else order[:NUM_BUSIEST]:
        _add_bar(table, expert, load, block)
    if not whole:
        table.add_row("...", "", f"{len(order) - NUM_BUSIEST - NUM_IDLEST} more")
        for expert in order[-NUM_IDLEST:]:
            _add_bar(table, expert, load, block)
    return table


def _add_bar(table: Table, expert: int, load: npt.NDArray[np.int64], block: str) -> None:
    width = round(_BAR_WIDTH * int(load[expert]) / int(load.max()))
    table.add_row(f"expert {expert}", f"{load[expert]:,}", block * width)


def _verdict(config: JobConfig, result: JobResult) -> str:
    if not result.num_checks:
        return "not held against the reference (--no-check)"
    if result.difference is not None:
        return f"[bold red]DIFFERENT[/] {describe(result.difference)}"
    processes = "1 process" if result.num_checks == 1 else f"{result.num_checks} processes"
    values = result.num_tokens * config.model.num_layers * config.model.hidden_size
    return (
        f"[bold green]identical[/] to the single-process reference: {values:,} values and the routing of every token, "
        f"bit for bit ({result.check_seconds:.1f} s, {processes})"
    )


def describe(difference: Difference) -> str:
    """Returns one line that says where the result first differs from the reference, and how."""
    return (
        f"from the single-process reference, first in layer {difference.layer}, token {difference.token} "
        f"(step {difference.step}): {difference.what}[{difference.element}] is {difference.found!r}, "
        f"the reference has {difference.expected!r}"
    )
