"""Multi-head latent attention of one layer (DeepSeek-V2, 2405.04434), over the latents themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.model.attention import Attend, AttentionSpec
from tllm.model.norm import RMSNorm
from tllm.model.rope import Rotation, rotate
from tllm.parallel.linear import Adapt, ColumnLinear, HeadInputs, HeadLinear, LinearRows, RowLinear, unadapted
from tllm.parallel.mesh import Mesh
from tllm.spec.model_spec import ModelSpec


class LatentAttention(nn.Module):
    """x_TD -> x_TD, over the heads held here, all of which attend to the same latents.

    With the latent c of a token, its rotated key r, and `keys` U and `values` V of a head, rows of `kv_b_proj`:

        score = q·(U c) + q'·r = (U^T q)·c + q'·r        sum of weight (V c) = V (sum of weight c)

    So queries are taken to the latents' space, attention has one key-value head [c, r] that is its value too, and of
    its result the part over c is taken to the values' space. All latents are computed and cached, whatever heads are
    held here.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int, name: str) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.layer, self.latent = layer, latent
        first, last = mesh.cut.heads
        rows = [LinearRows(f"{name}.kv_a_proj_with_mqa", 0, latent.width + latent.rope_dim)]
        if latent.q_width:
            rows.insert(0, LinearRows(f"{name}.q_a_proj", 0, latent.q_width))
        self.latent_proj = ColumnLinear(spec.hidden_size, rows, spec.attention_bias, replicated=True)
        self.q_norm: nn.Module = nn.Identity()
        if latent.q_width:
            self.q_norm = RMSNorm(f"{name}.q_a_layernorm", latent.q_width, latent.norm_eps, "partial")
        of_heads = f"{name}.q_b_proj" if latent.q_width else f"{name}.q_proj"
        q_rows = LinearRows(of_heads, first * latent.query_dim, last * latent.query_dim)
        self.q_proj = ColumnLinear(latent.q_width or spec.hidden_size, [q_rows])
        self.kv_norm = RMSNorm(f"{name}.kv_a_layernorm", latent.width, latent.norm_eps, "partial")
        each, heads = latent.plain_dim + latent.value_dim, mesh.cut.heads
        # Two parameters, since a pass whose backward is in two halves must not use one twice in a row.
        self.keys = HeadLinear(f"{name}.kv_b_proj", heads, each, (0, latent.plain_dim), latent.width, True)
        self.values = HeadLinear(f"{name}.kv_b_proj", heads, each, (latent.plain_dim, each), latent.width, False)
        self.latents = HeadInputs(f"{name}.kv_b_proj")
        columns = (first * latent.value_dim, last * latent.value_dim)
        self.o_proj = RowLinear(f"{name}.o_proj", columns, spec.hidden_size, mesh.seam, spec.output_bias)
        self.spec = AttentionSpec(
            scale=spec.attention_scale,
            window=spec.layers[layer].window,
            values_are_keys=True,
            kv_shape=(1, spec.head_dim),
            bidirectional=spec.bidirectional,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapt: Adapt = unadapted) -> Tensor:
        of = self.latent
        a_TR, c_TR, r_TH = self.latent_proj(x_TD, adapt).split([of.q_width, of.width, of.rope_dim], dim=-1)
        q_TNH = self.q_proj(self.q_norm(a_TR) if of.q_width else x_TD, adapt).unflatten(-1, (-1, of.query_dim))
        plain_TNH, turned_TNH = q_TNH.split([of.plain_dim, of.rope_dim], dim=-1)
        q_TNR = torch.cat((self.keys(plain_TNH, adapt), rotate(turned_TNH, rotation)), dim=-1)
        c_TR = self.latents(self.kv_norm(c_TR), adapt)
        k_T1R = torch.cat((c_TR.unsqueeze(1), rotate(r_TH.unsqueeze(1), rotation)), dim=-1)
        o_TNR = attend(self.layer, q_TNR, k_T1R, k_T1R)[..., : c_TR.shape[1]]
        y_TD: Tensor = self.o_proj(self.values(o_TNR, adapt).flatten(1), adapt)
        return y_TD
