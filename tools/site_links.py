"""Used by mkdocs: links to files of the project that are no pages become their text. It checks all others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page without links that lead out of the site, if the files are there."""
    folder = Path(page.file.abs_src_path).parent

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        leads_out = ROOT / "docs" not in target.parents and ROOT in target.parents and target.exists()
        return link[1] if leads_out else link[0]

    return LINK.sub(kept, markdown)
