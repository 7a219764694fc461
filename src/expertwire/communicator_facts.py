"""What a communicator tells of itself and of what it has done so far. Nothing here communicates."""

from __future__ import annotations

from expertwire import _core
from expertwire.errors import InvalidArgumentError
from expertwire.types import MoECommunicatorConfig, MoEMemoryBytes, MoEStats


class CommunicatorFacts:
    """The part of :class:`expertwire.MoECommunicator` that concerns one rank alone and changes nothing."""

    def __init__(self, runtime: _core.MoERuntime, config: MoECommunicatorConfig) -> None:
        self._runtime: _core.MoERuntime | None = runtime
        self._config = config
        self._rank, self._num_ranks = runtime.rank, runtime.num_ranks
        self._num_local_experts, self._first_local_expert = runtime.num_local_experts, runtime.first_local_expert

    def stats(self) -> MoEStats:
        """Calls, bytes, rows of each expert and waiting times so far: what load balancers read.

        On CUDA it waits for a copy of the counters, which may count an operation under way in part.
        """
        stats = self._open_runtime("stats").stats()
        return MoEStats(
            dispatch_calls=stats.dispatch_calls,
            combine_calls=stats.combine_calls,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            timeouts=stats.timeouts,
            expert_tokens=tuple(stats.expert_tokens),
            source_wait_seconds=tuple(stats.source_wait_seconds),
        )

    def memory_bytes(self) -> MoEMemoryBytes:
        """Bytes held on this rank."""
        held = self._open_runtime("memory_bytes").memory_bytes()
        return MoEMemoryBytes(shared=held.shared, outputs=held.outputs, private=held.private)

    def check(self) -> None:
        """Raises what the device reported since the last call, without waiting for it.

        On the CPU every call reports for itself.
        """
        self._open_runtime("check").check()

    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks given up as lost, ascending."""
        return tuple(self._open_runtime("lost_ranks").lost_ranks())

    @property
    def config(self) -> MoECommunicatorConfig:
        """The configuration with every default filled in."""
        return self._config

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """R."""
        return self._num_ranks

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self._num_local_experts

    @property
    def first_local_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self._first_local_expert

    @property
    def is_available(self) -> bool:
        """Neither closed nor ended by a lost rank."""
        return self._runtime is not None and self._runtime.is_available

    def __repr__(self) -> str:
        config = self._config
        state = "closed" if self._runtime is None else "open" if self._runtime.is_available else "lost a rank"
        return (
            f"<MoECommunicator rank {self._rank} of {self._num_ranks}, {state}: {config.num_experts} experts, "
            f"hidden_size {config.hidden_size}, top {config.num_topk}, {config.max_tokens_per_rank} tokens, "
            f"{config.output_layout.name}, {config.combine_mode.name}, {config.quant.format.name}>"
        )

    def _open_runtime(self, operation: str) -> _core.MoERuntime:
        if self._runtime is None:
            raise InvalidArgumentError(f"{operation}: this communicator is closed")
        return self._runtime
