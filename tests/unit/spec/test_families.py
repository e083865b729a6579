"""Reading config.json: what is refused, and old and new spellings of the same model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tllm.core.errors import ModelError
from tllm.spec.families import FAMILIES, spec_from_config

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    rms_norm_eps=1e-6,
)
GLM: dict[str, Any] = dict(
    model_type="glm4_moe",
    num_key_value_heads=4,
    n_routed_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    n_shared_experts=2,
)
MLA: dict[str, Any] = dict(
    GLM,
    model_type="deepseek_v3",
    first_k_dense_replace=1,
    max_position_embeddings=256,
    kv_lora_rank=20,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=10,
)
HALF: dict[str, Any] = dict(rope_type="default", partial_rotary_factor=0.5)
YARN: dict[str, Any] = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=64)
LINEAR: dict[str, Any] = dict(rope_type="linear", factor=2.0)
LONG: dict[str, Any] = dict(rope_type="longrope", short_factor=[2.0] * 8, long_factor=[2.0] * 8)
GEMMA3: dict[str, Any] = dict(model_type="gemma3_text", head_dim=16, num_key_value_heads=2)
DELTA: dict[str, Any] = dict(model_type="qwen3_5_text", head_dim=16, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(model_type="mamba2"), "model_type 'mamba2'"),
        (dict(model_type="gpt_oss", head_dim=16), "no rope_scaling"),
        (dict(model_type=None), "model_type None"),
        (dict(attention_multiplier=0.5), "'attention_multiplier'"),
        (dict(rope_scaling=dict(rope_type="mystic", factor=2.0)), "'mystic'"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0, beta_fast=3)), "'beta_fast'"),
        (dict(rope_scaling=dict(rope_type="linear")), "'linear' has no factor"),
        (dict(rope_scaling=dict(rope_type="linear", factor=[2.0])), "factor=.2.0. is not a number"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0)), "no high_freq_factor"),
        (dict(rope_scaling=dict(rope_type="longrope", long_factor=[2.0] * 8)), "no short_factor"),
        (dict(rope_scaling=dict(rope_type="longrope", short_factor=[2.0])), "1 factors, and 16 widths"),
        (dict(rope_scaling=dict(rope_type="longrope", short_factor=2.0)), "0 factors, and 16 widths"),
        (dict(hidden_act="mish"), "'mish'"),
        (dict(GEMMA3, rope_parameters=dict(rope_type="linear", factor=2.0)), "has 'rope_type'"),
        (dict(GEMMA3, rope_parameters=dict(full_attention=2.0)), "has 'full_attention'"),
        (dict(GEMMA3, rope_parameters=dict(sliding_attention=HALF)), "partial_rotary_factor=0.5"),
        (dict(GEMMA3, rope_parameters=dict(full_attention=LINEAR), rope_scaling=LINEAR), "both rope_parameters and"),
        (dict(model_type="olmo3", rope_theta=1e4), "rope_theta=10000.0 of an olmo3"),
        (dict(model_type="phi3", rope_scaling=dict(LONG, original_max_position_embeddings=64)), "is 4096, and 64"),
        (dict(GEMMA3, attn_logit_softcapping=20.0), "attn_logit_softcapping"),
        (dict(GEMMA3, query_pre_attn_scalar=0), "query_pre_attn_scalar=0"),
        (dict(model_type="phi3", num_key_value_heads=2, full_attn_mod=2), "full_attn_mod=2"),
        (dict(model_type="smollm3", num_key_value_heads=2, no_rope_layers=[1]), "of 1 layer and the model has 2"),
        (dict(model_type="mixtral", num_key_value_heads=2, num_experts_per_tok=9), "9 experts of 8"),
        (dict(quantization_config=dict(bits=4)), "quant_method is None"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3"),
        (dict(hidden_size="wide"), "hidden_size='wide'"),
        (dict(model_type="mistral", num_key_value_heads=4, sliding_window=0), "sliding_window=0"),
        (dict(rms_norm_eps=-1), "rms_norm_eps=-1"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(model_type="seed_oss"), "no head_dim"),
        (dict(model_type="ministral3", head_dim=16, rope_parameters=dict(rope_type="yarn")), "llama_4_scaling_beta"),
        (
            dict(model_type="ministral3", head_dim=16, rope_parameters=dict(YARN, llama_4_scaling_beta=[0.1])),
            "lacks llama_4",
        ),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings='false' is not true or false"),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, llama_4_scaling_beta=0.1)), "llama_4_scaling_beta"),
        (dict(model_type="exaone4", num_key_value_heads=4, sliding_window_pattern="LLLG"), "layer_types"),
        (dict(MLA, scoring_func="softmax"), "scoring_func"),
        (dict(model_type="minimax_m2", head_dim=8, qk_norm_type="none"), "qk_norm_type='none'"),
        (dict(model_type="minimax_m2", head_dim=8, attn_type_list=[0, 1]), "attn_type_list"),
        (dict(MLA, moe_layer_freq=2), "moe_layer_freq=2"),
        (dict(MLA, head_dim=2), "qk_rope_head_dim=4 and head_dim=2 are to be the same"),
        (dict(hidden_size=3), "hidden_size=3 is too little for the 4"),
        (dict(MLA, num_key_value_heads=2), "num_key_value_heads"),
        (dict(MLA, rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(MLA, model_type="deepseek_v2", norm_topk_prob=True), "norm_topk_prob"),
        (dict(MLA, model_type="deepseek_v2", mlp_bias=True), "mlp_bias"),
        (dict(MLA, model_type="deepseek_v2", rope_interleave=False), "rope_interleave"),
        (dict(MLA, model_type="deepseek_v2", topk_method="noaux_tc"), "noaux_tc"),
        (dict(MLA, model_type="glm4_moe_lite", topk_method="greedy"), "is not that of DeepSeek-V3"),
        (dict(MLA, model_type="glm4_moe_lite", mlp_layer_types=["sparse"]), "for 1 of 2 layers"),
        (dict(GLM, n_group=4), "6 experts in n_group=4"),
        (dict(GLM, n_group=3, topk_group=4), "topk_group=4"),
        (dict(GLM, n_group=3, topk_group=1), "num_experts_per_tok=3 of 1 groups of 2 experts"),
        (dict(GLM, n_group=6, topk_group=6), "6 groups of 1 experts"),
        (dict(DELTA, linear_num_key_heads=5), "32 value heads cannot share 5 key heads"),
        (dict(DELTA, layer_types=["full_attention"]), "for 1 of 2 layers"),
        (dict(DELTA, layer_types=["mamba", "full_attention"]), "'mamba'"),
        (dict(DELTA, attn_output_gate=False), "attn_output_gate"),
        (dict(DELTA, linear_conv_kernel_dim=0), "linear_conv_kernel_dim='0'"),
        (dict(DELTA, linear_key_head_dim=-4), "linear_key_head_dim='-4'"),
        (dict(model_type="granite", residual_multiplier=0.0), "residual_multiplier=0.0"),
    ],
)
def test_what_may_change_the_maths_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        spec_from_config({**LLAMA, **change})


def test_a_deepseek_model_has_one_latent_for_all_heads() -> None:
    spec = spec_from_config({**LLAMA, **MLA, "n_group": None, "auto_map": {"AutoModel": "modeling.Model"}})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.cached_width) == (4, 1, 24, 24)
    yarn = dict(type="yarn", factor=40, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707)
    sharper = spec_from_config({**LLAMA, **MLA, "rope_scaling": yarn})
    assert sharper.attention_scale == pytest.approx(10**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert sharper.layers[0].rope is not None and sharper.layers[0].rope.attention_factor == 1.0


def test_a_missing_key_is_named() -> None:
    raw = dict(LLAMA)
    del raw["hidden_size"]
    with pytest.raises(ModelError, match="hidden_size"):
        spec_from_config(raw)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = spec_from_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = spec_from_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old == new


def test_what_the_file_does_not_say_is_as_transformers_has_it() -> None:
    widths = {"llama": 16, "qwen2": 16, "qwen3": 128, "qwen3_vl_text": 128, "gemma2": 256}
    for family, width in widths.items():
        assert spec_from_config({**LLAMA, "model_type": family, "num_key_value_heads": 4}).head_dim == width
    moe = dict(LLAMA, model_type="qwen2_moe", num_key_value_heads=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert {layer.moe and layer.moe.num_experts for layer in spec_from_config(moe).layers} == {60}
    for family, scale, shared in (("deepseek_v2", 1.0, 2), ("deepseek_v3", 2.5, 1), ("glm4_moe_lite", 1.8, 1)):
        config = {**LLAMA, **MLA, "model_type": family, "norm_topk_prob": None}
        config |= {} if family == "deepseek_v2" else {"rope_interleave": None}
        del config["n_shared_experts"]
        last = spec_from_config(config).layers[-1]
        assert last.rope is not None and last.moe is not None
        assert (last.moe.weight_scale, last.moe.shared_width, last.moe.renormalise) == (scale, 20 * shared, False)
        assert last.rope.interleaved is (family == "deepseek_v2")


def test_harmless_and_empty_keys_pass() -> None:
    spec = spec_from_config({**LLAMA, "use_cache": True, "something_new": None, "other_thing": False, "_private": 3})
    assert spec.num_kv_heads == 4 and spec.head_dim == 16


def test_every_family_of_the_readme_is_there() -> None:
    assert len(FAMILIES) == 33
