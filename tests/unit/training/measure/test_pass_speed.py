"""What a process measures of itself before it trains."""

from __future__ import annotations

import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.training.measure.pass_speed import training_passes
from tllm.training.optim.optimizer import AdamW


def test_all_that_a_step_takes_is_measured() -> None:
    found = training_passes(spec_of(4), torch.float32, 16, (16, 48), AdamW(), 0.3)
    assert [(one.rows, one.ranks) for one in found.layers] == [(16, 1), (48, 1), (16, 2), (48, 2)]
    assert [one.rows for one in found.logits] == [16, 48]
    assert all(one.seconds > 0 for one in (*found.layers, *found.logits))
    assert found.update > 0 and found.split >= 1
