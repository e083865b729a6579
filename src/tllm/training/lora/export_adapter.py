"""The adapter of a save as PEFT's folder."""

from __future__ import annotations

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
    write_adapter(folder, config, tensors, initial.companions, initial.base)


def adapter_config(lora: LoraJob, spec: ModelSpec, base: str) -> dict[str, Any]:
    """What `adapter_config.json` says of a job's adapter of the model in `base`."""
    alpha = int(lora.lora_alpha) if lora.lora_alpha.is_integer() else lora.lora_alpha
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
