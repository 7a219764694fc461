"""Operations that have been sent and are to be received: what ``dispatch_async`` and ``combine_async`` return."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from expertwire import _core
from expertwire.errors import BackendError, Error, HandleError, InvalidArgumentError
from expertwire.types import Array


class SentOperation:
    """One operation between its phases; the communicator and its request both hold it.

    Attributes:
        operation: ``"dispatch"`` or ``"combine"``.
        handle: of the dispatch.
        array: one that the receive writes; its framework says which stream is the current one.
        result: what ``wait`` returns.
        is_over: it was received, or has ended with an error.
        is_dropped: its request is gone, without ``wait``.
        error: what ended it, if that was an error.
    """

    def __init__(self, operation: str, handle: _core.DispatchHandle, array: Array, result: Any) -> None:
        self.operation = operation
        self.handle = handle
        self.array = array
        self.result = result
        self.is_over = self.is_dropped = False
        self.error: Error | None = None


class SentOperations:
    """Those of one communicator that are not over: at most one of a kind on a lane.

    Args:
        runtime: of the communicator.
        stream_for: (array, what the caller asked for) to the address of the stream that a receive of it is put on.
        on_cuda: a receive has not ended when its call returns.

    Attributes:
        by_lane: by operation and lane; empty unless something is under way, which every call looks at.
    """

    def __init__(
        self, runtime: _core.MoERuntime, stream_for: Callable[[Array, object | None], int], on_cuda: bool
    ) -> None:
        self._runtime: _core.MoERuntime | None = runtime
        self._stream_for = stream_for
        self._on_cuda = on_cuda
        self._last_of_lane: dict[tuple[str, int], SentOperation] = {}
        self.by_lane: dict[tuple[str, int], SentOperation] = {}

    def add(self, sent: SentOperation) -> MoERequest:
        """Notes what has just been sent."""
        lane = (sent.operation, sent.handle.lane)
        self.by_lane[lane] = self._last_of_lane[lane] = sent
        return MoERequest(self, sent)

    def receive(self, sent: SentOperation, stream: object | None = None) -> None:
        """Receives, unless it is over. Raises what ended it, every time."""
        if sent.error is not None:
            raise sent.error
        if sent.is_over:
            return
        if self._runtime is None:
            raise InvalidArgumentError(f"wait: the communicator was closed before this {sent.operation} was received")
        address = self._stream_for(sent.array, stream)
        try:
            if sent.operation == "dispatch":
                self._runtime.dispatch_receive(sent.handle, address)
            else:
                self._runtime.combine_receive(sent.handle, address)
        except Error as error:
            another_thread_is_inside = type(error) is Error
            cannot_begin = self._on_cuda and isinstance(error, (InvalidArgumentError, BackendError))
            if another_thread_is_inside or cannot_begin:  # it may be tried again
                raise
            sent.error = error
            self._end(sent)
            raise
        self._end(sent)

    def done(self, sent: SentOperation) -> bool:
        """Whether ``receive`` would not wait, or has been done and its result is there."""
        if sent.error is not None or self._runtime is None:
            return True
        # The lane tells of the operation that has used it last. An older one's arrays are not its own any more.
        lane = (sent.operation, sent.handle.lane)
        if sent.is_over and not (self._on_cuda and self._last_of_lane[lane] is sent):
            return True
        is_done = self._runtime.dispatch_done if sent.operation == "dispatch" else self._runtime.combine_done
        return is_done(sent.handle)

    def settle(self, lane: int, stream: int | None) -> None:
        """Receives what was dropped on a lane that is about to be used, on a stream at this address."""
        for operation in ("dispatch", "combine"):
            sent = self.by_lane.get((operation, lane))
            if sent is None or not sent.is_dropped:
                continue
            # Each replay would receive once more what was sent once.
            if stream is not None and _core.is_stream_capturing(stream):
                raise HandleError(
                    f"{operation}_async: a request was dropped without wait(), and what it sent cannot be received in "
                    "a capture: let all ranks make a call outside of it first"
                )
            self.receive(sent, stream)

    def close(self) -> None:
        """What has not been received never will be."""
        self._runtime = None
        self.by_lane.clear()
        self._last_of_lane.clear()

    @property
    def is_closed(self) -> bool:
        """After ``close``."""
        return self._runtime is None

    def _end(self, sent: SentOperation) -> None:
        sent.is_over = True
        self.by_lane.pop((sent.operation, sent.handle.lane), None)


class MoERequest:
    """A dispatch or combine that has been sent. :meth:`wait` receives it.

    Nothing is held meanwhile, neither a core nor an SM. Usable as a context manager that waits at its end.

    One that is dropped without ``wait`` is reported by a ``ResourceWarning`` at once; the next call that needs its lane
    receives it first, and ``close`` lets it be.
    """

    def __init__(self, operations: SentOperations, sent: SentOperation) -> None:
        self._operations = operations
        self._sent = sent

    def wait(self, stream: object | None = None) -> Any:
        """Receives. Every rank does so for every request, sooner or later than others.

        Args:
            stream: CUDA only: what to receive on instead of the current stream; the call does not wait for the device.

        Returns:
            What the blocking call returns. Every call the same; only the first receives.

        Raises:
            PeerLostError: a rank did not take part. Every call raises it.
            HandleError: ranks have combined different dispatches.
            InvalidArgumentError: the communicator was closed before; on CUDA, the stream cannot be
                used now: wait once more.
        """
        self._operations.receive(self._sent, stream)
        return self._sent.result

    def done(self) -> bool:
        """Whether ``wait`` would return at once and the result be there.

        On CUDA nobody looks at what has arrived before ``wait``: false until then, and afterwards whether the device
        has received it. (Not for a request that was captured into a graph.)
        """
        return self._operations.done(self._sent)

    @property
    def result(self) -> Any:
        """What ``wait`` returns, before it has: its arrays are the right ones, and hold nothing yet."""
        return self._sent.result

    def __enter__(self) -> MoERequest:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits; after an error only drops the request."""
        if kind is None:
            self.wait()
        else:
            self._sent.is_dropped = True

    def __del__(self) -> None:
        sent: SentOperation | None = getattr(self, "_sent", None)
        if sent is None or sent.is_over or sent.is_dropped or self._operations.is_closed:
            return
        sent.is_dropped = True
        warnings.warn(
            f"{sent.operation}_async: a request was dropped without wait(); the next call on lane {sent.handle.lane} "
            "receives it first",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __repr__(self) -> str:
        state = "failed" if self._sent.error else "received" if self._sent.is_over else "sent"
        return f"<MoERequest {self._sent.operation} on lane {self._sent.handle.lane}, {state}>"
