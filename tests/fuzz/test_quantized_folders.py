"""Quantised folders in which anything is otherwise: they are read, or refused by one error of ours."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models.quantized_folders import FORMATS
from tests.support.models.quantized_read import opened, weight
from tests.unit.weights.formats.test_mxfp4 import CONFIG as MXFP4
from tests.unit.weights.formats.test_mxfp4 import stacks
from tllm.core.errors import TllmError

JUNK: list[Any] = [
    None,
    -1,
    0,
    3,
    8,
    10**30,
    1.5,
    True,
    False,
    "",
    "x",
    "re:(",
    "group",
    [],
    ["a"],
    [0, 0],
    {},
    {"a": 1},
]
DTYPES = (torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn)
MODULE = "model.layers.0.mlp.down_proj"
TRIES = 40


def twisted_config(dice: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """One value, at any depth, is another or is gone."""
    config = copy.deepcopy(config)
    at: Any = config
    while True:
        key = dice.choice(list(at))
        if not isinstance(at[key], dict) or not at[key] or dice.random() < 0.3:
            break
        at = at[key]
    if dice.random() < 0.2:
        del at[key]
    else:
        at[key] = dice.choice(JUNK)
    return config


def twisted_planes(dice: random.Random, planes: dict[str, Tensor]) -> dict[str, Tensor]:
    """One plane is gone, has another name, dtype, shape, or other bytes."""
    planes = dict(planes)
    name = dice.choice(list(planes))
    plane = planes.pop(name)
    kind = dice.randrange(5)
    if kind == 1:
        planes[dice.choice([*planes, f"{name}s"])] = plane
    elif kind == 2:
        planes[name] = plane.to(torch.float32).to(dice.choice(DTYPES))
    elif kind == 3:
        shape = [dice.choice((0, 1, 2, 3, 8, 24)) for _ in range(dice.randrange(4))]
        planes[name] = torch.zeros(shape).to(plane.dtype)
    elif kind == 4:
        octets = plane.contiguous().reshape(-1).view(torch.uint8).clone()
        octets[torch.tensor([dice.randrange(len(octets)) for _ in range(4)])] = dice.randrange(256)
        planes[name] = octets.view(plane.dtype).view(plane.shape)
    return planes


@pytest.mark.parametrize("form", [*FORMATS, "mxfp4"])
def test_it_is_read_or_refused(form: str, tmp_path: Path) -> None:
    dice = random.Random(f"folders {form}")
    if form == "mxfp4":
        key, config = "quantization_config", MXFP4
        planes = {f"model.layers.0.mlp.experts.{part}": plane for part, plane in stacks().items()}
    else:
        key, config = FORMATS[form].key, FORMATS[form].config
        matrix = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
        planes = {f"{MODULE}.{part}": plane for part, plane in FORMATS[form].write(matrix).items()}
    refused = 0
    for number in range(TRIES):
        turn = number % 2
        now = twisted_config(dice, config) if turn else config
        tensors = planes if turn else twisted_planes(dice, planes)
        save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: now}))
        try:
            index, _ = opened(tmp_path)
            for name in list(index.stored)[:4]:
                weight(tmp_path, name)
        except TllmError:
            refused += 1
    assert refused > TRIES // 4, "most of it cannot be read"
