"""What two ranks measure that serve a layer together."""

from __future__ import annotations

import time

import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.engine.measure.shared_layer_speed import shared_layer_seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_end_together_though_one_began_later(dtype: torch.dtype) -> None:
    """Each must go through as many passes, or the other would wait for ever; and both see the slower one's time."""

    def one(group: Group) -> float:
        time.sleep(0.05 * group.rank)
        return shared_layer_seconds(spec_of(4), dtype, group, 20, 0.1 + 0.1 * group.rank)

    there, here = run_ranks(local_groups(2, deadline=20.0), one)
    assert there > 0 and here == pytest.approx(there, rel=0.5)
