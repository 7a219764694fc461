"""Charts that are read beside each other: told apart by their titles, whole, and with all bars to be seen."""

from __future__ import annotations

import reports
from expertwire.bench.charts import Lines
from expertwire.bench.figures import charts_of
from expertwire.bench.rows import rows_of
from expertwire.bench.schema import Problem, Report


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
