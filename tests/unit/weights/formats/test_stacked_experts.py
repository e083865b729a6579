"""Experts that the files keep as one tensor are read as those of a file that has them apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.families import save_model
from tests.support.models.slow_load import names_read
from tllm.core.errors import WeightsError
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load


def stack(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, with each layer's experts as one, as the family is published."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{expert}.{part}_proj.weight") for expert in range(5)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat((gate, up), dim=1), f"{block}.down_proj": down}
    return tensors


def test_a_stack_is_read_as_its_experts(tmp_path: Path) -> None:
    save_model("qwen3_5_moe", tmp_path)
    config = read_config(tmp_path)
    spec = spec_from_config(config)
    apart, together = (build(spec, whole(spec), torch.float32) for _ in range(2))
    source = LocalFiles(tmp_path)
    load(apart, open_index(source, config), source)
    save_file(stack(tmp_path), tmp_path / "model.safetensors")
    source = LocalFiles(tmp_path)
    index = open_index(source, config)
    load(together, index, source)
    assert names_read(together, index) == set(index.entries)
    for a, b in zip(apart.parameters(), together.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(5, 7, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"\(5, 7, 3\) and should be \[experts, rows, columns\] with rows of gate_proj"
    ):
        open_index(LocalFiles(tmp_path), {"model_type": "qwen3_5_moe_text"})
