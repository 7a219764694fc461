"""Events: what a later stream waits for before it touches the results of a call."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from expertwire.errors import InvalidArgumentError


class EventHandle:
    """A moment on a CUDA stream; on the CPU, where calls return when they are done, nothing to wait for.

    Args:
        stream: a ``torch.cuda.Stream``; ``None``: the current one, where this process uses CUDA.
    """

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = None
        if stream is not None or torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """Lets the current stream wait; the host does not. May be called again, on other streams too."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What a call with ``async_finish=True`` returns beside its results, and ``Buffer.capture``.

    As a context manager it waits at the end of the block.

    Attributes:
        event: the :class:`EventHandle`; ``None`` when the call was made without ``async_finish``.
        extra_tensors: arguments and results, kept until this object goes: another stream may still work on them.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise InvalidArgumentError(f"event = {type(event).__name__} object: must be None or an EventHandle")
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Lets the current stream wait until the results are there. May be called again.

        Args:
            release_handle: let go of the event and of ``extra_tensors``; this object cannot be waited for afterwards.

        Raises:
            InvalidArgumentError: there is no event: the call was made without ``async_finish``, or it was released.
        """
        if self.event is None:
            raise InvalidArgumentError(
                "event: there is nothing to wait for: the call was made without async_finish=True, or an earlier wait "
                "had release_handle=True"
            )
        self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None

    def __enter__(self) -> EventOverlap:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits, if there is an event."""
        if self.event is not None:
            self.current_stream_wait()
