"""Two ranks that meet again and again."""

from __future__ import annotations

import time

from tests.support.ranks import run_ranks
from tllm.comm.group import Group, local_groups
from tllm.node.meetings import meeting_seconds


def test_both_end_together_though_one_has_less_time() -> None:
    """Each must leave after the same sum, or the other would wait for ever."""

    def meet(group: Group) -> float:
        time.sleep(0.05 * group.rank)
        return meeting_seconds(group, 0.1 + 0.1 * group.rank)

    found = run_ranks(local_groups(2, deadline=20.0), meet)
    assert len(found) == 2 and min(found) >= 0
