"""Combine beside the GEMM that makes its rows: a Triton kernel publishes each block of rows, and combine takes it.

``python examples/block_overlap.py`` compares a few steps with the same work done one after the other. Needs a GPU,
torch and Triton. ``docs/overlap.md`` explains the publishing protocol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import expertwire as ew

EXPERTS, TOPK, HIDDEN, MOST, STEPS = 4, 2, 512, 192, 3
H, BLOCK_M, BLOCK_N, BLOCK_K = tl.constexpr(HIDDEN), tl.constexpr(64), tl.constexpr(128), tl.constexpr(64)


@triton.jit
def expert_gemm(x_ptr, w_ptr, y_ptr, counts_ptr, signal_ptr, rows_of_expert):
    """Make y = x @ w for the valid rows of each expert; a program makes a tile, and adds 1 to its block's word."""
    column, block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # columns first: blocks end one by one
    count = tl.load(counts_ptr + expert)
    if block * BLOCK_M < count:
        m, n, k = (
            block * BLOCK_M + tl.arange(0, BLOCK_M),
            column * BLOCK_N + tl.arange(0, BLOCK_N),
            tl.arange(0, BLOCK_K),
        )
        row = (expert.to(tl.int64) * rows_of_expert + m)[:, None]
        valid = m[:, None] < count
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_K):
            x = tl.load(x_ptr + row * H + start + k[None, :], mask=valid, other=0.0)
            w = tl.load(w_ptr + (expert.to(tl.int64) * H + start + k[:, None]) * H + n[None, :])
            total += tl.dot(x, w)
        tl.store(y_ptr + row * H + n[None, :], total.to(tl.bfloat16), mask=valid)
    tl.debug_barrier()  # all of the program's stores come before the signal
    tl.atomic_add(signal_ptr + expert * tl.num_programs(1) + block, 1, sem="release", scope="gpu")


def exchange(comm: ew.MoECommunicator, inputs: tuple[torch.Tensor, ...], overlapped: bool) -> list[torch.Tensor]:
    """Return the combined tokens of each step."""
    x, topk_ids, weights, w = inputs
    local_experts, rows_of_expert = comm.num_local_experts, comm.num_ranks * MOST
    tiles, blocks = HIDDEN // BLOCK_N.value, triton.cdiv(rows_of_expert, BLOCK_M.value)
    signal = torch.zeros(local_experts, blocks, dtype=torch.int32, device="cuda")
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    results = []
    for step in range(1, STEPS + 1):
        side.wait_stream(main)  # x, ids and weights are there; the zeros too
        with torch.cuda.stream(side):
            out, handle = comm.dispatch(x, topk_ids, weights)
        main.wait_stream(side)
        rows = out.combine_input_buffer
        gemm = expert_gemm[tiles, blocks, local_experts]
        gemm(out.tokens, w, rows, out.layout.num_tokens_per_expert, signal, rows_of_expert)
        overlap = None
        if overlapped:
            overlap = comm.create_overlap_config(
                "combine", level="block", block_size_m=BLOCK_M.value, ready_signal=signal, ready_value=step * tiles
            )
        else:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            results.append(comm.combine(rows, handle, overlap=overlap))
        main.wait_stream(side)
        x = results[-1]
    return results


def main() -> None:
    """Run both ways on one rank and compare every bit."""
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    inputs = (
        torch.randn(MOST, HIDDEN, device="cuda").bfloat16(),
        torch.rand(MOST, EXPERTS, device="cuda").topk(TOPK).indices.int(),
        torch.full((MOST, TOPK), 0.5, device="cuda"),
        (torch.randn(EXPERTS, HIDDEN, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16(),
    )
    config = ew.MoECommunicatorConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, num_topk=TOPK, max_tokens_per_rank=MOST, block_overlap=True,
        device="cuda:0", timeout_s=20.0,
    )  # fmt: skip
    with ew.MoECommunicator(ew.local_group(1)[0], config) as comm:
        one_after_the_other = exchange(comm, inputs, overlapped=False)
        overlapped = exchange(comm, inputs, overlapped=True)
    for step, (y, wanted) in enumerate(zip(overlapped, one_after_the_other, strict=True), 1):
        assert torch.equal(y, wanted), f"step {step} differs"  # noqa: S101
        print(f"step {step}: {y.numel()} elements, the same bits")


if __name__ == "__main__":
    main()
