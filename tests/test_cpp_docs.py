"""docs/cpp.md keeps its word: its program is the example that is built and run, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
PUBLIC = ROOT / "cpp" / "include" / "expertwire"


def first_column(heading: str) -> list[str]:
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\| `(\w+)[^|]*\|", section, re.MULTILINE)


def test_program_is_the_example() -> None:
    program = next(block for block in re.findall(r"```cpp\n(.*?)```", PAGE, re.DOTALL) if "int main" in block)
    assert program == (ROOT / "cpp" / "examples" / "quickstart.cc").read_text(encoding="utf-8")


def test_every_error_code_is_told() -> None:
    (codes,) = re.findall(
        r"enum class ErrorCode \{(.*?)\};", (PUBLIC / "error.hpp").read_text(encoding="utf-8"), re.DOTALL
    )
    assert first_column("Errors") == re.findall(r"^\s+(\w+),", codes, re.MULTILINE)


def test_every_option_is_told() -> None:
    options = set(
        re.findall(r"\b(?:option|set)\((EXPERTWIRE_\w+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    )
    assert set(first_column("Build, install, use")) == options


def test_every_example_is_told() -> None:
    cmake = (ROOT / "cpp" / "examples" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert first_column("Examples") == re.findall(r"add_executable\((\w+)", cmake)


def test_every_public_header_is_named() -> None:
    told = set(re.findall(r"expertwire/(\w+\.hpp)", PAGE))
    assert {path.name for path in PUBLIC.glob("*.hpp")} - told == {"version.hpp"}
