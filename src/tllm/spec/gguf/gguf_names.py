"""What GGUF files call a model's weights, and which of them they keep otherwise than `config.json`'s models do.

A name of a file is `blk.N.PART.weight` (or `.bias`) for a layer, else PART.weight. Source: gguf-py's tensor mapping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = {**NORMS_AFTER, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS = {
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
}
QWEN_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}

FREQUENCIES = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that say how rope turns, which the config has read; the last are old files' copies of the plain way."""

NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """How files of one `general.architecture` name weights, and what they change about them.

    - `parts`: of a layer; `experts`: its experts' weights, `{}` for the number.
    - `biases`: parts that may have biases.
    - `paired`: whether the rows of each head of q and k lie in pairs that turn together (2i and 2i + 1), as ggml's
      first kind of rope wants them; the model has them as halves (i and i + width / 2).
    - `norm_offset`: whether norms hold 1 + weight.
    """

    parts: Mapping[str, str]
    experts: Mapping[str, str] | None = None
    biases: frozenset[str] = frozenset()
    paired: bool = False
    norm_offset: bool = False


LINEARS = frozenset({*ATTENTION, *MLP})
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
DENSE = {**ATTENTION, **MLP, **NORMS_BEFORE}
QWEN_MOE = {**ATTENTION, **NORMS_BEFORE, "ffn_gate_inp": "mlp.gate"}

ARCHITECTURES = {
    "llama": Architecture(
        {**DENSE, "ffn_gate_inp": "block_sparse_moe.gate"}, MIXTRAL_EXPERTS, biases=LINEARS, paired=True
    ),
    "qwen2": Architecture(DENSE, biases=QKV),
    "qwen3": Architecture({**DENSE, **QK_NORMS}, biases=frozenset(ATTENTION)),
    "qwen2moe": Architecture({**QWEN_MOE, **SHARED_EXPERT}, QWEN_EXPERTS, biases=QKV),
    "qwen3moe": Architecture({**QWEN_MOE, **QK_NORMS}, QWEN_EXPERTS, biases=frozenset(ATTENTION)),
    "gemma2": Architecture({**ATTENTION, **MLP, **NORMS_AROUND}, norm_offset=True),
    "gemma3": Architecture({**ATTENTION, **MLP, **NORMS_AROUND, **QK_NORMS}, norm_offset=True),
    "phi3": Architecture(
        {
            **NORMS_BEFORE,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "olmo2": Architecture({**ATTENTION, **MLP, **NORMS_AFTER, **QK_NORMS}, biases=frozenset(ATTENTION)),
    "smollm3": Architecture(DENSE, biases=LINEARS, paired=True),
}


@dataclass(frozen=True)
class GgufName:
    """What a tensor of a file is: the model's name of it, with a `{}` where it is a stack of all experts' weights."""

    weight: str
    part: str
    is_stack: bool = False


def parse_name(name: str, architecture: Architecture, layers: int) -> GgufName | None:
    """None for a tensor that such a model of so many layers does not have."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    part, kind = match["part"], match["kind"]
    if kind == "bias" and part not in architecture.biases:
        return None
    if match["layer"] is None:
        return GgufName(f"{ENDS[part]}.{kind}", part) if part in ENDS and match["expert"] is None else None
    if int(match["layer"]) >= layers:
        return None
    prefix, experts = f"model.layers.{match['layer']}", architecture.experts or {}
    if match["expert"] is not None:
        weight = experts.get(part)
        return GgufName(f"{prefix}.{weight.format(match['expert'])}.{kind}", part) if weight else None
    if part.endswith("_exps"):
        weight = experts.get(part.removesuffix("_exps"))
        return GgufName(f"{prefix}.{weight}.{kind}", part, is_stack=True) if weight else None
    return GgufName(f"{prefix}.{architecture.parts[part]}.{kind}", part) if part in architecture.parts else None
