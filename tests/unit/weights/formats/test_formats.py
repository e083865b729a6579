"""Every format's weights, whole and in parts, equal to the bit what the format's own reader makes of the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models.quantized_folders import FORMATS, Format, awq, gptq
from tests.support.models.quantized_read import weight

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
ROWS, COLUMNS = 40, 48
BOXES = (
    ((0, ROWS), (0, COLUMNS)),
    ((3, 17), (0, COLUMNS)),
    ((8, 16), (16, 32)),
    ((0, ROWS), (5, 43)),
    ((39, 40), (47, 48)),
    ((9, 31), (33, 40)),
)


def written(folder: Path, form: Format, planes: dict[str, Tensor]) -> Path:
    save_file({f"{MODULE}.{part}": plane.contiguous() for part, plane in planes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", form.key: form.config}))
    return folder


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", FORMATS)
def test_each_part_is_what_the_formats_own_reader_reads(form: str, tmp_path: Path) -> None:
    planes = FORMATS[form].write(matrix())
    folder, want = written(tmp_path, FORMATS[form], planes), FORMATS[form].read(planes)
    assert (want - matrix()).std() < 0.15, "quantised to the nearest"
    for rows, columns in BOXES:
        assert torch.equal(weight(folder, NAME, (rows, columns)), want[slice(*rows), slice(*columns)]), (rows, columns)


@pytest.mark.parametrize("form", [awq(64), gptq(4, 64)], ids=["awq", "gptq"])
def test_a_part_that_begins_within_a_wide_group_has_its_scale(form: Format, tmp_path: Path) -> None:
    """Of more columns than activations are rounded together in, as most folders have; the last one is half full."""
    planes = form.write(torch.randn(16, 160, generator=torch.Generator().manual_seed(4)))
    folder, want = written(tmp_path, form, planes), form.read(planes)
    for columns in ((32, 96), (96, 160), (100, 110)):
        assert torch.equal(weight(folder, NAME, ((0, 16), columns)), want[:, slice(*columns)]), columns


@pytest.mark.parametrize("form", ["awq", "gptq_v2", "gptq_8_v2", "gptq_desc_act", "int4_asymmetric", "mlx", "mlx_8"])
def test_any_words_are_read(form: str, tmp_path: Path) -> None:
    """Words of random bits have every code and every zero in every place."""
    generator = torch.Generator().manual_seed(5)
    planes = FORMATS[form].write(matrix())
    for part in ("qweight", "qzeros", "weight_packed", "weight_zero_point", "weight"):
        if part in planes:
            bits = torch.randint(-(2**31), 2**31, planes[part].shape, generator=generator, dtype=torch.int64)
            planes[part] = bits.to(torch.int32).view(planes[part].dtype)
    folder, want = written(tmp_path, FORMATS[form], planes), FORMATS[form].read(planes)
    for rows, columns in BOXES:
        assert torch.equal(weight(folder, NAME, (rows, columns)), want[slice(*rows), slice(*columns)]), (rows, columns)


def test_known_words_of_awq(tmp_path: Path) -> None:
    """Outputs 0 to 7 in the nibbles 0, 4, 1, 5, 2, 6, 3, 7: AutoAWQ's own order."""
    one = torch.ones(1, 8, dtype=torch.float16)
    planes = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1).int(),
        "scales": one,
    }
    folder = written(tmp_path, FORMATS["awq"], planes)
    assert weight(folder, NAME)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("version", "zeros"), [(1, 0x77777777), (2, -0x77777778)])
def test_known_zeros_of_gptq(version: int, zeros: int, tmp_path: Path) -> None:
    """A symmetric zero of 8 is 7 in files of version 1, and itself in those of version 2."""
    planes = {
        "qweight": torch.full((1, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.tensor([[zeros]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    folder = written(tmp_path, gptq(4, 8, version=version), planes)
    assert weight(folder, NAME)[0].tolist() == [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]


def test_a_zero_of_nothing_is_stored_as_the_largest(tmp_path: Path) -> None:
    planes = {
        "qweight": torch.full((1, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.tensor([[-1]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    folder = written(tmp_path, gptq(4, 8, symmetric=False), planes)
    assert weight(folder, NAME)[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
