"""What GGUF files call a model's weights, and which of them they keep otherwise than `config.json`'s models do.

A name of a file is `blk.N.PART.weight` (or `.bias`) for a layer, else PART.weight. Source: gguf-py's tensor mapping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
NORMS_OF_HALVES = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = {**NORMS_AFTER, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
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

NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z][a-z0-9_]*)(?:\.(?P<expert>\d+))?(?:\.(?P<kind>weight|bias|scale))?"
)


@dataclass(frozen=True)
class Architecture:
    """How files of one `general.architecture` name weights, and what they change about them.

    - `parts`: of a layer; `experts`: its experts' weights, `{}` for the number.
    - `biases`: parts that may have biases.
    - `paired`: whether the rows of each head of q and k lie in pairs that turn together (2i and 2i + 1), as ggml's
      first kind of rope wants them; the model has them as halves (i and i + width / 2).
    - `norm_offset`: whether norms hold 1 + weight, but for `plain_norms`.
    - `ends`: what is of no layer.
    - `others`: of a layer, names with their ends that are no `.weight` or `.bias` of the model's.
    - `by_turns`: whether gates and ups of experts, apart in files, are rows by turns of one matrix in the model.
    """

    parts: Mapping[str, str]
    experts: Mapping[str, str] | None = None
    biases: frozenset[str] = frozenset()
    paired: bool = False
    norm_offset: bool = False
    plain_norms: frozenset[str] = frozenset()
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    others: Mapping[str, str] = field(default_factory=dict)
    by_turns: bool = False


LINEARS = frozenset({*ATTENTION, *MLP})
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
DENSE = {**ATTENTION, **MLP, **NORMS_BEFORE}
QWEN_MOE = {**ATTENTION, **NORMS_BEFORE, "ffn_gate_inp": "mlp.gate"}
DELTA_NETS = {
    **ATTENTION,
    **QK_NORMS,
    **NORMS_OF_HALVES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_OTHERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
APART = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
SPARSE = {**SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"}
GEMMA4 = {
    **ATTENTION,
    **MLP,
    **NORMS_AROUND,
    **QK_NORMS,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4_ENDS = {
    **ENDS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA4_OTHERS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GPT_OSS = {**ATTENTION, **NORMS_OF_HALVES, "ffn_gate_inp": "mlp.router"}
GPT_OSS_OTHERS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
CORRECTED = {**MLP, **SHARED_EXPERTS, "ffn_gate_inp": "mlp.gate"}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GLM4_MOE = {**ATTENTION, **QK_NORMS, **CORRECTED, **NORMS_OF_HALVES}
LATENTS = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
"""Old files have `attn_kv_b`, as the model has it; the others its rows for keys, turned, and those for values."""
OF_HEADS = frozenset({"attn_k_b", "attn_v_b"})
"""Parts with a matrix of each head."""
GLM4 = {
    **ATTENTION,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
MINIMAX = {**ATTENTION, **QK_NORMS, **NORMS_BEFORE, "ffn_gate_inp": "block_sparse_moe.gate"}
PLAIN_EXPERTS = {part: name.removeprefix("mlp.") for part, name in QWEN_EXPERTS.items()}

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
    "granite": Architecture(DENSE, biases=LINEARS, paired=True),
    "seed_oss": Architecture({**ATTENTION, **MLP, **NORMS_OF_HALVES}, biases=LINEARS),
    "mistral3": Architecture(DENSE, paired=True),
    "exaone4": Architecture({**ATTENTION, **MLP, **NORMS_AFTER, **QK_NORMS}),
    "arcee": Architecture(
        {part: name for part, name in DENSE.items() if part != "ffn_gate"}, biases=LINEARS, paired=True
    ),
    "ernie4_5": Architecture(DENSE, biases=LINEARS),
    "glm4": Architecture(GLM4, biases=QKV),
    "qwen3vl": Architecture({**DENSE, **QK_NORMS}, biases=frozenset(ATTENTION)),
    "minimax-m2": Architecture(
        MINIMAX, MIXTRAL_EXPERTS, others={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    ),
    "smollm3": Architecture(DENSE, biases=LINEARS, paired=True),
    "qwen3next": Architecture(
        {**DELTA_NETS, **SPARSE, "ssm_ba": "linear_attn.in_proj_ba"},
        QWEN_EXPERTS,
        biases=frozenset(ATTENTION),
        norm_offset=True,
        plain_norms=frozenset({"ssm_norm"}),
        others=DELTA_OTHERS,
    ),
    "qwen35": Architecture(
        {**DELTA_NETS, **APART, **MLP},
        biases=frozenset(ATTENTION),
        norm_offset=True,
        plain_norms=frozenset({"ssm_norm"}),
        others=DELTA_OTHERS,
    ),
    "qwen35moe": Architecture(
        {**DELTA_NETS, **APART, **SPARSE},
        QWEN_EXPERTS,
        biases=frozenset(ATTENTION),
        norm_offset=True,
        plain_norms=frozenset({"ssm_norm"}),
        others=DELTA_OTHERS,
    ),
    "gpt-oss": Architecture(
        GPT_OSS,
        QWEN_EXPERTS,
        biases=frozenset({*ATTENTION, "ffn_gate_inp"}),
        others=GPT_OSS_OTHERS,
        by_turns=True,
    ),
    "glm4moe": Architecture(GLM4_MOE, QWEN_EXPERTS, biases=frozenset(ATTENTION), others=CORRECTION),
    "deepseek2": Architecture({**LATENTS, **CORRECTED, **NORMS_BEFORE}, QWEN_EXPERTS, others=CORRECTION),
    "gemma4": Architecture(GEMMA4, PLAIN_EXPERTS, biases=frozenset(ATTENTION), ends=GEMMA4_ENDS, others=GEMMA4_OTHERS),
}


@dataclass(frozen=True)
class GgufName:
    """What a tensor of a file is: the model's name of it, with a `{}` where it is a stack of all experts' weights.

    `weights` are several where their rows lie one below the other. `is_other`: the architecture names it whole.
    """

    weights: tuple[str, ...]
    part: str
    is_stack: bool = False
    is_other: bool = False


def types_by_turns(types: Mapping[str, str]) -> dict[str, str]:
    """The types of modules, where a gate and its up are one matrix: in blocks if both are, and the expert's down too.

    An expert is used as a whole, in few bits or in plain numbers.
    """
    found = dict(types)
    for gate in [module for module in types if module.endswith(".experts.{}.gate_proj")]:
        expert = gate.removesuffix(".gate_proj")
        kinds = [found.pop(f"{expert}.{part}_proj", "") for part in ("gate", "up", "down")]
        if kinds[0] == kinds[1] and kinds[2]:
            found |= {f"{expert}.gate_up_proj": kinds[0], f"{expert}.down_proj": kinds[2]}
    return found


def parse_name(name: str, architecture: Architecture, layers: int) -> GgufName | None:
    """None for a tensor that such a model of so many layers does not have."""
    match = NAME.fullmatch(name)
    if match is None or (match["layer"] is not None and int(match["layer"]) >= layers):
        return None
    part, kind = match["part"], match["kind"]
    prefix, experts = f"model.layers.{match['layer']}", architecture.experts or {}
    other = architecture.others.get(part if kind is None else f"{part}.{kind}")
    if other is not None and match["layer"] is not None and match["expert"] is None:
        return GgufName((f"{prefix}.{other}",), part, is_other=True)
    if kind not in ("weight", "bias") or (kind == "bias" and part not in architecture.biases):
        return None
    if match["layer"] is None:
        known = part in architecture.ends and match["expert"] is None
        return GgufName((f"{architecture.ends[part]}.{kind}",), part) if known else None
    if match["expert"] is not None:
        weight = None if architecture.by_turns else experts.get(part)
        return GgufName((f"{prefix}.{weight.format(match['expert'])}.{kind}",), part) if weight else None
    if part.endswith("_exps"):
        joined = part == "ffn_gate_up_exps" and not architecture.by_turns
        parts = ("ffn_gate", "ffn_up") if joined else (part.removesuffix("_exps"),)
        weights = tuple(f"{prefix}.{experts[one]}.{kind}" for one in parts if one in experts)
        return GgufName(weights, part, is_stack=True) if weights else None
    return GgufName((f"{prefix}.{architecture.parts[part]}.{kind}",), part) if part in architecture.parts else None
