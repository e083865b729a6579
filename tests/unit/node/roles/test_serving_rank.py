from __future__ import annotations

import pytest

from tllm.core.errors import AuthError
from tllm.node.roles.role import check_speaker
from tllm.node.roles.serving_rank import wires
from tllm.spec.plan import Plan, Wire


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("pp=1", []),
        ("pp=2", [(1, 0), (0, 1)]),
        ("pp=3", [(2, 0), (0, 1), (1, 2)]),
        ("tp=2", [(0, 1), (1, 0)]),
        ("pp=2,tp=1+2", [(1, 2), (2, 1), (1, 0), (0, 1)]),
    ],
)
def test_the_wires_of_a_plan(plan: str, expected: list[tuple[int, int]]) -> None:
    found = wires(Plan.parse(plan, 6))
    assert sorted(found) == sorted(Wire(*pair) for pair in expected)
    assert len(found) == len(set(found))


def test_a_node_speaks_for_its_own_rank_only() -> None:
    certificate = {"subjectAltName": (("DNS", "east"),)}
    check_speaker(certificate, "east", 1)
    with pytest.raises(AuthError, match="east spoke for rank 1, which is on west"):
        check_speaker(certificate, "west", 1)
    for nobody in (None, {}):
        with pytest.raises(AuthError, match="nobody spoke"):
            check_speaker(nobody, "east", 1)
