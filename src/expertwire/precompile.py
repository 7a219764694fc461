"""Compiling CUDA kernels ahead of time, so that the first communicator of a shape finds them in the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from expertwire import _core
from expertwire.bench.schema import Problem
from expertwire.config import to_core
from expertwire.nvrtc import use_installed_nvrtc
from expertwire.types import MoECommunicatorConfig


@dataclass(frozen=True)
class Precompiled:
    """What the kernels of one communicator came to.

    Attributes:
        problem: the shape.
        architecture: such as ``"sm_90"``.
        num_compiled: kernels that were compiled now; the others lay in the cache.
        num_images: kernels that the communicator may load; which ones depends on the number of multiprocessors.
        registers: most that a thread of a kernel takes.
        spill_bytes: most that a thread of a kernel spills.
        num_lost: kernels that could not be kept in the cache.
    """

    problem: Problem
    architecture: str
    num_compiled: int
    num_images: int
    registers: int
    spill_bytes: int
    num_lost: int

    def __str__(self) -> str:
        kept = self.num_images - self.num_compiled
        return (
            f"{self.architecture}  {self.problem.shape()}: {self.num_compiled} compiled, {kept} in the cache; "
            f"at most {self.registers} registers, {self.spill_bytes} bytes spilled"
        )


def precompile(
    config: MoECommunicatorConfig, num_ranks: int, architecture: str, num_sms: int = 0
) -> list[_core.KernelImage]:
    """Compiles all kernels that a communicator may load on GPUs of ``architecture``, or takes them from the cache.

    Needs no GPU. ``config.device`` does not count. With ``num_sms``, the multiprocessors that a rank has to itself,
    kernels that are never launched there are left out.

    Raises:
        InvalidArgumentError: a field of ``config`` or ``architecture`` is wrong.
        UnsupportedError: what the architecture or this version cannot do; or there is no NVRTC.
        BackendError: the kernels do not compile.
    """
    use_installed_nvrtc()
    return _core.precompile_kernels(to_core(replace(config, device="cuda:0"), "cuda"), num_ranks, architecture, num_sms)


def precompile_all(problems: list[Problem], architectures: list[str], **fields: Any) -> Iterator[Precompiled]:
    """Yields one result for each shape and architecture, in this order. Raises what :func:`precompile` raises.

    ``fields`` of the configuration that a shape does not have, such as ``validate=True``, are the same for all.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(lambda one: _precompiled(one[0], one[1], fields), product(problems, architectures))


def _precompiled(problem: Problem, architecture: str, fields: dict[str, Any]) -> Precompiled:
    images = precompile(replace(problem.config(), **fields), problem.num_ranks, architecture)
    kernels = [kernel for image in images for kernel in image.resources.values()]
    return Precompiled(
        problem,
        architecture,
        sum(not image.from_cache for image in images),
        len(images),
        max(kernel.registers for kernel in kernels),
        max(kernel.spill_bytes for kernel in kernels),
        sum(not image.is_kept for image in images),
    )
