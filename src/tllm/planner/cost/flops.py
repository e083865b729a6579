"""Floating-point operations of a model's matrix products, counted from the spec: 2 m n k for [m, k] times [k, n].

Elementwise operations (norms, activations, rotations, softmax) do not count, as is usual (PaLM, 2204.02311, appendix
B). Of attention's scores only those count that the causal mask and the window allow: n (n + 1) / 2 for a document of n
tokens, fewer with a window, and n^2 where tokens see those after them. Of a mixture of experts only the chosen ones
count. What is recomputed to save memory does not count, so that these flops per second over the machine's peak are the
MFU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tllm.spec.cut import Cut, as_layer, cut_stage, projected_width, size
from tllm.spec.model_spec import DeltaSpec, LayerSpec, ModelSpec

BACKWARD = 2
"""Flops of a backward pass over those of a forward pass: each product has two gradients, each a product as large."""


def forward_flops(
    spec: ModelSpec, lengths: Sequence[int], target_tokens: int | None = None, before: Sequence[int] = ()
) -> int:
    """Of the whole model for documents of these lengths, with logits for `target_tokens` tokens (all, when left
    out). `before`: as `attention_flops` has it."""
    (whole,) = cut_stage(spec, (1,))
    layers = sum(layer_flops(spec, layer, whole, lengths, before) for layer in spec.layers)
    return round(layers) + logits_flops(spec, whole, sum(lengths) if target_tokens is None else target_tokens)


def training_flops(
    spec: ModelSpec,
    lengths: Sequence[int],
    target_tokens: int | None = None,
    is_frozen: bool = False,
    before: Sequence[int] = (),
    forward_only: int = 0,
) -> int:
    """A forward and a backward pass of the whole model; of one that is frozen, without gradients of its weights, and of
    its first `forward_only` layers, below the lowest one that is adapted, without a backward pass.

    Attention has no weights, and its backward pass is the same in both.
    """
    forward = forward_flops(spec, lengths, target_tokens, before)
    if not is_frozen:
        return (1 + BACKWARD) * forward
    (whole,) = cut_stage(spec, (1,))
    core = sum(attention_flops(spec, layer, whole, lengths, before) for layer in spec.layers[forward_only:])
    below = sum(layer_flops(spec, layer, whole, lengths, before) for layer in spec.layers[:forward_only])
    return 2 * forward + core - round(below)


def layer_flops(
    spec: ModelSpec, layer: LayerSpec, cut: Cut, lengths: Sequence[int], before: Sequence[int] = ()
) -> float:
    """A forward pass of one layer on a rank that holds `cut`. `before`: as `attention_flops` has it.

    It is a whole number, unless experts are spread over ranks: then each expert is taken to be chosen equally often.
    """
    tokens = sum(lengths)
    projections = 2 * tokens * sum(matrix.elements for matrix in attention_matrices(spec, layer, cut))
    own_input = 3 * 2 * spec.hidden_size * spec.per_layer_width  # made of the embedding; its gate and projection
    own, of_layer = as_layer(spec, layer, cut)
    each = _mlp_flops(own, layer, of_layer) + own_input
    return projections + attention_flops(spec, layer, cut, lengths, before) + tokens * each


class AttentionMatrix(NamedTuple):
    """`copies` matrices [inner, columns] that rows are multiplied by on a rank."""

    copies: int
    inner: int
    columns: int

    @property
    def elements(self) -> int:
        return self.copies * self.inner * self.columns


def attention_matrices(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> list[AttentionMatrix]:
    """Those of one layer before and after the core of attention, in order."""
    D, N, of = spec.hidden_size, size(cut.heads), spec.latent
    if layer.delta:
        return [
            AttentionMatrix(1, D, delta_widths(layer.delta, cut)),
            AttentionMatrix(1, delta_values(layer.delta, cut), D),
        ]
    if of is None:
        of_layer, _ = as_layer(spec, layer, cut)
        return [AttentionMatrix(1, D, projected_width(spec, layer, cut)), AttentionMatrix(1, N * of_layer.head_dim, D)]
    return [
        AttentionMatrix(1, D, of.latents),
        AttentionMatrix(1, of.q_width or D, N * of.query_dim),
        AttentionMatrix(N, of.plain_dim, of.width),
        AttentionMatrix(N, of.width, of.value_dim),
        AttentionMatrix(1, N * of.value_dim, D),
    ]


def delta_channels(of: DeltaSpec, cut: Cut) -> int:
    """Channels of a gated delta net's convolution on a rank: queries, keys and values."""
    return 2 * size(cut.key_heads) * of.key_dim + delta_values(of, cut)


def delta_values(of: DeltaSpec, cut: Cut) -> int:
    """Widths of a gated delta net's values on a rank."""
    return size(cut.value_heads) * of.value_dim


def delta_widths(of: DeltaSpec, cut: Cut) -> int:
    """What a gated delta net makes of a token's hidden state: the channels, output gates, alphas and betas."""
    return delta_channels(of, cut) + delta_values(of, cut) + 2 * size(cut.value_heads)


def attention_flops(
    spec: ModelSpec, layer: LayerSpec, cut: Cut, lengths: Sequence[int], before: Sequence[int] = ()
) -> int:
    """Forward pass of the core of attention: scores, and values by their weights. `before`: tokens of others that each
    document sees as well, as if it began with them; left out, none.

    Of a gated delta net what one token after another takes: each state is read, corrected, and read once more.
    """
    if layer.delta:
        return 3 * 2 * layer.delta.key_dim * delta_values(layer.delta, cut) * sum(lengths)
    spec, cut = as_layer(spec, layer, cut)
    documents = zip(lengths, before or (0,) * len(lengths), strict=True)
    pairs = sum(seen(first + length, layer.window) - seen(first, layer.window) for length, first in documents)
    if spec.bidirectional:  # each pair of different tokens both ways
        pairs = 2 * pairs - sum(lengths)
    return 2 * 2 * spec.head_dim * size(cut.heads) * pairs


def logits_flops(spec: ModelSpec, cut: Cut, tokens: int) -> int:
    """Of the model's end, for so many tokens: logits, or the labels of one that scores, which every rank computes."""
    return 2 * tokens * spec.hidden_size * head_width(spec, cut)


def head_width(spec: ModelSpec, cut: Cut) -> int:
    """What a rank makes of a token at the model's end."""
    return spec.num_labels or size(cut.vocab)


def seen(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it attends to, in one document of `length` tokens."""
    width = length if window is None else min(window, length)
    return width * (width + 1) // 2 + (length - width) * width


def _mlp_flops(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> float:
    """Forward pass for one token: gate, up and down, of each expert chosen."""
    D, moe = spec.hidden_size, layer.moe
    if moe is None:
        return 2 * (1 + spec.into_mlp) * D * size(cut.width)
    chosen = moe.top_k * size(cut.experts) / moe.num_experts
    shared = 6 * D * size(cut.shared_width) + 2 * D * moe.shared_gate if moe.shared_width else 0
    return 2 * D * moe.num_experts + chosen * 6 * D * size(cut.expert_width) + shared
