from __future__ import annotations

import pytest

from tllm.core.errors import CapacityError
from tllm.planner.cost.cache_room import check_machines


def test_what_is_on_one_machine_counts_together() -> None:
    need = 100 + 50
    check_machines([100, 50], [("box", need), ("box", need)])
    with pytest.raises(CapacityError, match=f"the ranks on box need {need} B and it has {need - 1} B, 1 B too little"):
        check_machines([100, 50], [("box", need - 1), ("box", need - 1)])
    check_machines([100, 50], [("box", need - 1), ("other", need - 1)])
