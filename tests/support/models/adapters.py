"""Random LoRA adapters in PEFT's files: by PEFT where `transformers` has the model, else by hand, for any model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.models.layouts import spec_of
from tllm.model.transformer import build
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole


def peft_adapter(
    model: transformers.PreTrainedModel, folder: Path, targets: str | Sequence[str], seed: int = 1, **config: Any
) -> PeftModel:
    """Wrap a model by PEFT, give its adapter numbers that matter, and save that under `folder`."""
    wanted = targets if isinstance(targets, str) else list(targets)
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(target_modules=wanted, **{"r": 4, "lora_alpha": 6, **config}))
    for name, parameter in peft.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.3)
    peft.save_pretrained(str(folder))
    return peft.eval()


def peft_dora(
    model: transformers.PreTrainedModel, folder: Path, targets: str | Sequence[str], **config: Any
) -> PeftModel:
    """The same with DoRA's magnitudes, which are not the norms."""
    peft = peft_adapter(model, folder, targets, use_dora=True, **config)
    draw = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if ".lora_magnitude_vector" in name:
            parameter.data *= 1 + 0.4 * torch.rand(parameter.shape, generator=draw)
    peft.save_pretrained(str(folder))
    return peft.eval()


def save_adapter(
    model: Path, folder: Path, seed: int = 1, rank: int = 4, size: float = 0.3, ends: Sequence[str] = (), **config: Any
) -> Path:
    """An adapter for the model in a folder, of every linear that can be adapted, or of those whose names end so.

    With `use_dora`, for a plain model of one file.
    """
    spec, weights = spec_of(model), load_file(model / "model.safetensors") if config.get("use_dora") else {}
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in module_shapes(build(spec, whole(spec), torch.float32, "meta")).items():
        if not ends or name.endswith(tuple(ends)):
            wrapped = f"base_model.model.{name}"
            tensors[f"{wrapped}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) / inputs**0.5
            tensors[f"{wrapped}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * size
            if weights:
                norms = weights[f"{name}.weight"].float().norm(dim=1)
                tensors[f"{wrapped}.lora_magnitude_vector"] = norms * (1 + torch.rand(outputs, generator=draw))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = dict(peft_type="LORA", r=rank, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder
