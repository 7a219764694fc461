"""Draws charts as one PNG picture, with matplotlib."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from expertwire.bench.charts import Bar, Bars, Chart, Lines, Look, digits
from expertwire.bench.figures import charts_of
from expertwire.bench.rows import rows_of
from expertwire.bench.schema import Report
from expertwire.errors import UnsupportedError

_COLOURS = ("#1a1a1a", "#0072b2", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#b8a800")
_HATCHES = ("", "//", "\\\\", "||", "--", "xx", "++", "---")
_MARKERS = "_os^DvxP"
_DASHES = {"": "-", "dashed": "--", "dotted": ":"}
_COLUMNS, _WIDE, _HIGH, _DOTS = 2, 7.0, 3.8, 120
#: What fits into a line above a chart, and beside it.
_TITLE_LETTERS, _LABEL_LETTERS = 84, 36


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
    picture = io.BytesIO()
    make_figure(charts, with_names=with_names).savefig(picture, format="png")
    return picture.getvalue()


def make_figure(charts: Sequence[tuple[str, Chart]], *, with_names: bool) -> Any:
    """Return the figure of :func:`draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_height(chart) for _, chart in charts] or [_HIGH]
    rows = [max(heights[first : first + _COLUMNS]) for first in range(0, len(heights), _COLUMNS)]
    figure = Figure(figsize=(_WIDE * _COLUMNS, sum(rows)), dpi=_DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(rows), _COLUMNS, height_ratios=rows)
    for number, (name, chart) in enumerate(charts):
        axes = figure.add_subplot(grid[divmod(number, _COLUMNS)])
        if isinstance(chart, Bars):
            _draw_bars(axes, chart)
        else:
            _draw_lines(axes, chart)
        title = textwrap.fill(chart.title, _TITLE_LETTERS, break_on_hyphens=False)
        axes.set_title(f"{name}\n{title}" if with_names else title, fontsize=9, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def _height(chart: Chart) -> float:
    """Return inches: bars need as many lines as there are of them and of their groups."""
    if isinstance(chart, Lines):
        return _HIGH
    return max(_HIGH, 1.2 + 0.17 * (len(chart.bars) + len({bar.group for bar in chart.bars})))


def _draw_bars(axes: Any, chart: Bars) -> None:
    place, named = 0, {}
    for group, members in itertools.groupby(chart.bars, lambda bar: bar.group):
        bars, top = list(members), place
        axes.text(0.01, place, group, transform=axes.get_yaxis_transform(), fontsize=7, va="center")
        for bar in bars:
            place += 1
            named[place] = bar.label
            _draw_bar(axes, bar, place, log=chart.log)
        for bar in bars:
            if bar.is_floor:
                axes.vlines(bar.value, top + 0.5, place + 0.5, colors="black", linestyles="dashed", linewidth=1)
        place += 1
    if chart.log:
        _use_log(axes, "x")
    axes.margins(x=0.08)  # for the numbers beside the longest
    if not chart.log:
        axes.set_xlim(left=0)
    axes.set_yticks(list(named), list(named.values()))
    axes.set_ylim(place - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: Any, bar: Bar, place: int, *, log: bool) -> None:
    colour = _COLOURS[bar.look.number]
    if log:
        axes.plot([bar.value], [place], **_line(bar.look, is_floor=False))
    else:
        axes.barh(place, bar.value, height=0.75, color=colour, hatch=_HATCHES[bar.look.number], edgecolor="white")
    axes.plot([bar.low, bar.high], [place, place], color="black", linewidth=1, marker="|", markersize=4)
    beside = {"xytext": (7, 0), "textcoords": "offset points", "fontsize": 7, "va": "center"}
    axes.annotate(digits(bar.value), (max(bar.value, bar.high), place), **beside)


def _use_log(axes: Any, name: str) -> None:
    """Make an axis logarithmic, with plain numbers beside it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _place: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_lines(axes: Any, chart: Lines) -> None:
    for series in chart.series:
        across, up = zip(*series.points, strict=True)
        axes.plot(across, up, label=series.name, **_line(series.look, is_floor=series.is_floor))
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_y:
        _use_log(axes, "y")
    else:
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax or 1)
    if chart.x_ticks:
        axes.set_xticks(chart.x_ticks, [f"{tick:g}" for tick in chart.x_ticks])
        axes.set_xticks([], minor=True)
    axes.set_ylabel(textwrap.fill(chart.y_label, _LABEL_LETTERS), fontsize=7)
    axes.grid(visible=True, alpha=0.3)
    # Below the axes, where no points are.
    axes.legend(fontsize=7, ncols=4, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.15), borderaxespad=0)


def _line(look: Look, *, is_floor: bool) -> dict[str, Any]:
    dashes = "--" if is_floor and not look.dashes else _DASHES[look.dashes]
    filled = "white" if look.dashes else _COLOURS[look.number]
    return {
        "color": _COLOURS[look.number],
        "linestyle": dashes,
        "marker": _MARKERS[look.number],
        "markerfacecolor": filled,
    }
