"""Layers that use the keys and values of an earlier layer (gemma4 of E2B and E4B), and what a pipeline carries.

A stage that has such a layer and not its source is given what came into the source, and makes the same keys of it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tllm.model.attention import Attend, Attention, attention_spec, qk_norms, qkv_rows
from tllm.model.norm import RMSNorm, RootMeanSquare
from tllm.model.recurrence import Advance
from tllm.model.rope import Rotation, rotate, rotate_queries
from tllm.parallel.linear import Adapt, ColumnLinear, unadapted
from tllm.parallel.mesh import Mesh
from tllm.spec.cut import as_layer, size
from tllm.spec.model_spec import ModelSpec

EMBEDDING = -1
"""Stands among the numbers of layers for the tokens' embeddings."""


class KeptKeys:
    """An `Attend` that keeps the keys and values of `sources` for the layers after them.

    To whoever attends a later layer is its source once more, with other queries: nothing is cached a second time.
    """

    def __init__(self, attend: Attend, sources: frozenset[int]) -> None:
        self.attend, self.sources = attend, sources
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        if layer in self.sources:
            self.kept[layer] = (k_TKH, v_TKH)
        return self.attend(layer, q_TNH, k_TKH, v_TKH, sinks_N)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        return self.attend.recur(layer, advance, *rows)

    def again(self, source: int, q_TNH: Tensor) -> Tensor:
        """Attention of a later layer's queries over what `source` has."""
        return self.attend(source, q_TNH, *self.kept[source])


class SharedKeyAttention(Attention):
    """Attention of a layer that has queries alone. It is called with `KeptKeys`."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int, name: str) -> None:
        super().__init__(spec, mesh, layer, name)
        self.source = spec.key_source(layer)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapt: Adapt = unadapted) -> Tensor:
        assert isinstance(attend, KeptKeys), "the keys of the source are at hand"
        q_TNH = self.qkv_proj(x_TD, adapt).unflatten(-1, (-1, self.head_dim))
        o_TNH = attend.again(self.source, rotate_queries(self.q_norm(q_TNH), rotation))
        y_TD: Tensor = self.o_proj(o_TNH.flatten(1), adapt)
        return y_TD


class BorrowedKeys(nn.Module):
    """The keys and values of a layer that an earlier stage has, made once more of what came into it: x_TD -> k, v.

    So a pipeline may be cut between a layer and those that use its keys. Both stages hold what makes them, and cache
    them.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int) -> None:
        super().__init__()
        name, of_layer = f"model.layers.{layer}", spec.layers[layer]
        self.rope = of_layer.rope
        self.before_attention = RMSNorm(
            f"{name}.input_layernorm", spec.hidden_size, spec.norm_eps, mesh.seam.gradient, spec.norm_offset
        )
        spec, cut = as_layer(spec, of_layer, mesh.cut)
        rows = qkv_rows(spec, of_layer, cut, f"{name}.self_attn")[1:]
        self.kv_proj = ColumnLinear(spec.hidden_size, rows, spec.attention_bias, replicated=True)
        self.kv_heads, self.head_dim = size(cut.kv_heads), spec.head_dim
        self.k_norm = qk_norms(spec, of_layer, cut, mesh, f"{name}.self_attn")[1]
        self.v_norm = RootMeanSquare(spec.norm_eps) if spec.value_norm else nn.Identity()
        self.spec = attention_spec(spec, of_layer, cut)
        self.seam = mesh.seam

    def forward(self, x_TD: Tensor, rotation: Rotation | None, tokens: int, adapt: Adapt) -> tuple[Tensor, Tensor]:
        h_TD = self.seam.enter(self.before_attention(x_TD), tokens)
        heads_TMH = self.kv_proj(h_TD, adapt).unflatten(-1, (-1, self.head_dim))
        k_TKH, v_TKH = heads_TMH[:, : self.kv_heads], heads_TMH[:, -self.kv_heads :]
        return rotate(self.k_norm(k_TKH), rotation), self.v_norm(v_TKH)


class CarriedRows(nn.Module):
    """What goes from stage to stage beside the hidden state, each [T, D]: the embeddings, where layers have inputs of
    their own, and what came into layers whose keys later ones share. In most models there is nothing.

    `width`: numbers of a token that come to this stage. `sources`: layers whose keys those held here share. `keys`:
    what makes those of earlier stages.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh) -> None:
        super().__init__()
        layers = mesh.layers
        embedded = (EMBEDDING,) * (spec.per_layer_width > 0)
        self.comes = (*embedded, *spec.carried_sources(layers.start))
        is_last = layers.stop == spec.num_layers
        self.goes = () if is_last else (*embedded, *spec.carried_sources(layers.stop))
        self.sources = frozenset(spec.key_sources(layers, layers.stop))
        self.width = spec.carried_width(layers.start)
        borrowed = spec.key_sources(layers, layers.start)
        self.keys = nn.ModuleDict({str(i): BorrowedKeys(spec, mesh, i) for i in borrowed})

    @property
    def borrowed(self) -> dict[int, BorrowedKeys]:
        """`keys` by the layers' numbers."""
        return {int(number): cast(BorrowedKeys, keys) for number, keys in self.keys.items()}

    def received(self, x: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The hidden state, and what came beside it."""
        if not self.comes:
            return x, {}
        x_TD, *beside = x.chunk(1 + len(self.comes), dim=-1)
        return x_TD, dict(zip(self.comes, beside, strict=True))

    def given(self, x_TD: Tensor, beside: dict[int, Tensor]) -> Tensor:
        """What goes to the next stage; of the last stage the hidden state alone."""
        return torch.cat([x_TD, *(beside[number] for number in self.goes)], dim=-1) if self.goes else x_TD
