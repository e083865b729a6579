"""Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`, which PEFT and vLLM read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm.spec.lora.lora_config import CONFIG_FILE
from tllm.weights.boxes import Shape
from tllm.weights.export import WholeTensor, new_folder, write_json, write_safetensors
from tllm.weights.lora.adapter_files import WEIGHTS_FILE, WRAPPED
from tllm.weights.lora.sampled_digest import KEY

ALWAYS: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "modules_to_save": None,
}
"""Keys that say what no adapter of ours has."""


class _Wrapped(NamedTuple):
    """A tensor under the name that PEFT gives it."""

    plain: WholeTensor

    @property
    def name(self) -> str:
        return WRAPPED + self.plain.name

    @property
    def shape(self) -> Shape:
        return self.plain.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def make(self) -> Tensor:
        return self.plain.make()


def write_adapter(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[WholeTensor], others: Sequence[Path] = (), base: str = ""
) -> None:
    """A new folder of an adapter. `config` has PEFT's keys, `tensors` the names of `lora_update.tensor_names`.

    `others` are files to copy along, such as a tokenizer's; `base` is the digest of the weights that it was trained
    beside. The folder is there complete or not at all.
    """
    wrapped = sorted(map(_Wrapped, tensors), key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    with new_folder(folder) as beside:
        write_safetensors(beside / WEIGHTS_FILE, wrapped, **({KEY: base} if base else {}))
        write_json(beside / CONFIG_FILE, {**ALWAYS, **config})
        for other in others:
            shutil.copyfile(other, beside / other.name)
