"""Text files to token ids: words and punctuation marks, hashed into a vocabulary."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertwire.errors import InvalidArgumentError

#: Folders of the standard library that are not its own prose and code, or are often not installed.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of a text.

    Attributes:
        ids: int32 [tokens], each in [0, vocabulary size).
        source: what was read, for people.
        num_files: files that contributed.
    """

    ids: npt.NDArray[np.int32]
    source: str
    num_files: int


def read_text(files: Sequence[Path], max_tokens: int, vocabulary_size: int) -> TokenizedText:
    """Reads files in the order given (none: the standard library) until ``max_tokens`` tokens are found.

    Bytes that are not UTF-8 become replacement characters. Raises InvalidArgumentError for a file that cannot be read
    and when there is no token at all.
    """
    ids: list[int] = []
    num_files = 0
    for path in files or standard_library_files():
        missing = max_tokens - len(ids)
        if not missing:
            break
        found = [
            zlib.crc32(token.encode()) % vocabulary_size for token in itertools.islice(split(_read(path)), missing)
        ]
        ids += found
        num_files += bool(found)
    if not ids:
        named = ", ".join(map(str, files)) or "the standard library"
        raise InvalidArgumentError(f"FILES: no word and no punctuation mark in {named}")
    source = ", ".join(path.name for path in files[:num_files]) or "Python standard library"
    return TokenizedText(np.array(ids, dtype=np.int32), source, num_files)


def split(text: str) -> Iterator[str]:
    """Yields words (runs of letters, digits and underscores) and single punctuation marks, in order."""
    return (match.group() for match in _TOKEN.finditer(text))


def standard_library_files() -> Iterator[Path]:
    """Yields the Python sources of this interpreter's standard library, without tests and installed packages.

    Sorted by name within a folder, the files of a folder before its subfolders.
    """
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise InvalidArgumentError(f"FILES: cannot read {path}: {error.strerror or error}") from error
