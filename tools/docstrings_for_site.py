"""Used by mkdocstrings: makes Markdown of docstrings. Roles become code, and the star of ``R*M`` stays a star."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([^`]+)`")
STAR = re.compile(r"(?<=\w)\*(?=\w)")
CODE = re.compile(r"(``?[^`]+``?)")


class DocstringsForSite(griffe.Extension):
    """Turns every docstring into Markdown as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring in place."""
        if obj.docstring is not None:
            parts = CODE.split(ROLE.sub(r"`\1`", obj.docstring.value))
            obj.docstring.value = "".join(
                part if place % 2 else STAR.sub(r"\\*", part) for place, part in enumerate(parts)
            )
