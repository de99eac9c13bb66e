"""Softmax attention between positions of one example (docs/transformers.md holds the proofs)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..registry import Bound, Constant, Operation, Unbounded, Value, public_number, rule

# fused kernels approximate exponentials to 20 units in the last place, and subtract numbers that were made from them
KERNEL_MARGIN = 1 + 2.0**-15
_SMALLEST_CAUSAL = 2.0**-100  # far above what is zero in float32


@rule(F.scaled_dot_product_attention)
def attention(
    op: Operation, query: Value, key: Value, value: Value, attn_mask: object = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Bound:  # fmt: skip
    """Bounds A V with A = softmax(scale Q K^T + mask), which is a product of activations, but of bounded ones.

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
    if dropout_p != 0:
        raise Unbounded("its dropout has no rule", "leave it out, or put nn.Dropout behind the attention")
    if attn_mask is not None and not _leaves_a_key(attn_mask, (*query.shape[:-1], key.shape[-2])):
        raise Unbounded(
            "its mask is not a constant for all examples, or leaves a query without a key",
            "register a buffer of shape (queries, keys), or (heads, queries, keys), with a finite entry in each row",
        )
    if op.norms.rounding > KERNEL_MARGIN - 1:
        raise Unbounded("its kernels round in between, and no margin for bfloat16 covers that", "train in float32")
    factor = query.shape[-1] ** -0.5 if scale is None else public_number(scale)
    if is_causal and factor < _SMALLEST_CAUSAL:
        raise Unbounded("its kernels multiply -inf by the scale", "give a positive scale, or a mask without is_causal")
    factor = abs(factor)
    through_softmax = KERNEL_MARGIN * factor * value.norm / 2
    rows = KERNEL_MARGIN * math.sqrt(query.shape[-2])
    return Bound(rows * value.norm, (through_softmax * key.norm, through_softmax * query.norm, rows))


def _leaves_a_key(mask: object, shape: tuple[int, ...]) -> bool:
    """Returns whether a mask is the same for all examples, and every query may attend to a key."""
    if not isinstance(mask, Constant) or mask.tensor.is_complex():
        return False
    values = mask.tensor if mask.tensor.dim() <= len(shape) else mask.tensor.squeeze(0)
    if values.dim() > len(shape) or any(n not in (1, m) for n, m in zip(values.shape[::-1], shape[::-1], strict=False)):
        return False
    numbers = torch.where(values, 0.0, -math.inf) if values.dtype == torch.bool else values
    return bool((numbers < math.inf).all() and (numbers.amax(-1) > -math.inf).all())
