"""Which modules of an adapter of experts PEFT reads, asked of PEFT and `transformers` for every family with experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import save_file

from tests.support.models.families import FAMILIES, save_model
from tests.support.models.layouts import spec_of
from tllm.model.transformer import build
from tllm.parallel.lora.adapted_model import EXPERT, module_shapes
from tllm.parallel.lora.lora_update import tensor_names
from tllm.parallel.mesh import whole
from tllm.spec.hf_config import read_config
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules
from tllm.training.lora.export_adapter import adapter_config, not_read_by_peft
from tllm.weights.lora.stacked_experts import WRAPPED

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
    "ignore:Found missing adapter keys while loading the checkpoint",
)
"""PEFT says so of patterns that it makes itself for experts that it stacks; and of what a file does not have."""

COUNTS = {"num_experts", "num_local_experts", "n_routed_experts"}
CASES = [case for case, (_, keys) in FAMILIES.items() if COUNTS & keys.keys() and case != "gpt_oss_moe"]
"""Every family with experts whose files have a tensor of each; of gpt_oss a run writes stacks."""


def modules_read(base: Path, targets: tuple[str, ...], folder: Path) -> tuple[list[str], list[str]]:
    """The modules that an adapter of these targets has, and those whose B is among PEFT's when it has read the file.

    Each B has a number of its own in all places, so that it is found in stacks too.
    """
    spec, lora = spec_of(base), LoraJob(r=2, target_modules=targets)
    shapes = module_shapes(build(spec, whole(spec), torch.float32, "meta"))
    marks = {float(number): name for number, name in enumerate(adapted_modules(lora, spec), 1)}
    tensors = dict[str, torch.Tensor]()
    for mark, name in marks.items():
        (name_A, name_B), (outputs, inputs) = tensor_names(name), shapes[name]
        tensors |= {WRAPPED + name_A: torch.ones(2, inputs), WRAPPED + name_B: torch.full((outputs, 2), mark)}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **adapter_config(lora, spec, "")}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    truth = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    found = set[float]()
    for name, parameter in PeftModel.from_pretrained(truth, str(folder)).named_parameters():
        if ".lora_B." in name:
            found |= set(parameter.unique().tolist())
    return list(marks.values()), [name for mark, name in marks.items() if mark in found]


@pytest.mark.parametrize("case", CASES)
def test_what_peft_drops_is_what_a_run_warns_of(case: str, tmp_path: Path) -> None:
    """Of all products of experts, with and without a linear of attention beside them, and of the down alone."""
    save_model(case, tmp_path / "base")
    spec = spec_of(tmp_path / "base")
    shapes = module_shapes(build(spec, whole(spec), torch.float32, "meta"))
    parts = sorted({match[3] for name in shapes if (match := EXPERT.fullmatch(name))})
    downs = tuple(part for part in parts if part in ("down_proj", "w2"))
    family = read_config(tmp_path / "base")["model_type"]
    for number, targets in enumerate(((*parts, "o_proj"), tuple(parts), downs)):
        modules, read = modules_read(tmp_path / "base", targets, tmp_path / f"adapter{number}")
        lost = [name for name in modules if name not in read]
        assert lost == not_read_by_peft(family, modules), f"{family} {targets}"


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_peft_wants_gate_and_up_both(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path / "base")
    with pytest.raises(ValueError, match="because they are fused into gate_up_proj"):
        modules_read(tmp_path / "base", ("w1" if case == "mixtral" else "gate_proj",), tmp_path / "adapter")
