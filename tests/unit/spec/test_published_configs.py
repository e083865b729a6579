"""Configs as they are published, with the keys that real files have and those that they leave out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.spec.test_families import HALF, LLAMA, MLA
from tllm.core.errors import ModelError, PlanError
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec, RopeSpec
from tllm.spec.plan import Plan
from tllm.spec.trainable import check_trainable

GEMMA3_12B: dict[str, Any] = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    boi_token_index=255999,
    eoi_token_index=256000,
    eos_token_id=[1, 106],
    image_token_index=262144,
    initializer_range=0.02,
    mm_tokens_per_image=256,
    model_type="gemma3",
    text_config=dict(
        hidden_size=3840,
        intermediate_size=15360,
        model_type="gemma3_text",
        num_attention_heads=16,
        num_hidden_layers=48,
        num_key_value_heads=8,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    ),
    torch_dtype="bfloat16",
    vision_config=dict(hidden_size=1152),
)
GLM45_AIR: dict[str, Any] = dict(
    architectures=["Glm4MoeForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=[151329, 151336, 151338],
    first_k_dense_replace=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=10944,
    max_position_embeddings=131072,
    model_type="glm4_moe",
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=96,
    num_experts_per_tok=8,
    num_hidden_layers=46,
    num_key_value_heads=8,
    num_nextn_predict_layers=1,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=1000000,
    routed_scaling_factor=1.0,
    tie_word_embeddings=False,
    topk_group=1,
    torch_dtype="bfloat16",
    use_qk_norm=False,
    vocab_size=151552,
)
OLMO3: dict[str, Any] = dict(
    architectures=["Olmo3ForCausalLM"],
    model_type="olmo3",
    hidden_size=4096,
    intermediate_size=11008,
    max_position_embeddings=65536,
    num_attention_heads=32,
    num_key_value_heads=32,
    num_hidden_layers=8,
    rms_norm_eps=1e-6,
    rope_theta=500000,
    rope_scaling=dict(
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        rope_type="yarn",
    ),
    sliding_window=4096,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    vocab_size=100278,
)
DEVSTRAL2: dict[str, Any] = dict(
    architectures=["Ministral3ForCausalLM"],
    model_type="ministral3",
    head_dim=128,
    hidden_size=12288,
    intermediate_size=28672,
    max_position_embeddings=262144,
    num_attention_heads=96,
    num_hidden_layers=88,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
        beta_fast=4.0,
        beta_slow=1.0,
        factor=64.0,
        mscale=1.0,
        mscale_all_dim=0.0,
        original_max_position_embeddings=4096,
        llama_4_scaling_beta=0.0,
        rope_theta=1000000.0,
        rope_type="yarn",
        type="yarn",
    ),
    sliding_window=None,
    tie_word_embeddings=False,
    vocab_size=131072,
)
MINIMAX_M2: dict[str, Any] = dict(
    architectures=["MiniMaxM2ForCausalLM"],
    model_type="minimax_m2",
    attn_type_list=[1] * 62,
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    num_local_experts=256,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    use_routing_bias=True,
    use_mtp=True,
    num_mtp_modules=3,
    mtp_transformer_layers=1,
    use_qk_norm=True,
    qk_norm_type="per_layer",
    rotary_dim=64,
    rope_theta=5000000,
)
QWEN3_NEXT: dict[str, Any] = dict(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    attention_bias=False,
    decoder_sparse_step=1,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-6,
    rope_theta=10000000,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    vocab_size=151936,
)
QWEN3_5: dict[str, Any] = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    image_token_id=248056,
    video_token_id=248057,
    vision_start_token_id=248053,
    vision_end_token_id=248054,
    vision_config=dict(depth=27),
    text_config=dict(
        model_type="qwen3_5_text",
        attn_output_gate=True,
        full_attention_interval=4,
        head_dim=256,
        hidden_size=4096,
        intermediate_size=12288,
        mamba_ssm_dtype="float32",
        mlp_only_layers=[],
        mtp_num_hidden_layers=1,
        num_attention_heads=16,
        num_hidden_layers=32,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
            partial_rotary_factor=0.25,
            rope_theta=10000000,
            rope_type="default",
        ),
        vocab_size=248320,
    ),
)
GEMMA4_12B: dict[str, Any] = dict(
    architectures=["Gemma4UnifiedForConditionalGeneration"],
    model_type="gemma4_unified",
    audio_config=dict(model_type="gemma4_unified_audio"),
    vision_config=dict(model_type="gemma4_unified_vision"),
    audio_token_id=258881,
    boa_token_id=256000,
    boi_token_id=255999,
    eoa_token_index=258883,
    eoi_token_id=258882,
    image_token_id=258880,
    video_token_id=258884,
    tie_word_embeddings=True,
    text_config=dict(
        model_type="gemma4_unified_text",
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        global_head_dim=512,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=3840,
        intermediate_size=15360,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 8,
        max_position_embeddings=262144,
        num_attention_heads=16,
        num_global_key_value_heads=1,
        num_hidden_layers=48,
        num_key_value_heads=8,
        num_kv_shared_layers=0,
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
            sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
        ),
        sliding_window=1024,
        use_bidirectional_attention="vision",
        use_double_wide_mlp=False,
        vocab_size=262144,
    ),
)
GEMMA4_TEXT: dict[str, Any] = dict(
    GEMMA4_12B["text_config"],
    model_type="gemma4_text",
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=262144,
)

MOE4 = dict(num_experts=128, top_k_experts=8, moe_intermediate_size=704)


def rope(spec: ModelSpec, layer: int) -> RopeSpec:
    found = spec.layers[layer].rope
    assert found is not None
    return found


@pytest.mark.parametrize(
    "config",
    [GEMMA3_12B, GLM45_AIR, OLMO3, DEVSTRAL2, MINIMAX_M2, QWEN3_NEXT, QWEN3_5, GEMMA4_12B],
    ids=lambda c: c["model_type"],
)
def test_it_is_read(config: dict[str, Any]) -> None:
    spec = spec_from_config(config)
    assert spec.num_layers == (config.get("text_config") or config)["num_hidden_layers"]


def test_what_a_file_leaves_out_or_gives_elsewhere() -> None:
    gemma = spec_from_config(GEMMA3_12B)
    assert (gemma.vocab_size, gemma.head_dim, gemma.tied, gemma.eos_token_ids) == (262208, 256, True, (1, 106))
    assert (rope(gemma, 5).kind, rope(gemma, 5).theta, rope(gemma, 0).theta) == ("linear", 1e6, 1e4)
    assert (gemma.layers[0].window, gemma.layers[5].window, gemma.dtype) == (1024, None, "bfloat16")
    air = spec_from_config(GLM45_AIR)
    assert (rope(air, 1).dim, air.layers[0].moe, air.attention_bias, air.output_bias) == (64, None, True, False)
    olmo = spec_from_config(OLMO3)
    assert (rope(olmo, 0).kind, rope(olmo, 3).kind, rope(olmo, 3).attention_factor) == (
        "default",
        "yarn",
        1.2079441541679836,
    )
    assert rope(spec_from_config(MINIMAX_M2), 0).dim == 64
    for config in (QWEN3_NEXT, QWEN3_5):
        spec = spec_from_config(config)
        assert [bool(layer.delta) for layer in spec.layers[:4]] == [True, True, True, False]
        assert (rope(spec, 3).dim, rope(spec, 3).theta, spec.delta and spec.delta.group) == (64, 1e7, 2)


def test_layers_of_gemma4_have_heads_of_their_own() -> None:
    for config in (GEMMA4_12B, GEMMA4_TEXT):
        spec = spec_from_config(config)
        near, far = spec.layers[0], spec.layers[5]
        assert (near.window, near.head_dim, near.num_kv_heads, near.keys_are_values) == (1024, 0, 0, False)
        assert (far.window, far.head_dim, far.num_kv_heads, far.keys_are_values) == (None, 512, 1, True)
        assert (rope(spec, 5).kind, rope(spec, 5).dim, rope(spec, 5).turned, rope(spec, 5).theta) == (
            "proportional", 512, 128, 1e6,
        )  # fmt: skip
        assert (rope(spec, 0).kind, rope(spec, 0).dim, rope(spec, 0).theta) == ("default", 256, 1e4)
        assert (spec.final_softcap, spec.attention_scale, spec.tied) == (30.0, 1.0, True)


def test_gemma4_has_experts_beside_its_mlp() -> None:
    spec = spec_from_config({**GEMMA4_TEXT, "enable_moe_block": True, **MOE4})
    for layer in spec.layers:
        assert layer.moe is not None and layer.moe.beside_mlp and layer.hidden_sums == 3
        assert (layer.moe.num_experts, layer.moe.top_k, layer.moe.width) == (128, 8, 704)
        assert layer.moe.shared_width == spec.intermediate_size and not layer.moe.shared_gate


def test_layers_of_e2b_share_keys_and_have_inputs_of_their_own() -> None:
    """35 layers, of which the last 20 use the keys of layers 13 and 14, with MLPs twice as wide."""
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 7
    own = dict(num_hidden_layers=35, layer_types=kinds, num_kv_shared_layers=20, hidden_size_per_layer_input=None)
    spec = spec_from_config({**GEMMA4_TEXT, **own, "attention_k_eq_v": False, "use_double_wide_mlp": True})
    assert spec.per_layer_width == 256
    assert [spec.key_source(number) for number in (0, 13, 14, 15, 19, 33, 34)] == [0, 13, 14, 13, 14, 13, 14]
    assert [number for number in range(35) if spec.is_key_source(number)] == [13, 14]
    assert (spec.layers[14].mlp_width, spec.layers[15].mlp_width) == (0, 2 * spec.intermediate_size)
    assert [spec.carried_width(at) // spec.hidden_size for at in (1, 13, 14, 15, 34, 35)] == [2, 2, 3, 4, 3, 2]
    assert spec.widest_hop == 4 * spec.hidden_size
    with pytest.raises(PlanError, match="keys of earlier layers, is not trained"):
        check_trainable(Plan.parse("pp=1", 35), spec, [1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=9), "vocab_size_per_layer_input=9"),
        (dict(num_kv_shared_layers=43), "num_kv_shared_layers=43 of 48 layers"),
        (dict(num_kv_shared_layers=20, enable_moe_block=True, use_double_wide_mlp=True, **MOE4), "use_double_wide_mlp"),
        (dict(enable_moe_block=True, num_experts=128), "top_k_experts"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (dict(rope_parameters=dict(full_attention=HALF)), "partial_rotary_factor=0.5"),
        (dict(num_global_key_value_heads=3), "16 query heads cannot share the 3 kv heads of a layer"),
        (dict(layer_types=["full_attention"] * 47 + ["sliding_attention"]), "the last layer"),
        (dict(per_layer_config={"5": dict(head_dim=512)}), "per_layer_config is not of the layers"),
        (dict(per_layer_config={str(i): dict(window=3) for i in range(5, 48, 6)}), "per_layer_config"),
    ],
)
def test_what_gemma4_has_and_is_not_computed_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec_from_config({**GEMMA4_TEXT, **change})


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (LLAMA, {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}),  # SmolLM2
        (LLAMA, dict(max_sequence_length=2048)),  # LLaMA
        (dict(LLAMA, model_type="smollm3", num_key_value_heads=2), dict(pretraining_tp=2)),
        (dict(LLAMA, model_type="phi3"), dict(full_attn_mod=1, interpolate_factor=1)),  # Phi-4-mini
        (dict(LLAMA, **{**MLA, "model_type": "glm4_moe_lite"}), dict(topk_method="noaux_tc")),  # GLM-4.7-Flash
        (MINIMAX_M2, dict(layernorm_mlp_beta=1.0, mlp_intermediate_size=8192, shared_moe_mode="sigmoid")),
    ],
)
def test_what_published_files_have_and_nothing_reads(family: dict[str, Any], keys: dict[str, Any]) -> None:
    assert spec_from_config({**family, **keys}) == spec_from_config(family)


DAMAGED: tuple[Any, ...] = ("x", [], {}, -1, 0, 1.5, True, [1], {"a": 1}, "9" * 20, float("nan"), None)
GPT_OSS = dict(LLAMA, model_type="gpt_oss", head_dim=16, num_key_value_heads=2, num_local_experts=4)
GPT_OSS |= dict(num_experts_per_tok=2, rope_scaling=OLMO3["rope_scaling"])
V2 = dict(LLAMA, **{**MLA, "model_type": "deepseek_v2"})
LITE = dict(LLAMA, **{**MLA, "model_type": "glm4_moe_lite"})
OTHER_KEYS = frozenset({
    "layer_types", "mlp_layer_types", "rope_scaling", "rope_parameters", "sliding_window", "sliding_window_pattern",
    "n_group", "topk_group", "q_lora_rank", "rotary_dim", "attn_type_list", "partial_rotary_factor", "model_type",
})  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [GEMMA3_12B, GLM45_AIR, OLMO3, DEVSTRAL2, MINIMAX_M2, GPT_OSS, V2, LITE, QWEN3_NEXT, GEMMA4_TEXT],
    ids=lambda c: c["model_type"],
)
def test_damage_is_one_clear_error_or_none(config: dict[str, Any]) -> None:
    """Any value in the place of any other: the file is read, or a ModelError says what is wrong with it."""
    refused = 0
    for key in OTHER_KEYS | config.keys():
        for value in DAMAGED:
            try:
                spec_from_config({**config, key: value})
            except ModelError:
                refused += 1
    assert refused > 100
