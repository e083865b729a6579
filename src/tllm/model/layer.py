"""`Layer`: attention (or a gated delta net) and MLP of one transformer layer, with the norms around them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tllm.model.attention import Attend, Attention, SharedProjectionAttention
from tllm.model.experts_beside_mlp import ExpertsBesideMlp
from tllm.model.gated_attention import GatedAttention
from tllm.model.gated_delta_net import GatedDeltaNet
from tllm.model.latent_attention import LatentAttention
from tllm.model.layer_scale import LayerScale
from tllm.model.mlp import Mlp
from tllm.model.moe import Moe
from tllm.model.norm import HiddenRMSNorm, RMSNorm, add_and_norm
from tllm.model.per_layer_input import PerLayerInput
from tllm.model.rope import Rotation
from tllm.model.shared_keys import SharedKeyAttention
from tllm.parallel.linear import Adapt, unadapted
from tllm.parallel.mesh import Mesh
from tllm.spec.cut import as_layer
from tllm.spec.model_spec import LayerSpec, ModelSpec

NORMS = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""The checkpoint's names of the norms before and after attention, before and after the MLP, by their order."""


Observe = Callable[[int, Tensor], Tensor]
"""observe(number of a layer, the hidden states that come to it, x_TD) -> what the layer is given in their place."""


def unobserved(number: int, x_TD: Tensor) -> Tensor:
    """The hidden states as they are."""
    return x_TD


class Layer(nn.Module):
    """x + after(attention(before(x))), then the same with the MLP, where before and after are norms (or nothing).

    What is added is multiplied by `residual_scale` first. A layer's own input p_TP comes in after the MLP, and what
    comes out is multiplied by the layer's own scale, where it has those.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        of_layer = spec.layers[layer]
        self.rope = of_layer.rope
        names = spec.norm_names or NORMS[spec.norm_order]
        norms = [norm_of(spec, mesh, f"{name}.{part}") if part else nn.Identity() for part in names]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention: Attention | LatentAttention | GatedDeltaNet
        if of_layer.delta:
            self.attention = GatedDeltaNet(spec, mesh, layer, f"{name}.linear_attn")
        else:
            self.attention = _attention_class(spec, of_layer)(spec, mesh, layer, f"{name}.self_attn")
        if of_layer.moe is None:
            own, cut = as_layer(spec, of_layer, mesh.cut)
            self.mlp: nn.Module = Mlp(own, f"{name}.mlp", own.intermediate_size, cut.width, mesh.cut_layers)
        elif of_layer.moe.beside_mlp:
            self.mlp, self.before_mlp = ExpertsBesideMlp(spec, mesh, name, of_layer.moe), nn.Identity()
        else:
            self.mlp = Moe(spec, mesh, name, of_layer.moe)
        self.own_input = PerLayerInput(spec, mesh, name) if spec.per_layer_width else None
        self.scale = LayerScale(f"{name}.layer_scalar") if spec.layer_scale else nn.Identity()
        self.seam, self.residual_scale = mesh.seam, spec.residual_scale

    def forward(
        self,
        x_TD: Tensor,
        rope_rotation: Rotation | None,
        attend: Attend,
        tokens: int,
        adapt: Adapt = unadapted,
        p_TP: Tensor | None = None,
    ) -> Tensor:
        h_TD = self.seam.enter(self.before_attention(x_TD), tokens)
        y_TD = self._scaled(self.after_attention(self.attention(h_TD, rope_rotation, attend, adapt)))
        x_TD, h_TD = add_and_norm(self.before_mlp, x_TD, y_TD)
        x_TD = x_TD + self._scaled(self.after_mlp(self.mlp(self.seam.enter(h_TD, tokens), adapt)))
        if self.own_input is not None:
            assert p_TP is not None, "such a layer is given its input"
            x_TD = self.own_input(x_TD, p_TP)
        scaled_TD: Tensor = self.scale(x_TD)
        return scaled_TD

    def _scaled(self, y_TD: Tensor) -> Tensor:
        return y_TD if self.residual_scale == 1.0 else y_TD * self.residual_scale


def _attention_class(spec: ModelSpec, layer: LayerSpec) -> type[Attention | LatentAttention]:
    if spec.latent:
        return LatentAttention
    if layer.shares_keys:
        return SharedKeyAttention
    if layer.keys_are_values:
        return SharedProjectionAttention
    return GatedAttention if spec.attention_gate else Attention


def norm_of(spec: ModelSpec, mesh: Mesh, name: str) -> RMSNorm | HiddenRMSNorm:
    """A norm of hidden states, of which each rank may have a slice of the tokens, or some of the columns."""
    columns = mesh.hidden(spec.hidden_size)
    if columns.group.size > 1:
        return HiddenRMSNorm(name, spec.hidden_size, columns, spec.norm_eps, spec.norm_offset)
    return RMSNorm(name, spec.hidden_size, spec.norm_eps, mesh.seam.gradient, spec.norm_offset)
