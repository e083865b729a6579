"""Floating-point operations of a model's matrix products, counted from the spec: 2 m n k for [m, k] times [k, n].

What is elementwise (norms, activations, rotations, softmax) is left out, as is usual (2204.02311, appendix B). Of
attention's scores only those count that a query may see: a document of n tokens has n (n + 1) / 2 of them, fewer with
a window. Of a mixture of experts only the chosen ones count. What is computed a second time to save memory does not
count, so that these numbers over the machine's peak are the MFU.
"""

from __future__ import annotations

from collections.abc import Sequence

from tllm.spec.cut import Cut, cut_stage, size
from tllm.spec.model_spec import LayerSpec, ModelSpec

BACKWARD = 2
"""Work of a backward pass over that of a forward pass: each product has two gradients, and each is one as large."""


def forward_flops(spec: ModelSpec, lengths: Sequence[int], predicted: int | None = None) -> int:
    """Of the whole model for documents of these lengths, with logits for `predicted` tokens (all, when left out)."""
    (whole,) = cut_stage(spec, (1,))
    layers = sum(layer_flops(spec, layer, whole, lengths) for layer in spec.layers)
    return round(layers) + logits_flops(spec, whole, sum(lengths) if predicted is None else predicted)


def training_flops(spec: ModelSpec, lengths: Sequence[int], predicted: int | None = None) -> int:
    """Forward and backward of the whole model."""
    return (1 + BACKWARD) * forward_flops(spec, lengths, predicted)


def flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Forward and backward for each token of a document of `seq_len`."""
    return training_flops(spec, [seq_len]) / seq_len


def layer_flops(spec: ModelSpec, layer: LayerSpec, cut: Cut, lengths: Sequence[int]) -> float:
    """Forward pass of one layer on a rank that holds `cut`.

    A whole number, but where experts are spread over ranks: then each is expected to be chosen equally often.
    """
    D, H, tokens = spec.hidden_size, spec.head_dim, sum(lengths)
    heads, kv_heads = size(cut.heads), size(cut.kv_heads)
    projections = 2 * tokens * D * H * (2 * heads + 2 * kv_heads)
    return projections + attention_flops(spec, layer, cut, lengths) + tokens * _mlp_flops(spec, layer, cut)


def attention_flops(spec: ModelSpec, layer: LayerSpec, cut: Cut, lengths: Sequence[int]) -> int:
    """Forward pass of the core of attention: scores, and values by their weights."""
    return 2 * 2 * spec.head_dim * size(cut.heads) * sum(seen(length, layer.window) for length in lengths)


def logits_flops(spec: ModelSpec, cut: Cut, tokens: int) -> int:
    return 2 * tokens * spec.hidden_size * size(cut.vocab)


def seen(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in one document."""
    width = length if window is None else min(window, length)
    return width * (width + 1) // 2 + (length - width) * width


def _mlp_flops(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> float:
    """Forward pass for one token: gate, up and down, of each expert chosen."""
    D, moe = spec.hidden_size, layer.moe
    if moe is None:
        return 6 * D * size(cut.width)
    chosen = moe.top_k * size(cut.experts) / moe.num_experts
    shared = 6 * D * size(cut.shared_width) + 2 * D if moe.shared_width else 0
    return 2 * D * moe.num_experts + chosen * 6 * D * size(cut.expert_width) + shared
