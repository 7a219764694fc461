"""Tables in Markdown, and what they say of a machine."""

from __future__ import annotations

from typing import Any

#: Load average for each core above which a machine is not quiet enough.
_QUIET_LOAD = 0.5


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def code(text: str) -> str:
    """Return text as code."""
    return f"`{text}`"


def busy_before(machine: dict[str, Any]) -> str:
    """Return in words that other work used a machine before the start, or an empty string."""
    load, most = machine.get("load_average_1min", 0.0), _QUIET_LOAD * machine.get("usable_cores", 1)
    return f"this machine was in use before the start: a load average of {load}, above {most:g}" if load > most else ""
