"""The tutorials keep their word: programs that need no GPU run as printed and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
PROGRAMS = {name: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in PAGES.items()}
OUTPUTS = {name: re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in PAGES.items()}


@pytest.mark.parametrize("name", [name for name, programs in PROGRAMS.items() if programs])
def test_program_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    (program,) = PROGRAMS[name]
    script = tmp_path / f"{name}.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (OUTPUTS[name][0] if OUTPUTS[name] else "True\n")


@pytest.mark.parametrize("name", PAGES)
def test_what_needs_a_gpu_is_at_least_python(name: str) -> None:
    blocks = re.findall(r"^```python title=[^\n]*\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE)
    assert blocks or PROGRAMS[name]
    for block in blocks:
        compile(block, name, "exec")
