"""Operations that no rule can serve, each with the reason and the fix."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import nn

from ..registry import refuse

_FLOORED = "lipdp_lightning.layers.GroupNorm(groups, channels, alpha=...)"

refuse(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, F.batch_norm,
    reason="batch normalisation mixes examples: one example changes the output and gradient of every other",
    hint=f"use {_FLOORED}, or let lipdp_lightning.convert(model) replace them",
)  # fmt: skip
refuse(
    nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm,
    F.group_norm, F.layer_norm, F.instance_norm, F.local_response_norm,
    reason="it divides by sqrt(var + eps), with constant 1/sqrt(eps) (316 at 1e-5): no useful bound exists",
    hint=f"use {_FLOORED}, LayerNorm or InstanceNorm of lipdp_lightning.layers",
)  # fmt: skip
refuse(
    nn.RMSNorm, F.rms_norm, F.normalize,
    reason="it divides by a norm without a useful floor",
    hint="use lipdp_lightning.layers.LayerNorm, or BoundedInput for the input",
)  # fmt: skip
refuse(
    nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax",
    reason="its Lipschitz constant and its values grow with the number of classes",
    hint="return the logits; the cross-entropy loss takes them as they are",
)  # fmt: skip
refuse(
    nn.GLU, F.glu,
    reason="a gate is a product of activations, which is not Lipschitz",
    hint="use lipdp_lightning.layers.MaxMin",
)  # fmt: skip
refuse(
    nn.Embedding, nn.EmbeddingBag, F.embedding,
    reason="an embedding's row gradient and input norm have no rule",
    hint="freeze it inside FrozenFeatures, as TokenEmbedding of lipdp_lightning.features is",
)  # fmt: skip
refuse(
    nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    reason="it computes with weights of its own, normalises without a floor, and takes masks and dropout",
    hint="compose scaled_dot_product_attention with nn.Linear, as lipdp_lightning.models.Transformer does",
)  # fmt: skip
refuse(
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    reason="functional dropout is keyed by the row in the batch: removing one example re-deals every mask",
    hint="use nn.Dropout, which make_private keys by example",
)  # fmt: skip
refuse(
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, F.rrelu,
    reason="its draws are keyed by the row in the batch: removing one example re-deals all others",
    hint="use nn.Dropout, which make_private keys by example",
)  # fmt: skip
refuse(
    nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell,
    reason="recurrent layers multiply activations and have no rule",
    hint="freeze the encoder and train a head on its bounded features",
)  # fmt: skip
refuse(
    nn.ConvTranspose3d, nn.Conv3d, nn.Bilinear,
    reason="there is no certified norm for it yet",
    hint="use Conv1d, Conv2d or Linear, or register a rule, see CONTRIBUTING",
)  # fmt: skip
refuse(
    torch.matmul, torch.bmm, torch.mm, operator.matmul, "matmul", "bmm", "mm", "__matmul__",
    reason="a product of activations is not Lipschitz, and a bare weight in matmul has no rule",
    hint="use nn.Linear or torch.nn.functional.linear(x, weight, bias)",
)  # fmt: skip
refuse(
    torch.log, torch.exp, torch.sqrt, torch.pow, torch.square, operator.pow,
    "log", "exp", "sqrt", "pow", "square", "__pow__",
    reason="its slope is unbounded",
    hint="apply it to the data as a public preprocessing step, or register a rule on a clamped range",
)  # fmt: skip
refuse(
    torch.max, torch.min, "max", "min",
    reason="it returns indices beside values, or reduces over the batch",
    hint="use amax or amin with a dim of 1 or later, or lipdp_lightning.layers.MaxMin",
)  # fmt: skip
refuse(
    "sort", torch.sort, "topk", torch.topk,
    reason="sorting returns indices beside values and has no rule",
    hint="use lipdp_lightning.layers.GroupSort",
)  # fmt: skip
