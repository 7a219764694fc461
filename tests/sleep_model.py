"""Model of how ranks of the CPU backend sleep on a word, for ``state_explorer.py``: no post may be slept through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol_model import _replaced
from state_explorer import Step


class SleepProtocol:
    """How ranks sleep on a word: no post may be missed. There are no naps here, so that a missed wake-up is a hang.

    A waiter counts itself, reads the word, and asks the kernel to sleep if the word still holds what it read. The owner
    posts, reads the count, and wakes if it is not zero. ``count_first=False`` lets the owner read the count before it
    posts, which is what a processor may do if the two accesses are not sequentially consistent.
    """

    def __init__(self, num_waiters: int = 2, num_posts: int = 2, count_first: bool = False) -> None:
        self.num_waiters = num_waiters
        self.num_posts = num_posts
        self.count_first = count_first

    # State: (word, waiters counted, owner (posts, seen count or None), waiters (place, word read, epoch wanted))
    def initial(self) -> Any:
        return 0, 0, (0, "idle", 0), (("count", 0, 1),) * self.num_waiters

    def successors(self, state: Any) -> Iterator[tuple[Step, Any]]:
        word, counted, owner, waiters = state
        yield from self._owner_steps(state)
        for me, (place, read, wanted) in enumerate(waiters):
            if place == "count":
                yield (me, "counts itself"), (word, counted + 1, owner, _replaced(waiters, me, ("look", read, wanted)))
            elif place == "look":
                then = "leave" if word >= wanted else "sleep"
                yield (me, "reads", word), (word, counted, owner, _replaced(waiters, me, (then, word, wanted)))
            elif place == "sleep":  # the kernel compares and queues in one step
                then = "asleep" if word == read else "look"
                yield (me, "calls futex"), (word, counted, owner, _replaced(waiters, me, (then, read, wanted)))
            elif place == "leave":
                then = "done" if wanted == self.num_posts else "count"
                yield (me, "leaves"), (word, counted - 1, owner, _replaced(waiters, me, (then, 0, wanted + 1)))

    def _owner_steps(self, state: Any) -> Iterator[tuple[Step, Any]]:
        word, counted, (posts, place, seen), waiters = state
        if place == "idle" and posts < self.num_posts:
            if self.count_first:
                yield ("owner", "reads the count"), (word, counted, (posts, "counted", counted), waiters)
            else:
                yield ("owner", "posts"), (word + 1, counted, (posts + 1, "posted", 0), waiters)
        elif place == "counted":
            yield ("owner", "posts"), (word + 1, counted, (posts + 1, "wake", seen), waiters)
        elif place == "posted":
            yield ("owner", "reads the count"), (word, counted, (posts, "wake", counted), waiters)
        elif place == "wake":
            if seen:
                waiters = tuple(("look", *waiter[1:]) if waiter[0] == "asleep" else waiter for waiter in waiters)
            yield ("owner", "wakes" if seen else "wakes nobody"), (word, counted, (posts, "idle", 0), waiters)

    def fault(self, state: Any) -> str:  # noqa: ARG002  sleeping breaks no invariant, it may only never end
        return ""

    def final_fault(self, state: Any) -> str:
        return "a waiter sleeps for ever" if any(waiter[0] != "done" for waiter in state[3]) else ""

    def describe(self, step: Step) -> str:
        return " ".join(str(part) for part in step)
