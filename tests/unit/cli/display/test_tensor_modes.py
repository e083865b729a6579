"""What is said of other ways to cut a plan's model among its ranks."""

from __future__ import annotations

import pytest

from tests.unit.planner.search.test_serving_search import FACTS, device_of, many, spec_of
from tllm.cli.display.serving_plans import _otherwise_cut
from tllm.cli.display.tensor_modes import MORE_SUMS, serving_modes, show_serving_modes
from tllm.planner.search.serving_search import ServingChoice
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.model_spec import MoeSpec
from tllm.spec.plan import Plan

SPEC = spec_of(4)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("tp=4", ["2d in place of 1d"]),
        ("tp=4,tensor=2d", ["1d in place of 2d"]),
        ("tp=8", ["2.5d in place of 1d", "3d in place of 1d"]),
        ("pp=2,tp=1+4", ["2d in place of 1d"]),
        ("tp=4,shares=1:1:1:2", []),
        ("pp=4", []),
    ],
)
def test_other_ways_are_said_with_their_tokens_a_second(text: str, others: list[str]) -> None:
    plan = Plan.parse(text, SPEC.num_layers)
    devices = tuple(range(plan.world_size))
    cluster = many([device_of(100)] * plan.world_size)
    predicted = predict_serving(SPEC, plan, cluster, devices, FACTS)
    lines = _otherwise_cut(SPEC, cluster, ServingChoice(plan, devices, predicted))
    assert [line.partition(":")[0] for line in lines] == [f"with tensor={other}" for other in others]
    for line in lines:
        assert (float(line.split()[-4]) < 1) == (plan.tensor == "1d"), "links of 0.1 ms make a grid of few ranks slower"


def test_for_many_tokens_another_way_may_send_least() -> None:
    for ranks, least in (
        (4, "tensor=1d sends the fewest bytes"),
        (9, f"tensor=2d sends the fewest bytes for a token, tensor=1d for 4,096{MORE_SUMS}"),
        (16, f"tensor=2.5d sends the fewest bytes{MORE_SUMS}"),
    ):
        shown = show_serving_modes(spec_of(24, heads=16), Plan.parse(f"tp={ranks}", 24), "float32", 4096)
        assert shown.splitlines()[-1] == least


def test_experts_are_cut_one_way() -> None:
    moe = spec_of(4, moe=MoeSpec(num_experts=4, top_k=2, width=64))
    assert serving_modes(moe, Plan.parse("tp=4", 4)) == ["1d"]
