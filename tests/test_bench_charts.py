"""Charts that are read beside each other: told apart by their titles, whole, and with all bars to be seen."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import reports
from expertwire.bench import svg
from expertwire.bench.charts import Bars, Lines
from expertwire.bench.figures import charts_of
from expertwire.bench.png import make_figure
from expertwire.bench.rows import rows_of
from expertwire.bench.schema import Problem, Report
from expertwire.types import DispatchLayout


def two_routings() -> Report:
    shapes = [Problem(num_tokens=tokens, routing=name) for name in ("uniform", "zipf:1.5") for tokens in (1, 4, 16)]
    return reports.report([(shape, [reports.measured("expertwire", 10.0 + shape.num_tokens)]) for shape in shapes])


def test_charts_of_two_routings_have_titles_of_their_own() -> None:
    charts = charts_of(rows_of(two_routings()))
    assert len({chart.title for chart in charts}) == len(charts)
    assert [chart.title for chart in charts if isinstance(chart, Lines) and not chart.steps] == [
        "Time over T: E 128  K 8  H 7168  R 2  expert-major, rank-local-reduce, bf16",
        "Time over T: E 128  K 8  H 7168  R 2  routing zipf:1.5  expert-major, rank-local-reduce, bf16",
    ]


def bars_of(**medians: float) -> Bars:
    results = [reports.measured(lib.replace("_", "-"), us) for lib, us in medians.items()]
    (bars,) = (chart for chart in charts_of(rows_of(reports.report([(Problem(), results)]))) if isinstance(chart, Bars))
    return bars


@pytest.mark.parametrize(("slowest", "log"), [(50, False), (5000, True)])
def test_bars_beside_which_others_would_vanish_become_points(slowest: float, log: bool) -> None:
    bars = bars_of(expertwire=15, torch_a2a=slowest, floor=10)
    assert bars.log is log
    drawing = ElementTree.fromstring(svg.draw(bars))  # noqa: S314 (our own)
    boxes = [box for box in drawing.iter("rect") if box.get("class") == "bar"]
    marks = [mark for mark in drawing.iter("path") if mark.get("class", "").startswith("mark")]
    assert (len(boxes), len(marks)) == ((0, 9) if log else (9, 0))
    if log:
        places = [float(re.findall(r"[\d.]+", mark.get("transform", ""))[0]) for mark in marks]
        assert places[6] - places[8] > 20  # 15 us are told from 10
        assert min(places) >= 160


def a_full_picture() -> Report:
    """Every library, two layouts, a long name of a trace, and a size that is swept."""
    libs = ("expertwire", "expertwire-cpp", "torch-a2a", "nccl-ep", "deepep", "mscclpp", "flashinfer", "floor")
    shape = Problem(num_experts=256, routing=f"{'a-long-folder/' * 6}routing.npz", num_blocks=(16, 32))
    shapes = [replace(shape, layout=layout) for layout in list(DispatchLayout)[:2]] + [replace(shape, num_tokens=2048)]
    times = {lib: 1000.0 / (number + 1) for number, lib in enumerate(libs)}
    return reports.report([(one, [reports.measured(*item) for item in times.items()]) for one in shapes])


def test_nothing_in_a_picture_is_cut_or_covered() -> None:
    pytest.importorskip("matplotlib")
    charts = [chart for chart in charts_of(rows_of(a_full_picture())) if isinstance(chart, Bars) or not chart.steps]
    figure = make_figure([("a.json", chart) for chart in charts], with_names=True)
    figure.savefig(io.BytesIO())
    whole, boxes = figure.bbox, [axes.get_tightbbox() for axes in figure.axes]  # titles, labels and legends included
    assert len(boxes) == 3
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= whole.x1
        assert box.y1 <= whole.y1
        assert [other for other in boxes if other.overlaps(box)] == [box]
    for legend, axes in ((axes.get_legend(), axes) for axes in figure.axes if axes.get_legend()):
        assert not legend.get_window_extent().overlaps(axes.bbox)
        assert not legend.get_window_extent().overlaps(axes.xaxis.label.get_window_extent())
