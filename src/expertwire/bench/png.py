"""Draws charts as one PNG picture, with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from expertwire.bench.charts import Bars, Chart, Lines, Look, digits
from expertwire.bench.figures import charts_of
from expertwire.bench.rows import rows_of
from expertwire.bench.schema import Report
from expertwire.errors import UnsupportedError

_COLOURS = ("#1a1a1a", "#0072b2", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#b8a800")
_HATCHES = ("", "//", "\\\\", "||", "--", "xx", "++", "---")
_MARKERS = "_os^DvxP"
_DASHES = {"": "-", "dashed": "--", "dotted": ":"}
_COLUMNS, _WIDE, _HIGH, _DOTS = 2, 7.0, 3.8, 120


def check_matplotlib() -> None:
    """Raise UnsupportedError if pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError("a .png picture needs matplotlib: pip install 'expertwire[plot]', or write a .html page")


def make_picture(reports: Sequence[tuple[str, Report]]) -> bytes:
    """Return a PNG of all charts of all reports by name, but for the distributions."""
    charts = [
        (name, chart)
        for name, report in reports
        for chart in charts_of(rows_of(report))
        if isinstance(chart, Bars) or not chart.steps
    ]
    return draw(charts, with_names=len(reports) > 1)


def draw(charts: Sequence[tuple[str, Chart]], *, with_names: bool) -> bytes:
    """Return a PNG of charts, two in a row, each under the name of its report if asked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = max(1, -(-len(charts) // _COLUMNS))
    figure = Figure(figsize=(_WIDE * _COLUMNS, _HIGH * lines), dpi=_DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, chart) in enumerate(charts, 1):
        axes = figure.add_subplot(lines, _COLUMNS, number)
        if isinstance(chart, Bars):
            _draw_bars(axes, chart)
        else:
            _draw_lines(axes, chart)
        axes.set_title(f"{name}\n{chart.title}" if with_names else chart.title, fontsize=9, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        axes.tick_params(labelsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_bars(axes: Any, chart: Bars) -> None:
    for place, bar in enumerate(chart.bars):
        look = {"color": _COLOURS[bar.look.number], "hatch": _HATCHES[bar.look.number], "edgecolor": "white"}
        axes.barh(place, bar.value, height=0.75, **look)
        axes.plot([bar.low, bar.high], [place, place], color="black", linewidth=1, marker="|", markersize=4)
        axes.annotate(f" {digits(bar.value)}", (max(bar.value, bar.high), place), fontsize=7, va="center")
        if bar.is_floor:
            group = [index for index, other in enumerate(chart.bars) if other.group == bar.group]
            axes.vlines(bar.value, group[0] - 0.5, group[-1] + 0.5, colors="black", linestyles="dashed", linewidth=1)
    axes.set_yticks(range(len(chart.bars)), [f"{bar.group}  {bar.label}" for bar in chart.bars])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Any, chart: Lines) -> None:
    for series in chart.series:
        across, up = zip(*series.points, strict=True)
        axes.plot(across, up, label=series.name, **_line(series.look, is_floor=series.is_floor))
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if chart.x_ticks:
        axes.set_xticks(chart.x_ticks, [f"{tick:g}" for tick in chart.x_ticks])
        axes.set_xticks([], minor=True)
    axes.set_ylabel(chart.y_label, fontsize=7)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


def _line(look: Look, *, is_floor: bool) -> dict[str, Any]:
    dashes = "--" if is_floor and not look.dashes else _DASHES[look.dashes]
    filled = "white" if look.dashes else _COLOURS[look.number]
    return {
        "color": _COLOURS[look.number],
        "linestyle": dashes,
        "marker": _MARKERS[look.number],
        "markerfacecolor": filled,
    }
