"""Activation memory: bytes that a forward pass keeps for its backward pass.

It is what autograd saves on this model, counted by memory, so that several views of a tensor count once (the idea is
that of Korthikanti et al., 2205.05198). With T tokens on a rank, t of them outside the cut layers (fewer with sequence
parallelism), b bytes of a number and w bytes of one in float32 (float64 of float64), a Llama layer with N query heads,
K key-value heads, head width H and MLP width F on this rank keeps, if nothing is recomputed,

    2 t (D b + w) + 2 T D b + T (2 N + 4 K) H b + (N H b + N w) T + 3 T F b

bytes: for two norms (input and scale), the inputs of the cut layers, merged qkv and rotated q and k, attention's result
and the logarithms of its sums of exponentials, and the MLP (gate, up, and what goes down). With `recompute=selective`
only q, k, v and the result are kept of attention; with `layer` only the layer's input, t D b. Masks of windows, capped
scores and copies of several documents come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from tllm.planner.cost.flops import delta_channels, delta_values, delta_widths
from tllm.spec.cut import Cut, as_layer, kv_index, projected_width, size
from tllm.spec.model_spec import DeltaSpec, LatentSpec, LayerSpec, ModelSpec, MoeSpec
from tllm.spec.plan import Recompute

SCALE = 4
"""Bytes of what a row is multiplied by in a norm."""

WIDEST = 8
"""Bytes of the widest number, for which there are no kernels."""

INTEGER = 8
"""Bytes of a token's id, of a place and of an expert's number."""

WORKED_OUT_AGAIN = ("silu", "gelu_pytorch_tanh")
"""Activations of gates for which there are kernels."""

ROWS_AT_ONCE = 256
"""Queries that are computed together where the window is narrower."""

DELTA_CHUNK = 64
"""Tokens that a gated delta net works out together."""


@dataclass(frozen=True)
class Microbatch:
    """What a rank has of a microbatch."""

    lengths: Sequence[int]
    """Tokens of each document of the whole microbatch."""
    tokens: int
    """Tokens that go through this rank's cut layers."""
    rows: int
    """Tokens that it holds outside of them; fewer with sequence parallelism."""
    target_tokens: int
    """Tokens that the loss is computed for."""
    item_bytes: int
    """Bytes of one number."""
    cp: bool = False
    """Whether several ranks share the microbatch, so that attention goes round a ring (context parallelism)."""
    before: Sequence[int] = ()
    """Tokens of another document that each document sees before its own; left out, none."""
    has_columns: bool = False
    """Whether ranks divide the columns of hidden states (a grid), whose norms are then made of torch's steps."""
    is_lean: bool = True
    """Whether norms and gates keep what they take in alone, and not all that torch's steps for them do."""

    @property
    def documents(self) -> list[tuple[int, int]]:
        """Of each document its tokens, and those that it sees before them."""
        return list(zip(self.lengths, self.before or (0,) * len(self.lengths), strict=True))

    @property
    def upcast_bytes(self) -> int:
        """Bytes of one number in what is computed in float32 at least."""
        return max(self.item_bytes, 4)

    @property
    def is_sliced(self) -> bool:
        """Whether sequence parallelism divides the tokens outside of the cut layers."""
        return self.rows != self.tokens


def layer_bytes(spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch, selective: bool = False) -> int:
    """Bytes of one layer that keeps everything, or with `selective` everything but the core of attention."""
    T, D, b = batch.tokens, spec.hidden_size, batch.item_bytes
    norm = _norm(batch.rows, D, _of_norms(batch), spec.norm_offset)
    into = T * D * b  # what a cut layer takes in: it is kept for the gradient of its weight
    norms = {"pre": 2 * (norm + into), "post": 2 * (norm + into), "both": 2 * (2 * norm + into)}[spec.norm_order]
    return norms + _attention(spec, layer, cut, batch, selective) + _mlp(spec, layer, cut, batch)


def run_bytes(spec: ModelSpec, layers: range, cut: Cut, batch: Microbatch, recompute: Recompute) -> int:
    """Bytes of one run of layers and, at the model's start, the embedding; without logits."""
    t, D, b = batch.rows, spec.hidden_size, batch.item_bytes
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    ropes = {spec.layers[number].rope for number in layers} - {None}
    kept = sum(batch.tokens * (2 * rope.dim + bool(rope.query_scale_beta)) * b for rope in ropes if rope is not None)
    if recompute == "layer":
        kept += len(layers) * t * D * b
    else:
        kept += sum(layer_bytes(spec, spec.layers[n], cut, batch, recompute == "selective") for n in layers)
        kept += 0 if is_first or shares_input(spec, batch) else t * D * b
    kept += 0 if is_last else t * D * b  # the result, from which the backward pass begins
    return kept + (batch.tokens * (INTEGER + 1) if is_first else 0)


def recomputed_bytes(spec: ModelSpec, number: int, cut: Cut, batch: Microbatch, recompute: Recompute) -> int:
    """Bytes that a layer has in its backward pass because it is recomputed, on top of what it keeps in any case."""
    layer = spec.layers[number]
    chunks = _delta_chunks(layer.delta, cut, batch) if layer.delta else 0
    if recompute == "none" or (chunks and recompute == "selective"):
        return chunks
    whole = layer_bytes(spec, layer, cut, batch) + chunks
    if recompute == "selective":
        return whole - layer_bytes(spec, layer, cut, batch, selective=True)
    return whole - (batch.rows * spec.hidden_size * batch.item_bytes if shares_input(spec, batch) else 0)


def split_backward_bytes(spec: ModelSpec, layers: range, cut: Cut, batch: Microbatch) -> int:
    """Bytes of gradients that wait between the two halves of a backward pass for those of the weights (zero bubble)."""
    return sum(_waiting(spec, spec.layers[number], cut, batch) for number in layers)


def logits_bytes(spec: ModelSpec, cut: Cut, batch: Microbatch) -> int:
    """Bytes of the final norm, the logits and the loss; or of the scores of all tokens, of which those of a document's
    last token are chosen."""
    P, D, b, w = logits_tokens(batch), spec.hidden_size, batch.item_bytes, batch.upcast_bytes
    of_norms = _of_norms(batch)
    if spec.num_labels:
        T = batch.tokens
        return _norm(batch.rows, D, of_norms, spec.norm_offset) + T * D * b + T * (spec.num_labels * w + 1)
    kept = (
        _norm(batch.rows if batch.is_sliced else P, D, of_norms, spec.norm_offset) + P * D * b + P * size(cut.vocab) * w
    )
    if spec.final_softcap is not None:
        kept += P * size(cut.vocab) * w
    kept += P * (INTEGER + 1 + w)
    return kept + (batch.tokens + P * INTEGER if batch.tokens > P else 0)


def logits_tokens(batch: Microbatch) -> int:
    """Tokens that logits are computed for. With sequence parallelism it is all of them, as those without a target lie
    on several ranks."""
    return batch.tokens if batch.is_sliced else batch.target_tokens


def shares_input(spec: ModelSpec, batch: Microbatch) -> bool:
    """Whether the first thing that a layer keeps is its input itself and not a copy of it."""
    if spec.norm_order == "post":
        return not batch.is_sliced
    return _of_norms(batch).is_lean or batch.item_bytes == batch.upcast_bytes


def _of_norms(batch: Microbatch) -> Microbatch:
    """As the norms of hidden states have it."""
    return replace(batch, is_lean=False) if batch.has_columns else batch


def _norm(rows: int, width: int, batch: Microbatch, offset: bool, heads: int = 1, copied: bool = True) -> int:
    """Bytes of `heads` norms over `width` in each row: its input, weight, and the scale of a row, which float64 has
    not. By torch's steps: input (a float32 copy of a 16-bit one), scale, result.

    Without `copied` the input is kept by another operation too, where it is wide enough.
    """
    b, w = batch.item_bytes, batch.upcast_bytes
    if batch.is_lean:
        return rows * heads * ((SCALE if b < WIDEST else 0) + (width * b if copied else 0)) + width * b
    result = w if offset else b
    of_input = 0 if not copied and b == w else rows * heads * width * w
    return of_input + rows * heads * (w + width * result) + (width * w if offset else 0)


def _attention(spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch, selective: bool) -> int:
    if layer.delta:
        return _delta_net(layer.delta, cut, batch)
    if spec.latent is not None:
        return _latent_attention(spec, spec.latent, layer, cut, batch, selective)
    merged = projected_width(spec, layer, cut)
    spec, cut = as_layer(spec, layer, cut)
    T, H, b, w = batch.tokens, spec.head_dim, batch.item_bytes, batch.upcast_bytes
    N, K = size(cut.heads), size(cut.kv_heads)
    kept = N * T * H * b  # what the output layer takes in
    kept += 2 * N * T * H * b * spec.attention_gate  # what attention gives, and the gates that it is multiplied by
    if spec.qk_norm == "head":
        kept += sum(_norm(T, H, batch, spec.norm_offset, heads, copied=False) for heads in (N, K))
    elif spec.qk_norm == "full":
        by_steps = replace(batch, is_lean=False)  # its width may be cut between ranks
        kept += sum(_norm(T, heads * H, by_steps, False, copied=False) for heads in (N, K))
    if spec.value_norm:
        kept += T * K * (w + (H * w if b < w else 0))
    apart = layer.rope is not None or spec.qk_norm != "none"  # q and k no longer lie in the merged qkv
    gathered = kv_index(cut.heads, spec.num_heads, spec.num_kv_heads) is not None
    core = _Core(0) if selective else _core(spec, layer, N, N if gathered else K, batch)
    if gathered and not selective and not batch.cp:
        kept, core = kept + (2 * N * T * H * b if core.uses_kv else 0), replace(core, uses_kv=False)
    of_qkv = (
        (core.uses_kv and not spec.value_norm)
        or (not apart and core.uses_q)
        or (spec.qk_norm == "head" and batch.is_lean)
        or (spec.qk_norm != "none" and b == w)
    )
    turned = apart * (core.uses_q * N + core.uses_kv * K) + core.uses_kv * spec.value_norm * K
    return kept + core.kept + T * b * (H * turned + of_qkv * merged)


def _delta_net(of: DeltaSpec, cut: Cut, batch: Microbatch) -> int:
    """Without what the chunks keep, which is worked out again in any case."""
    T, b, w, N = batch.tokens, batch.item_bytes, batch.upcast_bytes, size(cut.value_heads)
    values = delta_values(of, cut)
    gates = 4 * T * N * w + 2 * N * w  # beta, and what alpha is made of
    normed = T * (4 * values + N) * w + (T * values * w if b < w else 0)  # with copies of 16-bit output gates
    return T * delta_widths(of, cut) * b + gates + normed + T * values * b


def _delta_chunks(of: DeltaSpec, cut: Cut, batch: Microbatch) -> int:
    """About what the chunks of a gated delta net keep while their gradients are worked out."""
    N, L = size(cut.value_heads), min(DELTA_CHUNK, max(batch.lengths, default=0))
    of_token = 3 * delta_channels(of, cut) + N * (8 * of.key_dim + 6 * of.value_dim + 6 * L)
    return batch.tokens * of_token * batch.upcast_bytes


def _latent_attention(
    spec: ModelSpec, of: LatentSpec, layer: LayerSpec, cut: Cut, batch: Microbatch, selective: bool
) -> int:
    spec, cut = as_layer(spec, layer, cut)
    T, b, w, N = batch.tokens, batch.item_bytes, batch.upcast_bytes, size(cut.heads)
    latents = T * of.latents * b if batch.is_lean or b == w else 0  # what the norms take in, if they keep no copies
    norms = sum(_norm(T, width, batch, False, copied=False) for width in (of.q_width, of.width) if width)
    queries = T * (of.q_width + N * of.query_dim) * b
    core = _Core(0) if selective else _core(spec, layer, N, 1, batch)
    of_core = T * spec.head_dim * b * (core.uses_q * N + core.uses_kv)
    result = N * T * (spec.head_dim + of.value_dim) * b  # of attention, and what the output layer takes in
    return latents + norms + queries + core.kept + of_core + result


@dataclass(frozen=True)
class _Core:
    """What the core of attention keeps: `kept` bytes, and whether it uses q, and k and v, as they are."""

    kept: int
    uses_q: bool = True
    uses_kv: bool = True


def _core(spec: ModelSpec, layer: LayerSpec, N: int, K: int, batch: Microbatch) -> _Core:
    """Of N query heads that meet K key-value heads."""
    T, H, b, w = batch.tokens, spec.head_dim, batch.item_bytes, batch.upcast_bytes
    if batch.cp:
        return _Core(T * (2 * K * H * b + N * w), uses_kv=False)
    calls = _calls(layer, batch)
    if spec.attention_softcap is None and not spec.attention_sinks:
        masks = sum(rows * keys * b for _, rows, keys, masked, _ in calls if masked)
        # Of several calls each keeps its result, and all are put together.
        copies = sum(2 * B * K * keys * H * b for B, _, keys, _, joined in calls if joined)
        return _Core(T * N * w + masks + copies + (T * N * H * b if len(calls) > 1 else 0))
    kept, sinks, capped = 0, spec.attention_sinks, spec.attention_softcap is not None
    repeats = K not in (1, N)  # one kv head is for all query heads as it is, several are copied for each
    for B, rows, keys, _, joined in calls:
        kept += rows * keys + B * N * rows * (keys * (b * capped + (b if b < w else 0)) + (keys + sinks) * w)
        kept += (B * N * rows * H * b if B > 1 else 0) + (2 * B * N * keys * H * b if B > 1 or repeats or joined else 0)
    alone = any(B == 1 for B, *_ in calls)
    return _Core(kept, uses_q=alone, uses_kv=alone and not repeats)


def scores_bytes(spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch) -> int:
    """Bytes of the gradients of scores that are written out in the largest call of attention; others never are."""
    if (spec.attention_softcap is None and not spec.attention_sinks) or batch.cp:
        return 0
    return max(B * rows * keys for B, rows, keys, *_ in _calls(layer, batch)) * size(cut.heads) * batch.upcast_bytes


class AttentionCall(NamedTuple):
    """One call of attention: so many documents with so many queries and keys each, which are `joined` of a shared
    prompt's and their own."""

    documents: int
    queries: int
    keys: int
    is_masked: bool
    is_joined: bool = False


def _calls(layer: LayerSpec, batch: Microbatch) -> list[AttentionCall]:
    """The calls of attention for one microbatch: documents of equal length that follow one another share them."""
    groups = [(*one, len(list(group))) for one, group in groupby(batch.documents)]
    return [
        AttentionCall(count, *block, is_joined=first > 0)
        for length, first, count in groups
        for block in attention_blocks(first + length, layer.window, first)
    ]


def attention_blocks(length: int, window: int | None, first: int = 0) -> list[tuple[int, int, bool]]:
    """The blocks of queries in which a document's tokens from `first` on are computed: (queries, keys, whether it needs
    a mask)."""
    if window is None or window >= length:
        return [(length - first, length, first > 0)]
    at_once = max(window, ROWS_AT_ONCE)
    blocks: list[tuple[int, int, bool]] = []
    for start in range(first, length, at_once):
        stop, low = min(start + at_once, length), max(0, start - window + 1)
        blocks.append((stop - start, stop - low, low < start or window < stop - start))
    return blocks


def _mlp(spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch) -> int:
    T, D, b, w, moe = batch.tokens, spec.hidden_size, batch.item_bytes, batch.upcast_bytes, layer.moe
    is_lean = batch.is_lean and is_worked_out_again(spec)
    if moe is None:
        return (2 * spec.into_mlp - is_lean) * T * size(cut.width) * b
    chosen = round(T * moe.top_k * size(cut.experts) / moe.num_experts)
    widths = 4 - is_lean if moe.clamp is None else 7  # gate, up, and what the activation makes of them
    of_one = 2 * INTEGER + b * (3 * D + widths * size(cut.expert_width) + 1)
    scored = moe.top_k if moe.scores == "chosen_softmax" else moe.num_experts
    router = T * (scored * w + moe.top_k * INTEGER) + (T * (moe.top_k + 1) * w if moe.renormalise else 0)
    places = T * min(moe.top_k, len(cut.holders)) * INTEGER if len(cut.holders) > 1 else 0
    shared = T * ((4 - is_lean) * size(cut.shared_width) + moe.shared_gate * (D + 1)) * b if moe.shared_width else 0
    return router + places + chosen * of_one + shared + (_beside_mlp(moe, D, batch) if moe.beside_mlp else 0)


def is_worked_out_again(spec: ModelSpec) -> bool:
    """Whether a backward pass takes the activation of gates once more, so that what it comes to is not kept."""
    return spec.gated and spec.activation in WORKED_OUT_AGAIN


def _beside_mlp(moe: MoeSpec, D: int, batch: Microbatch) -> int:
    """What experts beside an MLP keep more than with it in their place: norms before the experts and the router, and
    one after each sum; the norm before the MLP is of all tokens."""
    T, b = batch.tokens, batch.item_bytes
    before = 2 * _norm(T, D, batch, offset=False, copied=False) + T * D * b  # the last is what the router takes in
    gathered = _norm(T, D, batch, offset=False) - _norm(batch.rows, D, batch, offset=False)
    return before + gathered + 2 * _norm(batch.rows, D, batch, offset=False) + 2 * T * moe.top_k * b


def _waiting(spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch) -> int:
    """Bytes of one layer: the gradient at the output of each product with a weight, and of norms."""
    T, D, b = batch.tokens, spec.hidden_size, batch.item_bytes
    merged = projected_width(spec, layer, cut)
    if layer.delta:
        merged = delta_widths(layer.delta, cut) + delta_channels(layer.delta, cut)
    if spec.latent is not None:
        of = spec.latent
        merged = of.latents + size(cut.heads) * (of.query_dim + of.width + of.value_dim)
    norms = batch.rows * D * b * (2 if spec.norm_order == "both" else 0)
    if layer.moe is None:
        return norms + T * b * (merged + 2 * D + 2 * D + spec.into_mlp * size(cut.width))
    chosen = round(T * layer.moe.top_k * size(cut.experts) / layer.moe.num_experts)
    experts = chosen * b * (D + 2 * size(cut.expert_width)) + T * layer.moe.num_experts * b
    shared = T * b * (D + 2 * size(cut.shared_width)) if layer.moe.shared_width else 0
    return norms + T * b * (merged + 3 * D) + experts + shared
