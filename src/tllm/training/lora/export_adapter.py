"""The adapter of a save as PEFT's folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tllm.parallel.lora.adapted_model import EXPERT
from tllm.spec.model_spec import ModelSpec
from tllm.training.checkpoint.checkpoint import Checkpoint, CheckpointTensor
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules, target_names
from tllm.weights.export import WholeTensor
from tllm.weights.lora.stacked_experts import stacked
from tllm.weights.lora.write_adapter import write_adapter

NOT_CONVERTED = ("qwen2_moe", "qwen3_5_moe", "gemma4")
"""How types of models begin whose experts `transformers` stacks and PEFT 0.21.2 does not: it reads none of them, and
their linears of other names all. `tests/parity/training/lora/test_read_by_peft.py` asks PEFT of every family."""

log = logging.getLogger("tllm.training")


def export_adapter(checkpoint: Checkpoint, initial: InitialModel, job: Job, spec: ModelSpec, folder: Path) -> None:
    """Write the adapter of a save into a new folder, with the tokenizer that it was trained with."""
    assert job.lora is not None
    tensors: list[WholeTensor] = [
        CheckpointTensor(name, tuple(checkpoint.shapes[name]), checkpoint.dtype(name), checkpoint)
        for name in checkpoint.model_names
    ]
    config = adapter_config(job.lora, spec, job.model_name_or_path or "")
    if any(layer.moe is not None and layer.moe.style == "gpt_oss" for layer in spec.layers):
        tensors, config["target_parameters"] = stacked(tensors, spec.num_layers)
        left = [name for name in adapted_modules(job.lora, spec) if EXPERT.fullmatch(name) is None]
        config["target_modules"] = target_names(left, spec)
    elif lost := not_read_by_peft(initial.config.get("model_type", ""), adapted_modules(job.lora, spec)):
        log.warning(
            "PEFT 0.21.2 will not read %d of the adapter's modules, %s among them, and gives no error: "
            "`tllm serve` and `tllm export --adapter` read them all",
            *(len(lost), lost[0]),
        )
    write_adapter(folder, config, tensors, initial.companions, initial.base)


def not_read_by_peft(model_type: str, modules: Iterable[str]) -> list[str]:
    """The modules that PEFT drops when it stacks experts: linears of dense MLPs and shared experts that
    are called as those of experts; of a family which it has no conversion for, the experts."""
    names = list(modules)
    ends = {match[3] for name in names if (match := EXPERT.fullmatch(name))}
    if model_type.startswith(NOT_CONVERTED):
        return [name for name in names if EXPERT.fullmatch(name)]
    return [name for name in names if name.rpartition(".")[2] in ends and EXPERT.fullmatch(name) is None]


def adapter_config(lora: LoraJob, spec: ModelSpec, base: str) -> dict[str, Any]:
    """What `adapter_config.json` says of a job's adapter of the model in `base`."""
    alpha = int(lora.lora_alpha) if lora.lora_alpha % 1 == 0 else lora.lora_alpha
    return {
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "lora_dropout": lora.lora_dropout,
        "init_lora_weights": lora.init_lora_weights,
        "target_modules": target_names(adapted_modules(lora, spec), spec),
    }
