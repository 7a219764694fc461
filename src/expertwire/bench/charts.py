"""Charts as plain data, which ``svg`` and ``png`` draw alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a series looks: a number for colour, mark and hatch, and dashes ("", "dashed" or "dotted")."""

    number: int
    dashes: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar with a whisker from ``low`` to ``high``. The floor's end is drawn through its whole group."""

    group: str
    label: str
    look: Look
    value: float
    low: float
    high: float
    is_floor: bool = False


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, in groups; or, over a logarithmic axis, which has no zero, points in their place."""

    title: str
    x_label: str
    bars: tuple[Bar, ...]
    log: bool = False


@dataclass(frozen=True)
class Series:
    """One line through points (x, y)."""

    name: str
    look: Look
    points: tuple[tuple[float, float], ...]
    is_floor: bool = False


@dataclass(frozen=True)
class Lines:
    """Lines over a common axis. ``x_ticks``: where it is labelled, if not at round numbers; ``steps``: no slopes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    x_ticks: tuple[float, ...] = ()
    steps: bool = False


Chart = Bars | Lines


@dataclass(frozen=True)
class Axis:
    """A scale from ``low`` to ``high`` and the values that are labelled."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float], *, log: bool, ticks: Sequence[float] = ()) -> Axis:
        """Return a scale that holds all values and ends at its last tick. A logarithmic one needs values above 0."""
        low, high = min(values), max(values)
        if high <= low:
            low, high = (low / 2, low * 2) if log else (min(low, 0.0), max(high, 1.0))
        if ticks:
            return Axis(low, high, log, tuple(ticks))
        made = _log_ticks(low, high) if log else _round_ticks(low, high)
        return Axis(made[0], made[-1], log, tuple(made))

    def place(self, value: float, first: float, last: float) -> float:
        """Return where a value lies between the positions of the two ends."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        return first + (last - first) * (self._scaled(value) - low) / (high - low)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def digits(value: float) -> str:
    """Return a value with four digits, or as many as stand before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _round_ticks(low: float, high: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten, the first and last outside the range."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten (powers alone over many decades), the ends outside the range."""
    factors = (1, 2, 5) if high / low < 1e4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [factor * 10.0**power for power in powers for factor in factors]
    first = max((tick for tick in candidates if tick <= low * 1.001), default=candidates[0])
    last = min((tick for tick in candidates if tick >= high * 0.999), default=candidates[-1])
    return [tick for tick in candidates if first <= tick <= last]
