"""Hooks: the second half of a call that only sends."""

from __future__ import annotations

from collections.abc import Callable

from expertwire.errors import InvalidArgumentError


class RecvHook:
    """Receives what a call with ``return_recv_hook=True`` has sent, on the stream that is current then. For one call.

    Args:
        method: which call has sent.
        receive: receives.
    """

    def __init__(self, method: str, receive: Callable[[], None]) -> None:
        self._method = method
        self._receive: Callable[[], None] | None = receive

    def __call__(self) -> None:
        """Receives. Every rank does, sooner or later than others.

        Raises:
            InvalidArgumentError: it has been called before, or the Buffer has been destroyed.
            PeerLostError: a rank did not take part.
        """
        if self._receive is None:
            raise InvalidArgumentError(f"hook: what this {self._method} sent has been received: call it once")
        self._receive()
        self._receive = None
