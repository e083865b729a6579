"""Self-attention of one layer, and `Attend`: how the tokens of a batch meet those before them in their sequences.

The model calls an `Attend`; the engine brings one over its paged cache, the trainer one over packed documents.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from tllm.model.norm import CutRMSNorm, RMSNorm, RootMeanSquare
from tllm.model.recurrence import Advance
from tllm.model.rope import Rotation, rotate_both
from tllm.parallel.linear import Adapt, LinearRows, unadapted
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Cut, as_layer, kv_index, size
from tllm.spec.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: the scale of its scores, and what else is not plain causal attention.

    `window`: how many keys back a query sees, itself included (None: all). `softcap`: scores become
    softcap * tanh(score / softcap). `kv_index`: for each local query head its local kv head, given only where query
    heads do not divide evenly among kv heads. `sinks`: each query head comes with a score of its own, which joins its
    softmax and has no value: weights then add up to less than 1. `values_are_keys`: one tensor is both. `kv_shape`: how
    many key-value heads there are here, and how wide each is. `bidirectional`: a query sees the keys after it too, of a
    window as many each way.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_index: tuple[int, ...] | None = None
    sinks: bool = False
    values_are_keys: bool = False
    kv_shape: tuple[int, int] = (0, 0)
    bidirectional: bool = False


@functools.cache
def first_heads(spec: AttentionSpec, num_heads: int, kv_heads: int) -> tuple[int, ...]:
    """The first query head of each kv head, and the number of heads at the end: the same for every batch."""
    index = spec.kv_index or tuple(head * kv_heads // num_heads for head in range(num_heads))
    return (*(index.index(kv) for kv in range(kv_heads)), num_heads)


class Attend(Protocol):
    """(layer number, q [T, N, H], k [T, K, H], v [T, K, H]) -> [T, N, H] for the tokens of one batch, packed.

    `sinks_N` are the sinks' scores, of a layer that has them. Of a layer that has a state in place of keys, `recur`
    takes it from each sequence's tokens to the next: see `model.recurrence`.
    """

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor: ...

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention: x_TD -> x_TD, over the heads held here."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int, name: str) -> None:
        super().__init__()
        self.layer = layer
        spec, cut = as_layer(spec, spec.layers[layer], mesh.cut)
        self.head_dim = H = spec.head_dim
        first, last = cut.heads
        self.heads = [last - first, size(cut.kv_heads), size(cut.kv_heads)]
        rows = qkv_rows(spec, spec.layers[layer], cut, name)
        shared = mesh.tp.size > 1 or (mesh.pp > 1 and spec.is_key_source(layer))
        self.qkv_proj = mesh.cut_layers.column(spec.hidden_size, rows, spec.attention_bias, replicated=shared)
        columns = (first * H, last * H)
        self.o_proj = mesh.cut_layers.row(f"{name}.o_proj", columns, spec.hidden_size, spec.output_bias)
        self.q_norm, self.k_norm = qk_norms(spec, spec.layers[layer], cut, mesh, name)
        self.v_norm = RootMeanSquare(spec.norm_eps) if spec.value_norm else nn.Identity()
        self.sinks: nn.Parameter | None = None
        if spec.attention_sinks:
            piece = ShardPiece(f"{name}.sinks", source=(cut.heads,))
            self.sinks = cut_parameter((last - first,), Shard((piece,)))
        self.spec = attention_spec(spec, spec.layers[layer], cut)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapt: Adapt = unadapted) -> Tensor:
        q_TNH, k_TKH, v_TKH = self.project(x_TD, adapt)
        q_TNH, k_TKH = rotate_both(self.q_norm(q_TNH), self.k_norm(k_TKH), rotation)
        o_TNH = attend(self.layer, q_TNH, k_TKH, self.v_norm(v_TKH), self.sinks)
        y_TD: Tensor = self.o_proj(o_TNH.flatten(1), adapt)
        return y_TD

    def project(self, x_TD: Tensor, adapt: Adapt) -> Sequence[Tensor]:
        """Queries, keys and values as they come from their projection."""
        heads_TMH = self.qkv_proj(x_TD, adapt).unflatten(-1, (-1, self.head_dim))
        parts: Sequence[Tensor] = heads_TMH.split(self.heads, dim=1)
        return parts


class SharedProjectionAttention(Attention):
    """The same where one projection makes both: values are the keys before their norm and rope."""

    def project(self, x_TD: Tensor, adapt: Adapt) -> Sequence[Tensor]:
        heads_TMH = self.qkv_proj(x_TD, adapt).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = heads_TMH.split(self.heads[:2], dim=1)
        return q_TNH, k_TKH, k_TKH


def attention_spec(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> AttentionSpec:
    """How a layer attends with the heads held here."""
    return AttentionSpec(
        scale=spec.attention_scale,
        window=layer.window,
        softcap=spec.attention_softcap,
        kv_index=kv_index(cut.heads, spec.num_heads, spec.num_kv_heads),
        sinks=spec.attention_sinks,
        kv_shape=(size(cut.kv_heads), spec.head_dim),
        bidirectional=spec.bidirectional,
    )


def qkv_rows(spec: ModelSpec, layer: LayerSpec, cut: Cut, name: str) -> list[LinearRows]:
    """Rows of q, k and v; one tensor after another where the checkpoint has them fused. A head's gate follows its q."""
    H, of_query = spec.head_dim, (2 if spec.attention_gate else 1) * spec.head_dim
    names = [f"{name}.qkv_proj"] * 3 if spec.fused_qkv else [f"{name}.{p}_proj" for p in "qkv"]
    offsets = [0, spec.num_heads, spec.num_heads + spec.num_kv_heads] if spec.fused_qkv else [0, 0, 0]
    held = [cut.heads, cut.kv_heads, cut.kv_heads]
    rows = [
        LinearRows(part, (offset + first) * width, (offset + last) * width)
        for part, offset, (first, last), width in zip(names, offsets, held, (of_query, H, H), strict=True)
    ]
    return rows[:1] if layer.shares_keys else rows[:2] if layer.keys_are_values else rows


def qk_norms(spec: ModelSpec, layer: LayerSpec, cut: Cut, mesh: Mesh, name: str) -> tuple[nn.Module, nn.Module]:
    """The norms of queries and of keys, which do nothing where there are none."""
    H, eps = spec.head_dim, spec.norm_eps
    if spec.qk_norm == "none":
        return nn.Identity(), nn.Identity()
    if spec.qk_norm == "head":
        of_queries, of_keys = (RMSNorm(f"{name}.{x}_norm", H, eps, "partial", spec.norm_offset) for x in "qk")
        return of_queries, nn.Identity() if layer.shares_keys else of_keys
    heads, kv_heads = cut.heads, cut.kv_heads
    group = spec.num_heads // spec.num_kv_heads
    counted = (-(-heads[0] // group), kv_heads[1])  # a kv head counts where its first query head is
    return (
        CutRMSNorm(f"{name}.q_norm", heads, heads, spec.num_heads, H, eps, mesh.tp),
        CutRMSNorm(f"{name}.k_norm", kv_heads, counted, spec.num_kv_heads, H, eps, mesh.tp),
    )
