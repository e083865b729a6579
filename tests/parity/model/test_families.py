"""Every family, unsplit, against `transformers`: the same logits over a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.models.families import FAMILIES, save_model
from tests.support.models.packed_causal import PackedCausal
from tests.support.models.slow_load import slow_load
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    model = build(spec, whole(spec), torch.float32)
    slow_load(model, tmp_path)
    ids_T = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = truth(ids_T[None]).logits[0]
        attend = PackedCausal(model.attention_specs(), [40])
        x = model(ids_T, torch.arange(40), attend, lengths_T=torch.full((40,), 40))
        got = model.logits(x)
    assert want.std() > 0.3, "flat logits would hide a fault"
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
