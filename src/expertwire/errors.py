"""Errors of expertwire. Every one derives from :class:`Error` and carries the values that explain it.

A mistake the host can see is reported before anything is sent, on the rank that made it, and the communicator stays
usable; :class:`PeerLostError` is the exception to that rule (see ``docs/errors.md``).
"""

from __future__ import annotations

from collections.abc import Sequence


class Error(Exception):
    """Base class of every error that expertwire raises."""


class InvalidArgumentError(Error, ValueError):
    """An argument is wrong. The text names the argument, what was given and what is allowed."""


class HandleError(Error):
    """A dispatch handle is empty, stale, or belongs to another communicator."""


class UnsupportedError(Error, NotImplementedError):
    """The request is well formed, but this version, build or machine does not do it."""


class BackendError(Error):
    """The operating system or the driver refused something. Carries its text."""


class PeerLostError(Error, TimeoutError):
    """One or more ranks did not take part in an operation in time, exited, or closed their communicator.

    Attributes:
        ranks: the ranks that were lost, ascending.
        operation: ``"dispatch"``, ``"combine"``, ``"construct"``, or ``"spawn"`` for a process that died or overran.
        epoch: number of the operation of its kind on its lane, counted from 1; 0 outside an operation.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), operation: str = "", epoch: int = 0) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.operation = operation
        self.epoch = epoch
