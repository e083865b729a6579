"""MXFP4 experts equal to the bit what `transformers` makes of them, by the names that the model has for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.quantized_read import opened, read_blocks, weight
from tllm.core.errors import WeightsError

LAYER = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, WIDTH = 3, 96, 64
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def stacks(flat: bool = False) -> dict[str, Tensor]:
    """Random bytes of each kind, with scales of 2^-127 to 2^127."""
    draw = torch.Generator().manual_seed(0)
    planes = {"gate_up_proj": (2 * WIDTH, HIDDEN // 32), "down_proj": (HIDDEN, WIDTH // 32)}
    found = dict[str, Tensor]()
    for stack, shape in planes.items():
        blocks = torch.randint(0, 256, (EXPERTS, *shape, 16), generator=draw, dtype=torch.uint8)
        found[f"{stack}_blocks"] = blocks.flatten(2) if flat else blocks
        found[f"{stack}_scales"] = torch.randint(0, 255, (EXPERTS, *shape), generator=draw, dtype=torch.uint8)
        found[f"{stack}_bias"] = torch.randn(EXPERTS, shape[0], generator=draw).bfloat16()
    return found


def written(folder: Path, planes: dict[str, Tensor]) -> Path:
    save_file({f"{LAYER}.{part}": plane for part, plane in planes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": CONFIG}))
    return folder


@pytest.mark.parametrize("flat", [False, True])
def test_each_experts_matrices(flat: bool, tmp_path: Path) -> None:
    planes, seen = stacks(flat), stacks()
    folder = written(tmp_path, planes)
    want = {
        stack: convert_moe_packed_tensors(
            seen[f"{stack}_blocks"], seen[f"{stack}_scales"], dtype=torch.float32
        ).transpose(1, 2)
        for stack in ("gate_up_proj", "down_proj")
    }
    for expert in range(EXPERTS):
        for stack, (rows, columns) in (("gate_up_proj", ((3, 41), (33, 64))), ("down_proj", ((7, 9), (0, 40)))):
            name, matrix = f"{LAYER}.{expert}.{stack}.weight", want[stack][expert]
            assert torch.equal(weight(folder, name), matrix)
            assert torch.equal(weight(folder, name, (rows, columns)), matrix[slice(*rows), slice(*columns)])


def test_the_stacks_as_plain_files_have_them(tmp_path: Path) -> None:
    planes = stacks()
    folder = written(tmp_path, planes)
    index, source = opened(folder)
    for stack in ("gate_up_proj", "down_proj"):
        want = convert_moe_packed_tensors(planes[f"{stack}_blocks"], planes[f"{stack}_scales"], dtype=torch.float32)
        assert index.shape(f"{LAYER}.{stack}") == want.shape
        assert torch.equal(weight(folder, f"{LAYER}.{stack}"), want)
        box = ((1, 3), (5, 50), (7, 30))
        assert torch.equal(weight(folder, f"{LAYER}.{stack}", box), want[1:3, 5:50, 7:30])
    assert torch.equal(index.slice(source, f"{LAYER}.gate_up_proj_bias"), planes["gate_up_proj_bias"])


def test_only_the_rows_of_one_part_are_read(tmp_path: Path) -> None:
    index, source = opened(written(tmp_path, stacks()))
    name = f"{LAYER}.1.gate_up_proj.weight"
    before = source.bytes_read
    read_blocks(index, source, name, ((WIDTH, 2 * WIDTH), (0, HIDDEN)))
    assert source.bytes_read - before == WIDTH * HIDDEN // 32 * 17


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    planes = stacks()
    planes["down_proj_scales"][2, 5, 1] = 255
    with pytest.raises(WeightsError, match=r"experts\.2\.down_proj\.weight: 1 of 192 scales .* not finite"):
        weight(written(tmp_path, planes), f"{LAYER}.2.down_proj.weight")


@pytest.mark.parametrize(
    ("part", "shape", "says"),
    [
        ("down_proj_blocks", (EXPERTS, HIDDEN, 2, 15), r"has shape \(3, 96, 2, 15\) .* needs \(3, 96, 2, 16\)"),
        ("gate_up_proj_scales", (EXPERTS, 2 * WIDTH - 1, 3), r"has shape \(3, 127, 3\)"),
        ("down_proj_bias", (EXPERTS, 5), r"has shape \(3, 5\) .* needs \(3, 96\)"),
    ],
)
def test_a_plane_of_another_shape_is_named(part: str, shape: tuple[int, ...], says: str, tmp_path: Path) -> None:
    planes = stacks()
    planes[part] = torch.zeros(shape, dtype=planes[part].dtype)
    with pytest.raises(WeightsError, match=says):
        opened(written(tmp_path, planes))


def test_a_missing_plane_is_named(tmp_path: Path) -> None:
    planes = stacks()
    del planes["down_proj_scales"]
    with pytest.raises(WeightsError, match=r"mlp\.experts' has down_proj_blocks and no down_proj_scales"):
        opened(written(tmp_path, planes))
