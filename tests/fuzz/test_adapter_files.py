"""Damaged folders of LoRA adapters: each is read as an adapter of the model, or refused by an error of ours."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.support.cluster.fuzz_readers import twisted
from tllm.core.errors import ConfigError, WeightsError
from tllm.spec.lora.lora_config import LoraConfig
from tllm.weights.lora.adapter_files import ADAPTER_FILES, check_rank, read_adapter
from tllm.weights.lora.held_adapter import HeldFiles
from tllm.weights.lora.stacked_experts import taken_apart

NAME = "model.layers.0.mlp.down_proj"
SHAPES = {NAME: (8, 20)}
CONFIG = dict(peft_type="LORA", r=3, lora_alpha=6, target_modules=["down_proj"], rank_pattern={"down_proj": 3})
GOOD = [
    json.dumps(CONFIG).encode(),
    save(
        {
            f"base_model.model.{NAME}.lora_A.weight": torch.ones(3, 20),
            f"base_model.model.{NAME}.lora_B.weight": torch.ones(8, 3),
        }
    ),
]


def taken(contents: list[bytes]) -> bool:
    """Whether an adapter is read of these two files; it is then one of the model."""
    files = HeldFiles(dict(zip(ADAPTER_FILES, contents, strict=True)))
    try:
        adapter = read_adapter(files)
        check_rank(adapter, 4)
        adapter.check(SHAPES)
    except (WeightsError, ConfigError):
        return False
    assert isinstance(adapter.config, LoraConfig) and adapter.modules.keys() == {NAME}
    assert adapter.index.shape(f"{NAME}.lora_A.weight") == (adapter.max_rank, 20)
    return True


EXPERTS = {f"model.layers.0.mlp.experts.{e}.{part}": (8, 20) for e in range(2) for part in ("gate_proj", "up_proj")}
STACKED = [
    json.dumps(dict(peft_type="LORA", r=3, lora_alpha=6, target_parameters=["experts.gate_up_proj"])).encode(),
    save(
        {
            "base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.ones(6, 20),
            "base_model.model.model.layers.0.mlp.experts.lora_B.weight": torch.ones(16, 6),
        }
    ),
]


def stacked_taken(contents: list[bytes]) -> bool:
    """The same of an adapter of experts that PEFT has stacked."""
    files = HeldFiles(dict(zip(ADAPTER_FILES, contents, strict=True)))
    try:
        apart = taken_apart(files, EXPERTS)
        adapter = read_adapter(files if apart is None else HeldFiles(apart))
        check_rank(adapter, 4)
        adapter.check(EXPERTS)
    except (WeightsError, ConfigError):
        return False
    assert adapter.modules.keys() == EXPERTS.keys()
    return True


@pytest.mark.parametrize("which", [0, 1], ids=ADAPTER_FILES)
def test_damaged_ones_of_stacked_experts_are_refused_in_order(which: int) -> None:
    assert stacked_taken(STACKED)
    dice = random.Random(which)
    refused = 0
    for _ in range(1000):
        contents = list(STACKED)
        contents[which] = twisted(dice, [STACKED[which]])
        refused += not stacked_taken(contents)
    assert refused > 250


def test_the_good_one_is_taken(tmp_path: Path) -> None:
    assert taken(GOOD)


@pytest.mark.parametrize("which", [0, 1], ids=ADAPTER_FILES)
def test_damaged_ones_are_refused_in_order(which: int) -> None:
    dice = random.Random(which)
    refused = 0
    for _ in range(2000):
        contents = list(GOOD)
        contents[which] = twisted(dice, [GOOD[which]])
        refused += not taken(contents)
    assert refused > 500
