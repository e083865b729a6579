"""Quantised folders against `transformers` on the model that each format's own reader makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import FAMILIES, random_model, save_model
from tests.support.models.layouts import logits_under
from tests.support.models.quantized_folders import FORMATS, save_mxfp4, save_quantized
from tests.support.models.quantized_read import fast_load
from tests.support.selection import EACH_PART, in_turn, pairs_in_turn
from tllm.weights.formats import awq, gptq, matrix_planes
from tllm.weights.formats.matrix_planes import Plane, unpacked

LAYOUTS = ("tp=3,shares=1:2:1", "pp=2,tp=1+2")
KEPT = {"qwen3_next_moe": r"linear_attn\.in_proj_ba", "qwen3_5": r"linear_attn\.in_proj_[ab]\b"}
"""Families with gated delta nets -> the linears that their quantised folders leave plain: they are few and narrow."""
CASES = [
    *(("llama", form) for form in FORMATS),
    *pairs_in_turn(("phi3", "qwen3_moe", *KEPT), ("awq", "gptq_desc_act", "int4_asymmetric", "fp8")),
]
WIDTHS = dict(intermediate_size=96, head_dim=6, num_key_value_heads=4)
"""Of whole words, and of whole groups where a format's own reader asks for them."""


def folders(family: str, form: str, tmp_path: Path) -> tuple[Path, Path]:
    """The quantised folder, and the plain one of what it stands for."""
    more = dict(moe_intermediate_size=48) if "moe" in family else {}
    more |= dict(head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8) if family in KEPT else {}
    more |= dict(shared_expert_intermediate_size=32) if family == "qwen3_next_moe" else {}
    save_model(family, tmp_path / "plain", **{**WIDTHS, **more})
    return tmp_path / form, save_quantized(tmp_path / "plain", tmp_path / form, FORMATS[form], KEPT.get(family, ""))


def difference(folder: Path, slow: Path, layouts: Sequence[str]) -> float:
    """The largest difference of a logit."""
    (reader,) = json.loads((slow / "config.json").read_text())["architectures"]
    truth = getattr(transformers, reader).from_pretrained(slow, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = truth.eval()(prompt(24)[None]).logits[0]
    assert want.std() > 0.3, "flat logits would hide a fault"
    found = [logits_under(folder, layout, prompt(24), torch.float32, fill=fast_load) for layout in layouts]
    return max(float((got - want).abs().max()) for got in found)


@EACH_PART
@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_equal_transformers_on_the_dequantised_model(family: str, form: str, part: str, tmp_path: Path) -> None:
    layouts = in_turn(LAYOUTS, form, FORMATS, part, count=1)
    assert difference(*folders(family, form, tmp_path), layouts) < 2e-5


@pytest.mark.parametrize("form", ["awq", "int4_asymmetric", "fp8"])
def test_what_is_left_plain_has_the_names_of_a_model_that_also_sees(form: str, tmp_path: Path) -> None:
    """Its files name modules by `model.language_model.`, in the lists of `quantization_config` too."""
    shape = {**FAMILIES["qwen3_5"][1], **WIDTHS, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    random_model("Qwen3_5", tmp_path / "plain", **shape)
    slow = save_quantized(tmp_path / "plain", tmp_path / form, FORMATS[form], KEPT["qwen3_5"])
    assert "model.language_model.layers.0.linear_attn.in_proj_a" in (tmp_path / form / "config.json").read_text()
    assert difference(tmp_path / form, slow, LAYOUTS[1:]) < 2e-5


@pytest.mark.parametrize("case", [case for case in FAMILIES if case.startswith("gpt_oss")])
def test_stacks_of_mxfp4_experts(case: str, tmp_path: Path) -> None:
    """What the layers beside the experts hold is plain."""
    plain, folder = tmp_path / "plain", tmp_path / "mxfp4"
    save_model(case, plain, hidden_size=64, intermediate_size=96)
    slow = save_mxfp4(plain, folder)
    assert difference(folder, slow, (*LAYOUTS, "tp=2,experts=spread")) < 2e-5


def _turned_nibbles(words: torch.Tensor, bits: int) -> torch.Tensor:
    return unpacked(words, bits).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _neighbours_scale(self: matrix_planes.PackedMatrix, planes: dict[str, torch.Tensor]) -> torch.Tensor:
    return self.tensor("scales", planes).roll(1, 0)


def _one_row_off(self: Plane, box: matrix_planes.Box) -> matrix_planes.Box:
    found = BOX(self, box)
    if self.per == (1, 8) and found[1][0] > 0:
        return found[0], (found[1][0] - 1, found[1][1] - 1)
    return found


BOX = Plane.box


@pytest.mark.parametrize(
    ("form", "at", "name", "fault"),
    [
        ("gptq", gptq, "unpacked", _turned_nibbles),
        ("awq", awq, "NIBBLES", tuple(range(8))),
        ("awq", matrix_planes.PackedMatrix, "scales", _neighbours_scale),
        ("int4", Plane, "box", _one_row_off),
        ("gptq_asymmetric", gptq.GptqMatrix, "zero_offset", 0),
    ],
)
def test_faults_are_seen(
    form: str, at: object, name: str, fault: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slow = folders("llama", form, tmp_path)
    if name == "zero_offset":
        config = folder / "config.json"
        config.write_text(
            config.read_text().replace('"quant_method": "gptq"', '"quant_method": "gptq", "format": "gptq_v2"')
        )
    else:
        monkeypatch.setattr(at, name, fault)
    assert difference(folder, slow, LAYOUTS[:1]) > 0.01
