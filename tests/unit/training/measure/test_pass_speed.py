"""What a process measures of itself before it trains."""

from __future__ import annotations

import pytest
import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.model.attention import AttentionSpec
from tllm.training.attention import varlen_attention
from tllm.training.attention.varlen_attention import VarlenAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.measure import pass_speed
from tllm.training.measure.pass_speed import layer_speed, training_passes
from tllm.training.optim.optimizer import AdamW


def test_all_that_a_step_takes_is_measured() -> None:
    found = training_passes(spec_of(4), torch.float32, 16, (16, 48), AdamW(), 0.3)
    assert [(one.rows, one.ranks) for one in found.layers] == [(16, 1), (48, 1), (16, 2), (48, 2)]
    assert [one.rows for one in found.logits] == [16, 48]
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits))
    assert found.update > 0 and found.split >= 1


def test_layers_attend_as_a_step_does_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    class Told(VarlenAttend):
        def __init__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
            super().__init__(specs, tokens)
            made.append(tokens.lengths)

    monkeypatch.setattr(varlen_attention, "has_varlen", lambda device: True)
    monkeypatch.setattr(varlen_attention, "VarlenAttend", Told)
    monkeypatch.setattr(pass_speed, "SECONDS", 0.0)
    assert layer_speed(spec_of(2), torch.float32, 8, 3) > 0
    training_passes(spec_of(4), torch.float32, 8, (20,), AdamW(), 0.0)
    assert made[0] == [8, 8, 8] and made[-1] == [8, 8, 4]
