from __future__ import annotations

import pytest

from tllm.ground.errors import CapacityError
from tllm.planner.cost import RankBytes
from tllm.planner.room import RUNTIME_BYTES, check_machines
from tllm.spec.cut import Cut

NOTHING = (0, 0)
CUT = Cut(NOTHING, NOTHING, NOTHING, NOTHING, (NOTHING,), NOTHING, NOTHING, NOTHING)


def rank(number: int, weights: int, kv: int) -> RankBytes:
    return RankBytes(number, number, range(1), CUT, weights, kv)


def test_what_is_on_one_machine_counts_together() -> None:
    ranks = [rank(0, 100, 2), rank(1, 50, 3)]
    need = 2 * RUNTIME_BYTES + 150 + 5 * 10
    check_machines(ranks, 10, [("box", need), ("box", need)])
    with pytest.raises(CapacityError, match=f"the ranks on box need {need} bytes and it has {need - 1}"):
        check_machines(ranks, 10, [("box", need - 1), ("box", need - 1)])
    check_machines(ranks, 10, [("box", need - 1), ("other", need - 1)])
