"""The table [lora] of a job: what it may say, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.unit.training.job.test_combinations import DELTA, LLAMA, MIXTRAL
from tllm.core.errors import ConfigError, TllmError
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.job import Job, decode_job, encode_job
from tllm.training.job.job_file import read_job, write_job
from tllm.training.job.job_parts import states_of
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules, target_names

KEYS: dict[str, Any] = dict(output_dir="run", train_files=["a.jsonl"], max_steps=1, model_name_or_path="m")


def test_a_table_is_read_changed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    table = '[lora]\nr = 4\ntarget_modules = "q_proj"\ninit_lora_weights = true\n'
    file.write_text('output_dir = "run"\ntrain_files = ["a"]\nmax_steps = 1\nmodel_name_or_path = "m"\n' + table)
    read = read_job(file, ["lora.target_modules=q_proj,v_proj", "lora.lora_dropout=0.1"])
    assert read.job.lora == LoraJob(r=4, target_modules=("q_proj", "v_proj"), lora_dropout=0.1)
    assert read.origins["lora.r"] == "job.toml" and read.origins["lora.lora_dropout"] == "--set"
    file.write_text(write_job(read))
    assert read_job(file).job == read.job == decode_job(encode_job(read.job))
    assert read_job(KEYS, ["lora.init_lora_weights=true"]).job.lora == LoraJob()
    assert read_job(KEYS, ["lora.init_lora_weights=gaussian"]).job.lora == LoraJob(init_lora_weights="gaussian")
    assert read_job(KEYS).job.lora is None


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("r", 0, "lora.r is 0 and must be 1 or more"),
        ("r", 5000, "lora.r is 5000 and must be less than 4097"),
        ("lora_alpha", 0.0, "lora_alpha is 0"),
        ("lora_alpha", -1.0, "lora.lora_alpha is -1.0"),
        ("lora_alpha", float("nan"), "lora.lora_alpha is nan"),
        ("lora_dropout", 1.0, "lora.lora_dropout is 1.0 and must be less than 1"),
        ("target_modules", [], "names nothing"),
        ("target_modules", ["all-linear", "q_proj"], "beside other names"),
        ("init_lora_weights", "pissa", "'pissa'"),
        ("init_lora_weights", False, "init_lora_weights is False"),
        ("quantize", "nf4", "'nf4'"),
        ("rank", 4, "lora.rank"),
        ("r", "many", "lora.r = 'many'"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_job({**KEYS, "lora": {key: value}})


@pytest.mark.parametrize(
    ("plan", "config", "lora", "more", "says"),
    [
        ("pp=1", LLAMA, dict(target_modules=("q_prj",)), {}, "'q_prj', and no linear"),
        ("pp=1", LLAMA, dict(target_modules=("q_proj", "lm_head")), {}, "'lm_head', and no linear"),
        ("pp=1", MIXTRAL, dict(target_modules=("gate",)), {}, "'gate', and no linear"),
        ("pp=1", LLAMA, dict(exclude_modules=("q_prj",)), {}, "exclude_modules has 'q_prj', and no linear"),
        ("pp=1", LLAMA, dict(layers_to_transform=(1, 99)), {}, "layers_to_transform has 99 and the model has"),
        ("pp=1", LLAMA, dict(target_modules=("q_proj",), exclude_modules=("self_attn.q_proj",)), {}, "leave nothing"),
        ("dp=2,zero=3", LLAMA, {}, {}, "zero=3"),
        ("dp=2,servers=1", LLAMA, {}, {}, "servers=1"),
        ("pp=1", LLAMA, {}, dict(model_name_or_path=None, config_name="c"), "config_name begins with random weights"),
        ("pp=1", dict(LLAMA, quantization_config=dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)),
         dict(quantize="int4"), {}, "have few bits already \\(gptq\\)"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(
    plan: str, config: dict[str, Any], lora: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    spec = spec_from_config(config)
    job = Job(**{**KEYS, "train_files": ("a",), "global_batch_size": 8, "lora": LoraJob(**lora), **more})
    with pytest.raises(TllmError, match=says):
        check_combination(job, Plan.parse(plan, spec.num_layers), spec)


def test_a_snapshot_of_another_adapter_is_of_no_use() -> None:
    first, second = (Job(**{**KEYS, "train_files": ("a",), "lora": lora}) for lora in (None, LoraJob()))
    assert states_of(first) != states_of(second)


def test_all_linears_but_experts_routers_and_logits_are_adapted(tmp_path: Path) -> None:
    save_model("qwen2_moe", tmp_path)
    spec = spec_of(tmp_path)
    names = adapted_modules(LoraJob(r=4, lora_alpha=16, use_rslora=True), spec)
    assert {module.scale for module in names.values()} == {8.0}
    assert not any("experts." in name or name.endswith((".gate", "lm_head", "embed_tokens")) for name in names)
    assert sum("shared_expert." in name for name in names) == 3 * spec.num_layers
    told = target_names(names, spec)
    assert "q_proj" in told and "shared_expert.gate_proj" in told and "gate_proj" not in told
    assert set(adapted_modules(LoraJob(target_modules=tuple(told)), spec)) == set(names)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("rank_pattern", "one rank"),
        ("alpha_pattern", "one lora_alpha"),
        ("modules_to_save", "A and B of linears"),
        ("bias", "A and B of linears"),
        ("target_parameters", "parts of experts in target_modules"),
        ("layers_pattern", "layers_to_transform"),
        ("loftq_config", "quantize"),
        ("fan_in_fan_out", "the model says it"),
    ],
)
def test_keys_of_peft_that_are_not_read_are_refused_with_what_to_do(key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"'lora.{key}' is no key of a job") as caught:
        read_job({**KEYS, "lora": {key: "x"}})
    assert says in (caught.value.hint or "")


@pytest.mark.parametrize(
    "keys",
    [
        dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 3]),
        dict(target_modules=["q_proj", "down_proj"], exclude_modules=["layers.1.self_attn.q_proj", "mlp.down_proj"]),
        dict(target_modules=["self_attn.v_proj", "up_proj"], exclude_modules=["v_proj"], layers_to_transform=[0]),
    ],
)
def test_what_is_left_out_is_what_peft_leaves_out(keys: dict[str, Any], tmp_path: Path) -> None:
    truth = save_model("llama", tmp_path)
    peft = get_peft_model(truth, LoraConfig(**keys))
    spec = spec_of(tmp_path)
    names = adapted_modules(LoraJob(**{key: tuple(value) for key, value in keys.items()}), spec)
    assert set(names) == set(peft.targeted_module_names) != set()
    told = tuple(target_names(names, spec))
    assert set(adapted_modules(LoraJob(target_modules=told), spec)) == set(names), "the file names these and no others"


def test_a_target_may_be_in_some_layers_only() -> None:
    spec = spec_from_config(dict(DELTA, layer_types=["linear_attention", "full_attention"] * 2))
    names = adapted_modules(LoraJob(target_modules=("self_attn.q_proj",)), spec)
    assert {name.split(".")[2] for name in names} == {"1", "3"}
