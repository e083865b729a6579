"""`tllm export`: a model with adapters merged into it, as PEFT merges them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.adapters import peft_adapter, save_adapter
from tests.support.models.families import save_model
from tllm.cli.main import main
from tllm.core.errors import WeightsError
from tllm.spec.hf_config import read_config
from tllm.training.lora.merged_model import write_merged

TARGETS = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "qwen2_moe": ("q_proj", "shared_expert.up_proj"),
    "llama_mha_tied_bias": ("k_proj", "o_proj"),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-10), ("float32", 1e-6)])
def test_a_merged_model_is_the_one_that_peft_merges(case: str, dtype: str, limit: float, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    peft = peft_adapter(truth, tmp_path / "adapter", TARGETS[case], use_rslora=True)
    peft.to(getattr(torch, dtype)).merge_and_unload().save_pretrained(tmp_path / "theirs")
    assert main(["export", str(tmp_path / "base"), str(tmp_path / "ours"), "--adapter", str(tmp_path / "adapter"),
                 "--dtype", dtype]) == 0  # fmt: skip
    want, got, base = (tensors_of(tmp_path / name) for name in ("theirs", "ours", "base"))
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == getattr(torch, dtype)
        off = float((got[name].double() - x.double()).norm() / x.double().norm())
        assert off < limit, f"{name}: {off:.1e}"
    changed = {name for name, x in base.items() if not torch.equal(x.double(), got[name].double())}
    assert changed and all(name.removesuffix(".weight").endswith(TARGETS[case]) for name in changed)
    config = read_config(tmp_path / "ours")
    assert dtype in (config.get("dtype"), config.get("torch_dtype"))


def test_two_adapters_are_added_and_dtypes_stay(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base").bfloat16().save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        save_adapter(tmp_path / "base", tmp_path / f"a{seed}", seed=seed, ends=("o_proj",))
    write_merged(tmp_path / "base", tmp_path / "out", [tmp_path / "a1", tmp_path / "a2"])
    base, got = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    name = "model.layers.1.self_attn.o_proj"
    want = base[f"{name}.weight"].double()
    for seed in (1, 2):
        adapter = load_file(tmp_path / f"a{seed}" / "adapter_model.safetensors")
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        want = want + 6 / 4 * (b @ a)
    assert torch.equal(got[f"{name}.weight"], want.bfloat16())
    assert torch.equal(got["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base")
    save_model("llama", tmp_path / "wider", hidden_size=64)
    save_model("qwen3", tmp_path / "other", num_hidden_layers=5)
    save_adapter(tmp_path / "wider", tmp_path / "of-wider")
    save_adapter(tmp_path / "other", tmp_path / "of-deeper")
    out = tmp_path / "out"
    with pytest.raises(WeightsError, match=r"of-wider: .* has shape"):
        write_merged(tmp_path / "base", out, [tmp_path / "of-wider"])
    with pytest.raises(WeightsError, match=r"of-deeper: the adapter adapts model\.layers\.4"):
        write_merged(tmp_path / "base", out, [tmp_path / "of-deeper"])
    with pytest.raises(WeightsError, match=r"there is no adapter_config\.json"):
        write_merged(tmp_path / "base", out, [tmp_path / "base"])
    dora = save_adapter(tmp_path / "base", tmp_path / "dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(WeightsError, match=r"lacks .*lora_magnitude_vector"):
        write_merged(tmp_path / "base", out, [dora])
    save_model("llama_mha_tied_bias", tmp_path / "tied")
    tied = tensors_of(tmp_path / "tied")
    tied["lm_head.weight"] = 2 * tied["model.embed_tokens.weight"]
    save_file(tied, tmp_path / "tied" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight of the files is not model\.embed_tokens\.weight"):
        write_merged(tmp_path / "tied", out)
    assert not out.exists()
    with pytest.raises(WeightsError, match="exists already"):
        write_merged(tmp_path / "base", tmp_path / "other")
