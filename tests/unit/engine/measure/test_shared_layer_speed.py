"""What two ranks measure that serve a layer together."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.engine.measure.shared_layer_speed import shared_layer_seconds
from tllm.model.mlp import Mlp

SLOW = 0.05


@pytest.mark.usefixtures("own_clock", "computed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_end_together_though_one_has_more_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each must go through as many passes, or the other would wait for ever; and both see the slower one's time."""
    plain, slow = Mlp.forward, list[int]()

    def late(self: Mlp, *values: Any) -> Tensor:
        if threading.get_ident() in slow:
            time.sleep(SLOW)
        return plain(self, *values)

    def one(group: Group) -> float:
        if group.rank == 1:
            slow.append(threading.get_ident())
        return shared_layer_seconds(spec_of(4), dtype, group, 20, 0.1 + 0.1 * group.rank)

    monkeypatch.setattr(Mlp, "forward", late)
    there, here = run_ranks(local_groups(2), one)
    assert SLOW < there < 1.5 * SLOW and SLOW < here < 1.5 * SLOW
