"""Draws charts as SVG, without any library: told apart by colour, mark and hatch; for dark and light, and paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape

from expertwire.bench.charts import Axis, Bars, Chart, Lines, Look, Series, digits

WIDTH = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 52, 46
_PLOT_HEIGHT = 270
_LABELS, _VALUES = 160, 70
_BAR, _GAP = 14, 6
_LEGEND_LINE = 20
_LONG_TITLE = 92

#: Colours of the Okabe-Ito palette, which colour-blind readers tell apart; the first follows the text.
STYLE = """
.chart { --ink: #1a1a1a; --faint: #8a8a8a; --paper: #ffffff; }
.chart { font: 12px system-ui, sans-serif; max-width: 100%; height: auto; }
@media screen and (prefers-color-scheme: dark) { .chart { --ink: #e8e8e8; --faint: #8f8f8f; --paper: #16181c; } }
.chart text { fill: var(--ink); }
.chart .title { font-weight: 600; font-size: 13px; }
.chart .long { font-size: 11px; }
.chart .grid { stroke: var(--faint); stroke-opacity: .35; }
.chart .frame, .chart .whisker { stroke: var(--ink); fill: none; }
.chart .floor { stroke: var(--ink); stroke-dasharray: 5 4; stroke-width: 1.5; fill: none; }
.chart .line { fill: none; stroke: currentColor; stroke-width: 2; }
.chart .mark { fill: currentColor; stroke: currentColor; stroke-width: 1.5; }
.chart .open { fill: var(--paper); }
.chart .bar { fill: currentColor; }
.chart .hatch { stroke: var(--paper); stroke-width: 1.6; fill: none; }
.c0 { color: var(--ink); } .c1 { color: #0072b2; } .c2 { color: #e69f00; } .c3 { color: #56b4e9; }
.c4 { color: #009e73; } .c5 { color: #d55e00; } .c6 { color: #cc79a7; } .c7 { color: #b8a800; }
@media screen and (prefers-color-scheme: dark) { .c1 { color: #3c9fdc; } .c7 { color: #f0e442; } }
""".strip()

_DASHES = {"": "", "dashed": "7 4", "dotted": "2 4"}
# What a hatch draws over a bar, in a tile of 8 x 8; the first bar has none.
_HATCHES = (
    "",
    "M0 8 L8 0",
    "M0 0 L8 8",
    "M4 0 V8",
    "M0 4 H8",
    "M0 8 L8 0 M0 0 L8 8",
    "M4 0 V8 M0 4 H8",
    "M0 2 H8 M0 6 H8",
)
# Around 0, 0.
_MARKS = (
    "M-4 0 L4 0",
    "M-4 0 A4 4 0 1 0 4 0 A4 4 0 1 0 -4 0 Z",
    "M-4 -4 H4 V4 H-4 Z",
    "M0 -5 L5 4 H-5 Z",
    "M0 -5.5 L5.5 0 L0 5.5 L-5.5 0 Z",
    "M0 5 L5 -4 H-5 Z",
    "M-4 -4 L4 4 M-4 4 L4 -4",
    "M0 -5 V5 M-5 0 H5",
)


def hatches() -> str:
    """Return the definitions that bars refer to; a page holds them once."""
    size = 'width="8" height="8" patternUnits="userSpaceOnUse"'
    tiles = (
        f'<pattern id="h{index}" {size}><path class="hatch" d="{path}"/></pattern>'
        for index, path in enumerate(_HATCHES)
        if path
    )
    return f"<defs>{''.join(tiles)}</defs>"


def draw(chart: Chart, *, standalone: bool = False) -> str:
    """Return a chart as an SVG element; ``standalone`` as a file of its own, with style and hatches."""
    parts, height = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
    own = f"<style>{STYLE}\n.chart {{ background: var(--paper); }}</style>{hatches()}" if standalone else ""
    name = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    body = "\n".join(parts)
    return (
        f'<svg{name} class="chart" role="img" aria-label="{escape(chart.title)}" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">{own}\n{body}\n</svg>\n'
    )


def _bars(chart: Bars) -> tuple[list[str], int]:
    left, right = _LABELS, WIDTH - _VALUES
    ends = [end for bar in chart.bars for end in (bar.low, bar.value, bar.high)]
    axis = Axis.of(ends if chart.log else [0.0, *ends], log=chart.log)
    parts = [_title(chart.title)]
    y = 30.0
    for group, members in itertools.groupby(chart.bars, lambda bar: bar.group):
        bars = list(members)
        parts.append(_text(group, left + 6, y + 11))
        y += _BAR + 4
        top = y
        for bar in bars:
            x, low, high = (axis.place(value, left, right) for value in (bar.value, bar.low, bar.high))
            middle = y + _BAR / 2
            parts.append(_text(bar.label, left - 8, y + 11, anchor="end"))
            parts.append(_point(bar.look, left, x, middle) if chart.log else _box(bar.look, left, y, x - left))
            parts.append(f'<path class="whisker" d="M{low:.1f} {middle:.1f} H{high:.1f} m0 -4 v8"/>')
            parts.append(_text(digits(bar.value), max(x + 6 * chart.log, high) + 6, y + 11))
            y += _BAR + _GAP
        for bar in bars:
            if bar.is_floor:
                x = axis.place(bar.value, left, right)
                parts.append(f'<path class="floor" d="M{x:.1f} {top - 3:.1f} V{y - _GAP + 3:.1f}"/>')
        y += 8
    parts.append(f'<path class="frame" d="M{left} 30 V{y:.1f} H{right}"/>')
    parts += _ticks_below(axis, left, right, y)
    parts.append(_text(chart.x_label, (left + right) / 2, y + 34, anchor="middle"))
    return parts, round(y) + 42


def _box(look: Look, x: float, y: float, width: float) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{_BAR}"'
    hatch = f'<rect {box} fill="url(#h{look.number})"/>' if look.number and _HATCHES[look.number] else ""
    return f'<g class="c{look.number}"><rect class="bar" {box}/>{hatch}</g>'


def _point(look: Look, left: float, x: float, y: float) -> str:
    """Return a mark at the end of a faint line."""
    return f'<path class="grid" d="M{left:.1f} {y:.1f} H{x:.1f}"/><g class="bar c{look.number}">{_mark(look, x, y)}</g>'


def _lines(chart: Lines) -> tuple[list[str], int]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, _TOP + _PLOT_HEIGHT
    points = [point for series in chart.series for point in series.points]
    across = Axis.of([x for x, _ in points], log=chart.log_x, ticks=chart.x_ticks)
    up = Axis.of([*(y for _, y in points), *([] if chart.log_y else [0.0])], log=chart.log_y)
    parts = [_title(chart.title)]
    for tick in up.ticks:
        y = up.place(tick, bottom, top)
        parts.append(f'<path class="grid" d="M{left} {y:.1f} H{right}"/>')
        parts.append(_text(_number(tick), left - 8, y + 4, anchor="end"))
    parts += _ticks_below(across, left, right, bottom)
    parts.append(f'<path class="frame" d="M{left} {top} V{bottom} H{right}"/>')
    for series in chart.series:
        placed = [(across.place(x, left, right), up.place(y, bottom, top)) for x, y in series.points]
        parts += _curve(series, placed, steps=chart.steps)
    parts.append(_text(chart.x_label, (left + right) / 2, bottom + 36, anchor="middle"))
    parts.append(_text(chart.y_label, left, top - 14))
    legend, height = _legend(chart.series, bottom + _BOTTOM)
    return parts + legend, height


def _curve(series: Series, placed: list[tuple[float, float]], *, steps: bool) -> Iterator[str]:
    (x, y), *rest = placed
    path = [f"M{x:.1f} {y:.1f}", *(f"H{x:.1f} V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for x, y in rest)]
    dashes = _DASHES[series.look.dashes]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    name = f' data-series="{escape(series.name)}"' if series.name else ""
    kind = "floor" if series.is_floor and not series.look.dashes else "line"
    yield f'<g class="c{series.look.number}"><path class="{kind}"{name}{dashed} d="{" ".join(path)}"/>'
    marked = placed if not steps else placed[len(placed) // 2 :: max(len(placed), 1)]  # one mark names a step curve
    yield "".join(_mark(series.look, x, y) for x, y in marked) + "</g>"


def _mark(look: Look, x: float, y: float) -> str:
    kind = "mark open" if look.dashes else "mark"
    return f'<path class="{kind}" transform="translate({x:.1f} {y:.1f})" d="{_MARKS[look.number]}"/>'


def _legend(series: tuple[Series, ...], top: float) -> tuple[list[str], int]:
    parts: list[str] = []
    x, y = float(_LEFT), top + 12
    for one in series:
        width = 40 + 7 * len(one.name)
        if x + width > WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + _LEGEND_LINE
        parts += _curve(Series("", one.look, ((0, 0),), one.is_floor), [(x, y), (x + 14, y), (x + 28, y)], steps=False)
        parts.append(_text(one.name, x + 36, y + 4))
        x += width
    return parts, round(y) + 14


def _ticks_below(axis: Axis, left: float, right: float, y: float) -> Iterator[str]:
    free = -float("inf")
    for tick in axis.ticks:
        x = axis.place(tick, left, right)
        yield f'<path class="frame" d="M{x:.1f} {y:.1f} v4"/>'
        label = _number(tick)
        if x - 4 * len(label) > free:  # labels that would touch are left out
            yield _text(label, x, y + 18, anchor="middle")
            free = x + 4 * len(label)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0e}"


def _title(text: str) -> str:
    return _text(text, 0, 16, "title long" if len(text) > _LONG_TITLE else "title")


def _text(text: str, x: float, y: float, kind: str = "", anchor: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
