"""What a GGUF file's metadata says of a model, and what it may not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tllm.core.errors import ModelError, TllmError
from tllm.spec.families import spec_from_config
from tllm.spec.gguf.gguf_keys import decimal
from tllm.spec.hf_config import read_config

Change = Callable[[gguf.GGUFWriter], None]
F16 = gguf.GGMLQuantizationType.F16


def write(path: Path, *changes: Change, architecture: str = "llama", rows: int = 37, **without: bool) -> Path:
    """A file of two layers with what every model has, but for what is left out, and what a test adds."""
    writer = gguf.GGUFWriter(path, architecture)
    base: dict[str, Any] = dict(
        block_count=2, context_length=512, embedding_length=64, feed_forward_length=96, head_count=4, head_count_kv=2,
        layer_norm_rms_eps=1e-5,
    )  # fmt: skip
    for name, value in base.items():
        if not without.get(name):
            getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 64), dtype=np.float32))
    for layer in range(64):  # no file has fewer tensors than layers
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(2, dtype=np.float32))
    for change in changes:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config(tmp_path: Path, *changes: Change, **more: Any) -> dict[str, Any]:
    return read_config(write(tmp_path / "m.gguf", *changes, **more))


def vector(name: str, *values: float) -> Change:
    return lambda writer: writer.add_tensor(name, np.array(values, dtype=np.float32))


def matrix(name: str, dtype: Any = np.float32) -> Change:
    return lambda writer: writer.add_tensor(name, np.zeros((4, 64), dtype=dtype))


def test_what_every_model_says(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found["model_type"] == "llama"
    assert (found["vocab_size"], found["hidden_size"], found["intermediate_size"]) == (37, 64, 96)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (4, 2, 16)
    assert found["rms_norm_eps"] == 1e-5, "not 9.99999974737875e-06, which is what float32 makes of it"
    assert found["tie_word_embeddings"] is True
    assert spec_from_config(found).max_model_len == 512
    assert found == read_config(tmp_path), "the folder of one file stands for it"


@pytest.mark.parametrize(
    ("value", "want"), [(9.999999747378752e-06, 1e-5), (0.10000000149011612, 0.1), (0.3, 0.3), (1e300, 1e300)]
)
def test_numbers_are_the_decimals_that_float32_stands_for(value: float, want: float) -> None:
    assert decimal(value) == want


def test_dtype_is_bfloat16_unless_all_matrices_are_float32(tmp_path: Path) -> None:
    assert config(tmp_path, vector("output_norm.weight", 1.0))["dtype"] == "float32"
    assert config(tmp_path, matrix("output.weight", np.float16))["dtype"] == "bfloat16"
    assert config(tmp_path, matrix("output.weight"))["tie_word_embeddings"] is False


def test_biases_are_told_by_tensors(tmp_path: Path) -> None:
    assert config(tmp_path, vector("blk.0.attn_k.bias", 1.0))["attention_bias"] is True
    assert config(tmp_path, vector("blk.0.ffn_down.bias", 1.0))["mlp_bias"] is True
    assert config(tmp_path)["attention_bias"] is False


def test_factors_of_rope(tmp_path: Path) -> None:
    factors = [1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0, 8.0]
    spec = spec_from_config(config(tmp_path, vector("rope_freqs.weight", *factors)))
    rope = spec.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factors) == ("factors", tuple(factors))
    for bad, says in (
        ([1.0] * 7, "16 widths that are turned need 8 above 0"),
        ([1.0] * 7 + [0.0], "not a number above 0"),
    ):
        with pytest.raises(ModelError, match=says):
            spec_from_config(config(tmp_path, vector("rope_freqs.weight", *bad)))


def test_lists_for_each_layer_must_agree(tmp_path: Path) -> None:
    same = config(tmp_path, lambda w: w.add_head_count_kv([2, 2]), head_count_kv=True)
    assert same["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match=r"attention\.head_count_kv differs among layers"):
        config(tmp_path, lambda w: w.add_head_count_kv([2, 4]), head_count_kv=True)


def test_windows_of_gemma3(tmp_path: Path) -> None:
    def layers(*changes: Change) -> list[int | None]:
        return [layer.window for layer in spec_from_config(config(tmp_path, *changes, architecture="gemma3")).layers]

    assert layers() == [None, None]
    assert layers(lambda w: w.add_sliding_window(7)) == [7, 7]
    assert layers(lambda w: w.add_sliding_window(7), lambda w: w.add_sliding_window_pattern(2)) == [7, None]
    truths: Change = lambda w: w.add_sliding_window_pattern([False, True])  # noqa: E731
    assert layers(lambda w: w.add_sliding_window(7), truths) == [None, 7]


def test_the_largest_gemmas_scale_scores_by_their_width(tmp_path: Path) -> None:
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        wide: Change = lambda w: w.add_key_length(32) or w.add_value_length(32)  # noqa: E731
        small = config(tmp_path, wide, architecture=architecture)
        assert small["query_pre_attn_scalar"] == 32
        large = config(
            tmp_path, wide, lambda w, n=layers: w.add_block_count(n), architecture=architecture, block_count=True
        )
        assert large["query_pre_attn_scalar"] == 16


def test_mixtral_is_a_llama_with_experts(tmp_path: Path) -> None:
    experts: Change = lambda w: w.add_expert_count(8) or w.add_expert_used_count(2)  # noqa: E731
    found = config(tmp_path, experts)
    assert (found["model_type"], found["num_local_experts"], found["num_experts_per_tok"]) == ("mixtral", 8, 2)


GEMMA4: tuple[Change, ...] = (
    lambda w: (
        w.add_key_length(16)
        or w.add_key_length_swa(8)
        or w.add_sliding_window(4)
        or w.add_sliding_window_pattern([True, False])
    ),
    vector("rope_freqs.weight", *[1.0] * 2, *[1e30] * 6),
)
NETS: tuple[Change, ...] = (
    lambda w: w.add_ssm_time_step_rank(4) or w.add_ssm_group_count(2) or w.add_ssm_state_size(8),
    lambda w: w.add_ssm_conv_kernel(4) or w.add_ssm_inner_size(32) or w.add_key_length(16),
)


GPT_OSS: tuple[Change, ...] = (
    lambda w: w.add_expert_count(4) or w.add_expert_used_count(2) or w.add_expert_feed_forward_length(32),
    lambda w: w.add_sliding_window(7),
)
YARN: Change = lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN) or w.add_rope_scaling_factor(4.0)  # noqa: E731


def test_windows_of_gpt_oss(tmp_path: Path) -> None:
    found = config(tmp_path, *GPT_OSS, YARN, architecture="gpt-oss")
    assert found["layer_types"] == ["sliding_attention", "full_attention"]
    assert found["rope_scaling"]["truncate"] is False


GROUPED: tuple[Change, ...] = (
    lambda w: w.add_expert_count(4) or w.add_expert_used_count(2) or w.add_expert_feed_forward_length(32),
    lambda w: w.add_expert_weights_scale(2.5) or w.add_expert_weights_norm(True) or w.add_leading_dense_block_count(1),
)
LATENT: tuple[Change, ...] = (
    lambda w: w.add_key_length(40) or w.add_value_length(32) or w.add_key_length_mla(24) or w.add_value_length_mla(12),
    lambda w: w.add_kv_lora_rank(32) or w.add_rope_dimension_count(8),
)


def test_experts_of_glm4moe(tmp_path: Path) -> None:
    more: Change = lambda w: w.add_expert_shared_count(1) or w.add_rope_dimension_count(8)  # noqa: E731
    found = config(tmp_path, *GROUPED, more, lambda w: w.add_nextn_predict_layers(1), architecture="glm4moe")
    assert (found["num_hidden_layers"], found["first_k_dense_replace"], found["n_shared_experts"]) == (1, 1, 1)
    assert (found["routed_scaling_factor"], found["norm_topk_prob"], found["n_group"]) == (2.5, True, 1)
    assert found["partial_rotary_factor"] == 0.5 and found["use_qk_norm"] is False
    known = config(tmp_path, *GROUPED, vector("blk.0.attn_q_norm.weight", 1.0), architecture="glm4moe")
    assert known["use_qk_norm"] is True


def test_latents_of_deepseek2(tmp_path: Path) -> None:
    sigmoid: Change = lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)  # noqa: E731
    found = config(tmp_path, *GROUPED, *LATENT, sigmoid, architecture="deepseek2")
    assert (found["model_type"], found["q_lora_rank"], found["kv_lora_rank"]) == ("deepseek_v3", None, 32)
    assert (found["qk_rope_head_dim"], found["qk_nope_head_dim"], found["v_head_dim"]) == (8, 16, 12)
    old: Change = lambda w: w.add_key_length(24) or w.add_value_length(12)  # noqa: E731
    assert config(tmp_path, *GROUPED, old, LATENT[1], sigmoid, architecture="deepseek2") == found


def test_groups_of_deepseek2_by_softmax(tmp_path: Path) -> None:
    plain: Change = lambda w: w.add_expert_weights_norm(False)  # noqa: E731
    groups: Change = lambda w: w.add_expert_group_count(2) or w.add_expert_group_used_count(1)  # noqa: E731
    found = config(tmp_path, *GROUPED, *LATENT, plain, architecture="deepseek2")
    assert (found["model_type"], found["topk_method"]) == ("deepseek_v2", "greedy")
    found = config(tmp_path, *GROUPED, *LATENT, plain, groups, architecture="deepseek2")
    assert (found["topk_method"], found["n_group"], found["topk_group"]) == ("group_limited_greedy", 2, 1)


def test_olmo_3_is_an_olmo2_with_windows(tmp_path: Path) -> None:
    assert config(tmp_path, YARN, architecture="olmo2")["model_type"] == "olmo2"
    found = config(tmp_path, YARN, lambda w: w.add_sliding_window(7), architecture="olmo2")
    near, far = (found["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
    assert (found["model_type"], near["rope_type"], far["rope_type"]) == ("olmo3", "default", "yarn")
    assert found["layer_types"] == ["sliding_attention"] * 2, "every fourth layer sees all"


def test_multipliers_of_granite(tmp_path: Path) -> None:
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    plain = config(tmp_path, lambda w: w.add_logit_scale(8.0), architecture="granite")
    assert [plain[name] for name in names] == [0.25, 1.0, 1.0, 8.0]
    more: Change = lambda w: w.add_attention_scale(0.1) or w.add_embedding_scale(12.0) or w.add_residual_scale(0.2)  # noqa: E731
    found = config(tmp_path, more, lambda w: w.add_logit_scale(8.0), architecture="granite")
    assert [found[name] for name in names] == [0.1, 12.0, 0.2, 8.0]


def test_biases_of_seed_oss(tmp_path: Path) -> None:
    found = config(tmp_path, vector("blk.0.attn_q.bias", 1.0), architecture="seed_oss")
    assert (found["attention_bias"], found["attention_out_bias"], found["mlp_bias"]) == (True, False, False)


def test_a_mistral3_is_a_ministral3_where_its_queries_grow(tmp_path: Path) -> None:
    small = config(tmp_path, architecture="mistral3")
    assert (small["model_type"], spec_from_config(small).layers[0].window) == ("mistral", None)
    beta: Change = lambda w: w.add_attn_temperature_scale(0.1) or w.add_rope_scaling_yarn_log_mul(1.0)  # noqa: E731
    found = config(tmp_path, YARN, beta, architecture="mistral3")
    rope = spec_from_config(found).layers[0].rope
    assert found["model_type"] == "ministral3" and rope is not None
    assert (rope.query_scale_beta, rope.original, rope.attention_factor) == (0.1, 512, 1.0)


def test_windows_of_exaone4(tmp_path: Path) -> None:
    small = spec_from_config(config(tmp_path, architecture="exaone4"))
    assert [layer.window for layer in small.layers] == [None, None] and small.layers[1].rope is not None
    large = config(tmp_path, lambda w: w.add_block_count(64), architecture="exaone4", block_count=True)
    assert [layer.window for layer in spec_from_config(large).layers[:4]] == [4096, 4096, 4096, None]
    assert spec_from_config(large).layers[3].rope is None


def test_parts_of_a_head_that_turn(tmp_path: Path) -> None:
    half: Change = lambda w: w.add_rope_dimension_count(8)  # noqa: E731
    assert config(tmp_path, half, architecture="glm4")["partial_rotary_factor"] == 0.5
    assert config(tmp_path, *GPT_OSS[:1], half, architecture="minimax-m2")["rotary_dim"] == 8


def test_layers_of_gemma4(tmp_path: Path) -> None:
    kv: Change = lambda w: w.add_head_count_kv([2, 1])  # noqa: E731
    found = config(tmp_path, *GEMMA4, kv, architecture="gemma4")
    assert (found["head_dim"], found["global_head_dim"]) == (8, 16)
    assert (found["num_key_value_heads"], found["num_global_key_value_heads"]) == (2, 1)
    assert found["layer_types"] == ["sliding_attention", "full_attention"]
    assert found["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    assert found["attention_k_eq_v"] and found["model_type"] == "gemma4_text"
    value = config(tmp_path, *GEMMA4, kv, matrix("blk.1.attn_v.weight"), architecture="gemma4")
    assert not value["attention_k_eq_v"] and value["model_type"] == "gemma4_unified_text"
    wide = config(tmp_path, *GEMMA4, lambda w: w.add_feed_forward_length([96, 192]) or w.add_shared_kv_layers(1),
                  architecture="gemma4")  # fmt: skip
    assert wide["use_double_wide_mlp"] and wide["num_kv_shared_layers"] == 1


def test_layers_that_predict_further_tokens_are_no_layers(tmp_path: Path) -> None:
    found = config(tmp_path, *NETS, lambda w: w.add_nextn_predict_layers(1), architecture="qwen35")
    assert (found["num_hidden_layers"], found["linear_value_head_dim"]) == (1, 8)


REFUSED: dict[str, tuple[dict[str, Any], list[Change], str]] = {
    "architecture": ({"architecture": "mamba"}, [], "architecture 'mamba' is not known"),
    "adapter": ({}, [lambda w: w.add_type("adapter")], "holds a adapter and not a model"),
    "unknown key": ({}, [lambda w: w.add_logit_scale(0.5)], r"key 'llama\.logit_scale' \(0\.5\) that is not handled"),
    "extra layers": ({}, [lambda w: w.add_nextn_predict_layers(1)], "nextn_predict_layers"),
    "no width": ({"embedding_length": True}, [], r"has no llama\.embedding_length"),
    "no embedding": ({"architecture": "llama", "rows": 0}, [], "token_embd"),
    "values": ({}, [lambda w: w.add_value_length(8)], "values are as wide as keys"),
    "not causal": ({}, [lambda w: w.add_causal_attention(False)], "attention is not causal"),
    "half of a head turns": ({}, [lambda w: w.add_rope_dimension_count(8)], "rope turns 8 of a head's 16"),
    "rope": ({}, [lambda w: w.add_string("llama.rope.scaling.type", "odd")], "'odd' is not known"),
    "both ropes": (
        {},
        [vector("rope_freqs.weight", *[1.0] * 8), lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)],
        "rope_freqs and rope.scaling.type 'yarn' at once",
    ),
    "gating": (
        {"architecture": "qwen3moe"},
        [
            lambda w: w.add_expert_count(4) or w.add_expert_used_count(2) or w.add_expert_feed_forward_length(32),
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
        ],
        "experts weighted by function 2",
    ),
    "word for a number": (
        {"block_count": True},
        [lambda w: w.add_string("llama.block_count", "two")],
        "'two' is not a whole number",
    ),
    "no heads": ({"head_count": True}, [lambda w: w.add_head_count(0)], "head_count=0, and 1 to 65536 are possible"),
    "more layers than tensors": (
        {"block_count": True},
        [lambda w: w.add_block_count(2**31 - 1)],
        "block_count=2147483647, and 1 to 65 are possible",
    ),
    "no kv heads": ({"head_count_kv": True}, [lambda w: w.add_head_count_kv(0)], "head_count_kv=0"),
    "more kv heads": ({"head_count_kv": True}, [lambda w: w.add_head_count_kv(5)], "head_count_kv=5, and 1 to 4"),
    "no context": ({"context_length": True}, [lambda w: w.add_context_length(0)], "context_length=0"),
    "half a layer": (
        {"block_count": True},
        [lambda w: w.add_float32("llama.block_count", 0.5)],
        "0.5 is not a whole number",
    ),
    "no number": (
        {"block_count": True},
        [lambda w: w.add_float32("llama.block_count", float("nan"))],
        "nan is not a whole number",
    ),
    "endless": ({}, [lambda w: w.add_rope_freq_base(float("inf"))], "inf is not a number above 0"),
    "as many experts as no memory has": (
        {},
        [lambda w: w.add_expert_count(2**30) or w.add_expert_used_count(2)],
        "expert_count=1073741824, and 1 to 65536",
    ),
    "no pattern": (
        {"architecture": "gemma4"},
        [lambda w: w.add_key_length_swa(8)],
        "sliding_window_pattern is of 0 layers, not 2",
    ),
    "odd factors": (
        {"architecture": "gemma4"},
        [GEMMA4[0], vector("rope_freqs.weight", *[1.0, 2.0] * 4)],
        "which pairs turn",
    ),
    "kv heads of one kind": (
        {"architecture": "gemma4", "block_count": True},
        [
            lambda w: (
                w.add_block_count(3)
                or w.add_key_length(16)
                or w.add_key_length_swa(8)
                or w.add_head_count_kv([2, 1, 1])
            ),
            lambda w: w.add_sliding_window_pattern([True, True, False]),
        ],
        "differs among layers of one kind",
    ),
    "some wide layers": (
        {"architecture": "gemma4"},
        [*GEMMA4, lambda w: w.add_feed_forward_length([192, 96])],
        "feed_forward_length .* differs otherwise",
    ),
    "heads of a delta net": (
        {"architecture": "qwen35"},
        [*NETS, lambda w: w.add_ssm_inner_size(33)],
        "inner_size=33 is not made of 4 heads",
    ),
    "nothing but predictions": (
        {"architecture": "qwen35"},
        [*NETS, lambda w: w.add_nextn_predict_layers(2)],
        r"all of its layers \(2\) predict",
    ),
    "no latents": ({"architecture": "deepseek2"}, [*GROUPED, LATENT[0]], r"has no deepseek2\.rope\.dimension_count"),
    "all of a head turns": (
        {"architecture": "deepseek2"},
        [*GROUPED, *LATENT, lambda w: w.add_rope_dimension_count(24)],
        "dimension_count=24, and 1 to 23 are possible",
    ),
    "YaRN of another kind": (
        {"architecture": "deepseek2"},
        [*GROUPED, *LATENT, YARN],
        "of type 'yarn' and yarn_log_multiplier None are not handled",
    ),
    "queries that grow": (
        {"architecture": "deepseek2"},
        [*GROUPED, *LATENT, lambda w: w.add_attn_temperature_scale(0.1)],
        r"key 'deepseek2\.attention\.temperature_scale' \(0\.1",
    ),
    "no experts": ({"architecture": "glm4moe"}, [], r"has no glm4moe\.expert_count"),
    "granite without rope": (
        {"architecture": "granite"},
        [lambda w: w.add_logit_scale(8.0) or w.add_rope_scaling_finetuned(False)],
        "a granite model without rope is not handled",
    ),
    "granite without a scale": ({"architecture": "granite"}, [], r"granite\.logit_scale=None is not a number above 0"),
    "queries that grow without YaRN": (
        {"architecture": "mistral3"},
        [lambda w: w.add_attn_temperature_scale(0.1)],
        "queries grow with their position, and there is no YaRN",
    ),
    "scaled experts": (
        {"architecture": "minimax-m2"},
        [*GPT_OSS[:1], lambda w: w.add_expert_weights_scale(2.0)],
        "weighted by function 2 and scale 2.0 are not handled for minimax-m2",
    ),
    "no YaRN": ({"architecture": "gpt-oss"}, [*GPT_OSS], "a gpt-oss model has YaRN and one rope.freq_base"),
    "another base": (
        {"architecture": "gpt-oss"},
        [*GPT_OSS, YARN, lambda w: w.add_rope_freq_base_swa(5e4)],
        "a gpt-oss model has YaRN and one rope.freq_base",
    ),
    "another gating": (
        {"architecture": "gpt-oss"},
        [*GPT_OSS, YARN, lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)],
        "experts weighted by function 2",
    ),
    "eps": ({"layer_norm_rms_eps": True}, [lambda w: w.add_layer_norm_rms_eps(-1.0)], "not a number above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_handled_is_refused(case: str, tmp_path: Path) -> None:
    more, changes, why = REFUSED[case]
    with pytest.raises(TllmError, match=why):
        config(tmp_path, *changes, **more)


def test_keys_that_ask_for_nothing_pass(tmp_path: Path) -> None:
    config(
        tmp_path,
        lambda w: w.add_expert_count(0),
        lambda w: w.add_nextn_predict_layers(0),
        lambda w: w.add_parallel_residual(False),
        lambda w: w.add_rope_scaling_attn_factors(1.0),
        lambda w: w.add_tensor_data_layout("Meta AI original pth"),
        lambda w: w.add_vocab_size(99),
        lambda w: w.add_file_type(2),
    )


def test_ends_of_replies(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "<eos>", "<|im_end|>", "<|end|>", "<end_of_turn>"])
        writer.add_token_types([1, 3, 3, 1, 4])
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(99)  # which is past the vocabulary: none

    found = config(tmp_path, vocabulary)
    assert found["eos_token_id"] == [1, 2, 4], "the plain token that only looks like an end is none"
    assert found["bos_token_id"] is None


def test_types_of_weights_in_blocks_are_told(tmp_path: Path) -> None:
    def blocks(writer: gguf.GGUFWriter) -> None:
        for name, *dims in (("blk.0.attn_q.weight",), ("blk.1.ffn_down_exps.weight", 3), ("output.weight",)):
            raw = np.zeros((*dims, 2, 34), dtype=np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    assert config(tmp_path, blocks)["_gguf_types"] == {
        "model.layers.0.self_attn.q_proj": "Q8_0",
        "model.layers.1.block_sparse_moe.experts.{}.w2": "Q8_0",
        "lm_head": "Q8_0",
    }


def test_a_projector_beside_the_model_is_not_it(tmp_path: Path) -> None:
    write(tmp_path / "mmproj-m.gguf")
    assert config(tmp_path)["vocab_size"] == 37
    assert read_config(tmp_path)["vocab_size"] == 37
