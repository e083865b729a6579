"""What a `quantization_config` says of each module, as published models write it, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tllm.core.errors import ConfigError, ModelError
from tllm.spec.hf_config import held_quantization
from tllm.spec.quantized.quantization_config import read_quantization
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.spec.quantized.weight_form import rounding_of

Q, DOWN, GATE = "model.layers.3.self_attn.q_proj", "model.layers.11.mlp.down_proj", "model.layers.0.mlp.gate"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.01}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
WISHES = ("int8", "int4")
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}


def compressed(*groups: dict[str, Any], stored_as: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": {"input_activations": None, **group} for number, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": named,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **more,
    }


def of(config: dict[str, Any], key: str = "quantization_config") -> Quantization:
    found = read_quantization({key: config})
    assert found is not None
    return found


def test_plain_models() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None, "quantization": {}}) is None


def test_awq() -> None:
    found = of({**AWQ, "modules_to_not_convert": ["mlp.gate", "model.layers.11"]})
    assert found.coding(Q) == Coding(4, 128, symmetric=False, beside=64)
    assert found.bits_of(Q, 4096) == 4 + 64 / 128
    assert [found.coding(module) for module in (GATE, DOWN, "lm_head", "model.embed_tokens")] == [None] * 4
    assert found.coding("model.layers.0.mlp.gate_proj") is not None
    saved_again = {"desc_act": False, "sym": True, "damp_percent": 0.1, "dataset": "c4", "act_group_aware": True}
    assert of({**AWQ, **saved_again}).coding(Q) == found.coding(Q)


def test_gptq() -> None:
    assert of(GPTQ).coding(Q) == Coding(4, 128, zero_offset=1)
    assert of({**GPTQ, "checkpoint_format": "gptq_v2"}).coding(Q) == Coding(4, 128)
    assert of({**GPTQ, "lm_head": True}).coding("lm_head") == of(GPTQ).coding(Q)
    assert of({**GPTQ, "group_size": -1, "bits": 8}).bits_of(Q, 4096) == 8 + 16 / 4096
    assert of({**GPTQ, "desc_act": True}).bits_of(Q, 4096) is None, "held as plain numbers"


def test_gptq_with_settings_for_single_modules() -> None:
    dynamic = {r"-:.*\.q_proj": {}, r"+:.*\.11\..*": {"bits": 8, "group_size": 32, "sym": False}}
    found = of({**GPTQ, "dynamic": dynamic})
    assert found.coding(Q) is None
    assert found.coding(DOWN) == Coding(8, 32, symmetric=False, beside=64, zero_offset=1)
    assert found.coding("model.layers.0.mlp.up_proj") == Coding(4, 128, zero_offset=1)


def test_compressed_tensors() -> None:
    found = of(compressed({"targets": ["Linear"], "weights": INT4}, ignore=["lm_head", r"re:.*mlp\.gate$"]))
    assert found.coding(Q) == Coding(4, 128)
    assert [found.coding(module) for module in ("lm_head", GATE)] == [None, None]
    assert of(compressed({"targets": ["Linear"], "weights": INT4})).coding("lm_head") == Coding(4, 128)
    assert of(compressed({"targets": ["Linear"], "weights": INT4})).coding("model.embed_tokens") is None
    mixed = compressed(
        {"targets": ["Linear"], "weights": INT4},
        {"targets": [r"re:.*self_attn\..*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        {"targets": [Q], "weights": {**INT4, "symmetric": False, "actorder": "group"}},
        stored_as="mixed-precision",
    )
    found = of(mixed)
    assert found.coding(Q) == Coding(4, 128, symmetric=False, beside=64, scattered=True)
    assert found.coding("model.layers.0.self_attn.o_proj") == Coding(8, number="float")
    assert found.coding("lm_head") == Coding(4, 128)


def test_fp8() -> None:
    found = of({**FP8, "modules_to_not_convert": ["lm_head"]})
    assert found.coding(Q) == Coding(8, 128, rows=128, number="float", beside=32)
    assert found.bits_of(Q, 4096) == 8.25
    assert of({**FP8, "weight_block_size": None}).coding(Q) == Coding(8, rows=0, number="float", beside=32)
    assert found.coding("lm_head") is None


def test_groups_that_no_product_reads_are_held_as_plain_numbers() -> None:
    bits = [of({**GPTQ, "group_size": group}).bits_of(Q, 4096) for group in (8, 16, 24, 32, 48, 64, 4096, -1)]
    assert bits == [None, 5, None, 4.5, None, 4.25, 4 + 16 / 4096, 4 + 16 / 4096]


def test_mxfp4() -> None:
    found = of({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    assert found.coding("model.layers.0.mlp.experts.3.down_proj") == Coding(4, 32, beside=8)
    assert found.bits_of("model.layers.0.mlp.experts.3.down_proj", 2880) == 4.25, "as in the files"
    assert found.coding(Q) is None


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mlx(key: str) -> None:
    found = of({**MLX, Q: {"group_size": 32, "bits": 8}, DOWN: False}, key)
    assert found.bits_of(Q, 4096) == 9
    assert found.coding(DOWN) is None
    assert found.bits_of("model.embed_tokens", 4096) == 4.5


def test_mlx_names_modules_as_a_model_that_also_sees_does() -> None:
    gate = {"group_size": 64, "bits": 8}
    found = of({**MLX, "language_model.model.layers.0.mlp.gate": gate, "language_model.lm_head": False}, "quantization")
    assert found.coding("model.layers.0.mlp.gate") == Coding(8, 64, symmetric=False, beside=32)
    assert found.coding("lm_head") is None


def test_what_is_asked_for_while_loading() -> None:
    int8, int4 = (held_quantization({"_quantize": kind, "tie_word_embeddings": kind == "int4"}) for kind in WISHES)
    assert int8 is not None and int4 is not None
    assert (int8.bits_of(Q, 4096), int4.bits_of(Q, 4096)) == (8.5, 4.5)
    assert int8.bits_of("lm_head", 4096) == 8.5
    assert int4.bits_of("model.embed_tokens", 4096) == 8.5, "the table of the logits has 8 bits"
    assert [int8.bits_of(name, 4096) for name in ("model.embed_tokens", GATE)] == [None, None]
    assert int4.bits_of("model.layers.0.block_sparse_moe.experts.7.w2", 4096) == 4.5
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert rounding_of(stack, {"_quantize": "int4"}, tied=False) == "int4" and int4.coding(stack)
    assert rounding_of(f"{stack}_bias", {"_quantize": "int4"}, tied=False) is None
    for name, wish in (("model.layers.0.mlp.experts.3.up_proj", "int4"), (GATE, None)):
        assert rounding_of(f"{name}.weight", {"_quantize": "int4"}, tied=False) == wish, "what the loader does"
        assert (int4.coding(name) is None) == (wish is None)


def test_how_weights_are_held() -> None:
    assert held_quantization({"quantization_config": AWQ}) == of(AWQ)
    assert held_quantization({"quantization_config": AWQ, "_dequantize": True}) is None
    with pytest.raises(ModelError, match="bits is 3"):
        held_quantization({"quantization_config": {**AWQ, "bits": 3}, "_dequantize": True})
    with pytest.raises(ConfigError, match=r"have few bits already \(awq\)"):
        held_quantization({"quantization_config": AWQ, "_quantize": "int8"})
    with pytest.raises(ConfigError, match="'int5' is not known"):
        held_quantization({"_quantize": "int5"})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]"),
        ([4], r"quantization_config is '\[4\]' and not a table"),
        ({**AWQ, "bits": 3}, "bits is 3, and one of 4 is read"),
        ({**AWQ, "bits": True}, "bits is True"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**AWQ, "zero_point": False}, "zero_point is False"),
        ({**AWQ, "group_size": 0}, "group_size is 0"),
        ({**AWQ, "group_size": 1 << 40}, "group_size is 1099511627776"),
        ({**AWQ, "rotation": "hadamard"}, "rotation is 'hadamard', and it is not known"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({**GPTQ, "bits": 3}, "bits is 3, and one of 4, 8 is read"),
        ({**GPTQ, "bits": None}, "bits is None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"+:(": {"bits": 8}}}, r"a pattern is '\(', and it is none"),
        ({**GPTQ, "dynamic": {"+:x": {"bits": 2}}}, "dynamic: '.:x': bits is 2"),
        ({**GPTQ, "dynamic": {"+:" + "x" * 2000: {}}}, "2000 letters of at most 1000"),
        (compressed({"targets": ["Linear"], "weights": INT4}, stored_as="marlin-24"), "format is 'marlin-24'"),
        (compressed({"targets": ["Linear"], "weights": {**INT4, "num_bits": 3}}), "group_0: weights: num_bits is 3"),
        (compressed({"targets": ["Linear"], "weights": {**INT4, "strategy": "token"}}), "strategy is 'token'"),
        (compressed({"targets": ["Linear"], "weights": None}), "group_0: weights is 'None'"),
        (compressed({"targets": ["Linear"], "weights": INT4}, transform_config={"R1": {}}), "transform_config is"),
        (
            compressed({"targets": ["Linear"], "weights": INT4}, sparsity_config="dense"),
            "sparsity_config is 'dense' and not a table",
        ),
        (
            compressed({"targets": ["Linear"], "weights": INT4}, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config: format is",
        ),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({**MLX, "mode": "nvfp4"}, "mode is 'nvfp4'"),
        ({**MLX, "bits": 6}, "bits is 6"),
        ({**MLX, Q: {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "q_proj: mode is 'mxfp4'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize("config", [AWQ, FP8], ids=lambda config: config["quant_method"])
def test_lists_in_the_names_of_a_model_that_also_sees(config: dict[str, Any]) -> None:
    listed = ["model.language_model.layers.0.linear_attn.in_proj_a", "model.visual.blocks.0.attn.qkv"]
    found = of({**config, "modules_to_not_convert": listed})
    assert found.coding("model.layers.0.linear_attn.in_proj_a") is None
    for other in ("0.linear_attn.in_proj_z", "10.linear_attn.in_proj_a"):
        assert found.coding(f"model.layers.{other}") is not None
