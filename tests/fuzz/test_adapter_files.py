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
