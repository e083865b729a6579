"""Reading config.json: what is refused, and old and new spellings of the same model."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(model_type="gpt_oss"), "model_type 'gpt_oss'"),
        (dict(model_type=None), "model_type None"),
        (dict(attention_multiplier=0.5), "'attention_multiplier'"),
        (dict(rope_scaling=dict(rope_type="mystic", factor=2.0)), "'mystic'"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0, beta_fast=3)), "'beta_fast'"),
        (dict(hidden_act="mish"), "'mish'"),
        (dict(quantization_config=dict(bits=4)), "quant_method is None"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3"),
        (dict(hidden_size="wide"), "hidden_size='wide'"),
        (dict(rms_norm_eps=-1), "rms_norm_eps=-1"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
)
def test_what_may_change_the_maths_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        spec_from_config({**LLAMA, **change})


def test_a_missing_key_is_named() -> None:
    raw = dict(LLAMA)
    del raw["hidden_size"]
    with pytest.raises(ModelError, match="hidden_size"):
        spec_from_config(raw)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = spec_from_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = spec_from_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old == new


def test_harmless_and_empty_keys_pass() -> None:
    spec = spec_from_config({**LLAMA, "use_cache": True, "something_new": None, "other_thing": False, "_private": 3})
    assert spec.num_kv_heads == 4 and spec.head_dim == 16


def test_every_family_of_the_readme_is_there() -> None:
    assert len(FAMILIES) == 12
