"""What is not here: names that callers import or call, each of which refuses by name."""

from __future__ import annotations

from typing import Any, NoReturn

from expertwire.errors import UnsupportedError


class Config:
    """Settings of the high-throughput kernels, which are not in this version: making one raises UnsupportedError."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        _refuse("Config", "it belongs to high-throughput mode, which is not in this version")


class LeftOut:
    """The methods of a Buffer that raise UnsupportedError."""

    @staticmethod
    def set_num_sms(new_num_sms: int) -> NoReturn:
        """Sets multiprocessors of the high-throughput kernels. Raises UnsupportedError."""
        _refuse("Buffer.set_num_sms", f"{new_num_sms}: it is of the high-throughput kernels, which are not here")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput(f"get_dispatch_config({num_ranks})")

    @staticmethod
    def get_combine_config(num_ranks: int) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput(f"get_combine_config({num_ranks})")

    def get_dispatch_layout(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput("get_dispatch_layout")

    def dispatch(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput("dispatch")

    def combine(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput("combine")

    def internode_dispatch(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput("internode_dispatch")

    def internode_combine(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _high_throughput("internode_combine")

    def get_local_buffer_tensor(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises UnsupportedError: memory belongs to the communicators, and nothing of it is raw."""
        _refuse(
            "Buffer.get_local_buffer_tensor",
            "there is no one raw buffer here; get_next_low_latency_combine_buffer(handle) has what combine reads",
        )


def refuse_unknown(method: str, keywords: dict[str, object]) -> None:
    """Raises UnsupportedError for keywords that only some forks of DeepEP have."""
    if keywords:
        raise UnsupportedError(f"{method}: {', '.join(sorted(keywords))}: this drop-in has no such arguments")


def _high_throughput(method: str) -> NoReturn:
    _refuse(f"Buffer.{method}", "this version has no high-throughput mode, only the low-latency calls")


def _refuse(name: str, why: str) -> NoReturn:
    raise UnsupportedError(f"{name}: {why}")
