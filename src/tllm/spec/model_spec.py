"""What a model is, in plain numbers: `ModelSpec`, made from a Hugging Face `config.json` by `spec.families`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "full"]
NormOrder = Literal["pre", "post", "both"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "factors"]


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding: base `theta` over the first `dim` of a head's widths, and how long contexts are scaled.

    `original` is the context the model was first trained for. `factors` are what each pair's frequency is divided by,
    where a file says only that. Sources: RoFormer (2104.09864), YaRN (2309.00071),
    LongRoPE (2402.13753), the Llama 3.1 model card.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeSpec:
    """A mixture-of-experts MLP: each token goes to `top_k` of `num_experts`, and to a shared expert if there is one.

    `renormalise` makes the chosen weights add up to 1. `style` names the checkpoint's tensors.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int = 0
    renormalise: bool = True
    style: Literal["mixtral", "qwen"] = "qwen"


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer: how far it sees (`window` keys, None: all), its rope (None: it has none), its MLP."""

    rope: RopeSpec | None
    window: int | None = None
    moe: MoeSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, every choice that changes its maths spelled out.

    `norm_order`: RMSNorm before each half layer, after it (olmo2), or both (gemma). `norm_offset`: the norm multiplies
    by 1 + weight (gemma). `qk_norm`: none, over each head (qwen3), or over all heads together (olmo2).
    `fused`: the checkpoint holds qkv and gate-up as one tensor each (phi3).
    `max_model_len`: the longest sequence this version computes exactly as the model defines it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: str
    max_model_len: int
    attention_scale: float
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norm_order: NormOrder = "pre"
    norm_offset: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    fused: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scales_by_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence (dynamic rope)."""
        return any(layer.rope is not None and layer.rope.kind == "dynamic" for layer in self.layers)
