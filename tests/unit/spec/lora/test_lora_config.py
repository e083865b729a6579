"""`adapter_config.json`: rank and scale of each module, and what is refused by its name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig as PeftConfig
from peft.utils.other import get_pattern_key

from tllm.core.errors import WeightsError
from tllm.spec.lora.lora_config import MAX_PATTERNS, LoraConfig, read_lora_config


def read(**keys: Any) -> LoraConfig:
    return read_lora_config(json.dumps({"peft_type": "LORA", **keys}).encode())


def test_what_peft_writes_is_read() -> None:
    written = PeftConfig(r=6, lora_alpha=9, target_modules=["q_proj"], use_rslora=True, lora_dropout=0.1)
    keys = {key: sorted(value) if isinstance(value, set) else value for key, value in written.to_dict().items()}
    config = read(**keys)
    assert (config.rank("model.layers.0.self_attn.q_proj"), config.target_modules) == (6, ("q_proj",))
    assert config.scale("model.layers.0.self_attn.q_proj") == 9 / math.sqrt(6)
    assert config.names("model.layers.0.self_attn.q_proj") and not config.names("model.layers.0.self_attn.k_proj")
    assert not config.names("model.layers.0.self_attn.eq_proj")


def test_patterns_fit_as_in_peft() -> None:
    """The first that fits: the end of a name after a dot, or the whole name after ^."""
    ranks = {"layers.1.mlp.down_proj": 2, "^model.layers.0.mlp.up_proj": 3, "down_proj": 5, "^layers.2": 6}
    alphas = {"up_proj": 12.0}
    config = read(r=7, lora_alpha=14, rank_pattern=ranks, alpha_pattern=alphas)
    for module in (
        f"model.layers.{n}.mlp.{part}" for n in (0, 1, 11) for part in ("down_proj", "up_proj", "gate_proj")
    ):
        assert config.rank(module) == ranks.get(get_pattern_key(ranks, module), 7), module
        wanted = alphas.get(get_pattern_key(alphas, module), 14)
        assert config.scale(module) == wanted / config.rank(module)


def test_a_model_that_also_sees_names_its_modules_at_length() -> None:
    whole = "model.language_model.layers.1.self_attn.q_proj"
    plain = whole.replace("language_model.", "")
    config = read(r=2, lora_alpha=2, rank_pattern={f"^{whole}": 4}, alpha_pattern={whole: 16}, target_modules=[whole])
    assert (config.rank(plain), config.scale(plain), config.names(plain)) == (4, 4.0, True)
    assert not config.names(plain.replace("q_proj", "k_proj"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out"),
        (dict(bias="all"), "bias 'all'"),
        (dict(lora_bias=True), "lora_bias"),
        (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
        (dict(init_lora_weights="olora"), "init_lora_weights 'olora'"),
        (dict(trainable_token_indices=[1]), "trainable_token_indices"),
        (dict(target_parameters=["experts.down"]), "target_parameters"),
        (dict(layer_replication=[[0, 4]]), "layer_replication"),
        (dict(use_qalora=True), "use_qalora"),
        (dict(peft_type="IA3"), "peft_type 'IA3'"),
        (dict(what_is_new=1), "what_is_new"),
        (dict(r=0), "rank 0"),
        (dict(r=1 << 40), "rank 1099511627776"),
        (dict(r="8"), "cannot be read"),
        (dict(rank_pattern={"q_proj": -1}), "rank -1"),
        (dict(rank_pattern={"(a+)+b": 4}), "an expression"),
        (dict(alpha_pattern={"q_proj|k_proj": 4}), "an expression"),
        (dict(alpha_pattern={f"q{n}": 1 for n in range(MAX_PATTERNS + 1)}), "at most 4096"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read(**keys)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA", "lora_alpha": 1e999}']
)
def test_what_is_no_config_is_refused(content: bytes) -> None:
    with pytest.raises(WeightsError):
        read_lora_config(content)
