"""Softmax attention between positions of one example (docs/transformers.md holds the proofs)."""

from __future__ import annotations

import math

import torch.nn.functional as F

from ..registry import rule
from ..values import Bound, Operation, Unbounded, Value, public_number

# fused kernels approximate exponentials to 20 units in the last place, and subtract numbers that were made from them
KERNEL_MARGIN = 1 + 2.0**-15


@rule(F.scaled_dot_product_attention)
def attention(
    op: Operation, query: Value, key: Value, value: Value, attn_mask: object = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Bound:  # fmt: skip
    """Bounds A V with A = softmax(scale Q K^T), which is a product of activations, but of bounded ones.

    Every row of A is a distribution, so that no output is longer than the longest value, and the norm of A is at most
    sqrt(rows). The Jacobian of softmax has norm at most 1/2 and is taken with a cotangent D V^T, of norm at most
    ||D|| ||V||; the gradient of Q multiplies the result by scale K, that of K by scale Q. Heads only add squares.
    """
    operands = (query, key, value)
    if not all(isinstance(v, Value) and len(v.shape) > 1 and v.numel for v in operands):
        raise Unbounded(
            "its queries, keys and values are not all positions of the example",
            "give tensors (batch, ..., positions, features) that are computed from the input",
        )
    if len({v.shape[:-2] for v in operands}) > 1 or enable_gqa:
        raise Unbounded("it broadcasts over heads, which multiplies gradients", "give as many heads of each")
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise Unbounded("its kernels read beyond the end of operands that do not fit", "give a value for each key")
    if attn_mask is not None or dropout_p != 0:
        raise Unbounded("it has a mask or dropout, for which there is no rule", "leave both out; is_causal is taken")
    if op.norms.rounding > KERNEL_MARGIN - 1:
        raise Unbounded("its kernels round in between, and no margin for bfloat16 covers that", "train in float32")
    factor = query.shape[-1] ** -0.5 if scale is None else abs(public_number(scale))
    through_softmax = KERNEL_MARGIN * factor * value.norm / 2
    rows = KERNEL_MARGIN * math.sqrt(query.shape[-2])
    return Bound(rows * value.norm, (through_softmax * key.norm, through_softmax * query.norm, rows))
