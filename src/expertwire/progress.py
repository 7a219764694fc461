"""Watching work that is done elsewhere: in processes that count their steps in a file or in shared memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def watched(count: Callable[[], int], tell: Callable[[int], None]) -> Iterator[None]:
    """Tell, from a thread of its own, every new value of ``count`` until the block is left, and the last one then."""
    over = threading.Event()

    def watch() -> None:
        told = -1
        while True:
            last = over.wait(_POLL_SECONDS)
            if (done := count()) != told:
                tell(done)
                told = done
            if last:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
