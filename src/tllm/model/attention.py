"""Self-attention of one layer."""

from __future__ import annotations

from torch import Tensor, nn

from tllm.model.attend import Attend, AttentionSpec
from tllm.model.norm import CutRMSNorm, RMSNorm
from tllm.model.rope import Rotation, rotate
from tllm.parallel.linear import ColumnLinear, RowLinear, Rows
from tllm.parallel.mesh import Mesh
from tllm.spec.cut import kv_index
from tllm.spec.model import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention: x_TD -> x_TD, over the heads held here."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int, name: str) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        (first, last), (kv_first, kv_last) = mesh.cut.heads, mesh.cut.kv_heads
        self.heads = [last - first, kv_last - kv_first, kv_last - kv_first]
        H = spec.head_dim
        self.qkv_proj = ColumnLinear(
            spec.hidden_size, _qkv_rows(spec, mesh, name), spec.attention_bias, replicated=mesh.tp.size > 1
        )
        columns = (first * H, last * H)
        self.o_proj = RowLinear(f"{name}.o_proj", columns, spec.hidden_size, mesh.seam, spec.output_bias)
        self.q_norm, self.k_norm = _qk_norms(spec, mesh, name)
        self.spec = AttentionSpec(
            scale=spec.attention_scale,
            window=spec.layers[layer].window,
            softcap=spec.attention_softcap,
            kv_index=kv_index(mesh.cut.heads, spec.num_heads, spec.num_kv_heads),
        )

    def forward(self, x_TD: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
        q_TNH, k_TKH, v_TKH = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        q_TNH = rotate(self.q_norm(q_TNH), turn)
        k_TKH = rotate(self.k_norm(k_TKH), turn)
        y_TD: Tensor = self.o_proj(attend(self.layer, q_TNH, k_TKH, v_TKH).flatten(1))
        return y_TD


def _qkv_rows(spec: ModelSpec, mesh: Mesh, name: str) -> list[Rows]:
    """Rows of q, k and v; one tensor after another where the checkpoint has them fused."""
    H = spec.head_dim
    names = [f"{name}.qkv_proj"] * 3 if spec.fused else [f"{name}.{p}_proj" for p in "qkv"]
    offsets = [0, spec.num_heads, spec.num_heads + spec.num_kv_heads] if spec.fused else [0, 0, 0]
    held = [mesh.cut.heads, mesh.cut.kv_heads, mesh.cut.kv_heads]
    return [
        Rows(part, (offset + first) * H, (offset + last) * H)
        for part, offset, (first, last) in zip(names, offsets, held, strict=True)
    ]


def _qk_norms(spec: ModelSpec, mesh: Mesh, name: str) -> tuple[nn.Module, nn.Module]:
    H, eps = spec.head_dim, spec.norm_eps
    if spec.qk_norm == "none":
        return nn.Identity(), nn.Identity()
    if spec.qk_norm == "head":
        offset = spec.norm_offset
        return RMSNorm(f"{name}.q_norm", H, eps, "partial", offset), RMSNorm(
            f"{name}.k_norm", H, eps, "partial", offset
        )
    heads, kv_heads = mesh.cut.heads, mesh.cut.kv_heads
    group = spec.num_heads // spec.num_kv_heads
    counted = (-(-heads[0] // group), kv_heads[1])  # a kv head counts where its first query head is
    return (
        CutRMSNorm(f"{name}.q_norm", heads, heads, spec.num_heads, H, eps, mesh.tp),
        CutRMSNorm(f"{name}.k_norm", kv_heads, counted, spec.num_kv_heads, H, eps, mesh.tp),
    )
