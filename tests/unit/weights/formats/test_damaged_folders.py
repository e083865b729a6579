"""A quantised folder that is not whole, or whose parts do not fit together, is one error that names the weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.models.quantized_folders import FORMATS, Planes
from tests.support.models.quantized_read import opened, weight
from tests.unit.weights.formats.test_formats import MODULE, NAME, matrix, written
from tllm.core.errors import WeightsError


@pytest.mark.parametrize("form", FORMATS)
def test_every_missing_plane_is_named(form: str, tmp_path: Path) -> None:
    planes = FORMATS[form].write(matrix())
    optional = {"g_idx"} if "desc_act" not in form else set()
    for part in planes.keys() - optional:
        rest = {name: x for name, x in planes.items() if name != part}
        with pytest.raises(WeightsError, match="down_proj"):
            opened(written(tmp_path, FORMATS[form], rest))


WHOLE = (("gptq_8", "qweight"), ("float8_tensor", "weight"), ("fp8_tensor", "weight"))


@pytest.mark.parametrize("form", FORMATS)
def test_every_plane_of_another_shape_or_dtype_is_named(form: str, tmp_path: Path) -> None:
    planes = FORMATS[form].write(matrix())
    for part, x in planes.items():
        for other in (
            torch.cat((x, x)) if x.ndim else torch.stack((x, x)),
            x.to(torch.float64 if x.dtype != torch.float64 else torch.int8),
        ):
            if other.dtype == x.dtype and (form, part) in WHOLE:
                continue  # one scale for more of them: only the model knows how many there should be
            with pytest.raises(WeightsError, match=rf"{MODULE}.*(shape|float64)"):
                opened(written(tmp_path, FORMATS[form], {**planes, part: other}))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_is_named(form: str, value: float, tmp_path: Path) -> None:
    planes = FORMATS[form].write(matrix())
    part = next(name for name in ("scales", "weight_scale", "weight_scale_inv") if name in planes)
    scales = planes[part].contiguous()
    scales.view(-1)[-1] = 255 if scales.dtype == torch.uint8 else value
    with pytest.raises(WeightsError, match=rf"{NAME}: \d+ of \d+ scales .* not finite"):
        weight(written(tmp_path, FORMATS[form], {**planes, part: scales}), NAME)


def _out_of_range(planes: Planes) -> None:
    planes["g_idx"][7] = 3


def _below_zero(planes: Planes) -> None:
    planes["g_idx"][7] = -1


def _half_reordered(planes: Planes) -> None:
    planes["g_idx"] = planes["g_idx"].flip(0)


def _version_1(planes: Planes) -> None:
    planes["qzeros"] = planes["qzeros"] + 0x11111111


def _of_another_matrix(planes: Planes) -> None:
    planes["weight_shape"] = torch.tensor([40, 47])


def _not_a_number(planes: Planes) -> None:
    planes["weight"].view(torch.uint8)[3, 3] = 0xFF


def _plain_too(planes: Planes) -> None:
    planes["weight"] = torch.zeros(40, 48)


@pytest.mark.parametrize(
    ("form", "damage", "says"),
    [
        ("gptq_desc_act", _out_of_range, r"g_idx has group 0 to 3 and there are 3 groups"),
        ("gptq_desc_act", _below_zero, r"g_idx has group -1 to 2 and there are 3 groups"),
        ("gptq_v2", _half_reordered, r"g_idx puts columns of \[0:48\] into other groups"),
        ("gptq", _version_1, r"zeros are 9 to 9 and a symmetric one is 8"),
        ("int4_asymmetric", _of_another_matrix, r"weight_shape is \[40, 47\] and weight_packed has 40 rows of 48"),
        ("fp8", _not_a_number, "a weight is not a number"),
        ("awq", _plain_too, "both as a plain weight and in few bits"),
    ],
)
def test_what_does_not_fit_is_said(form: str, damage: Callable[[Planes], None], says: str, tmp_path: Path) -> None:
    planes = {part: x.clone() for part, x in FORMATS[form].write(matrix()).items()}
    damage(planes)
    with pytest.raises(WeightsError, match=says):
        weight(written(tmp_path, FORMATS[form], planes), NAME)


def test_weights_of_8_bits_without_a_config_are_not_taken_for_plain_ones(tmp_path: Path) -> None:
    folder = written(tmp_path, FORMATS["fp8"], FORMATS["fp8"].write(matrix()))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WeightsError, match=r"down_proj\.weight' is in float8_e4m3fn and nothing says its scale"):
        opened(folder)
