"""JAX arrays in and out, on the CPU: they go in through DLPack with no copy, and NumPy comes out.

``python examples/from_jax.py`` runs two ranks.
"""

from __future__ import annotations

import sys

import expertwire as ew

RANKS, EXPERTS, HIDDEN, MOST = 2, 4, 128, 5


def rank_main(group: ew.Group) -> bool:
    """Dispatch, let the experts of this rank work in JAX, combine. Return whether the result is right."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(group.rank)
    x = jax.random.normal(key, (MOST, HIDDEN), jnp.bfloat16)
    topk_ids = jnp.argsort(jax.random.uniform(key, (MOST, EXPERTS)), axis=1)[:, :2].astype(jnp.int32)
    weights = jnp.full((MOST, 2), 0.5, jnp.float32)

    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_topk": 2, "max_tokens_per_rank": MOST}
    with ew.MoECommunicator(group, **sizes) as comm:
        out, handle = comm.dispatch(x, topk_ids, weights)
        factors = 2.0 ** (comm.first_local_expert + jnp.arange(comm.num_local_experts))
        answers = jax.jit(lambda rows, by: (rows * by[:, None, None]).astype(jnp.bfloat16))(out.tokens, factors)
        y = jnp.asarray(comm.combine(answers, handle))
    want = (x.astype(jnp.float32) * (weights * 2.0**topk_ids).sum(1, keepdims=True)).astype(jnp.bfloat16)
    return bool(jnp.allclose(y.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-6))


if __name__ == "__main__":
    results = ew.spawn(rank_main, RANKS)
    print(f"every rank has the right sums: {all(results)}")
    sys.exit(not all(results))
