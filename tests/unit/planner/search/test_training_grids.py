"""The search for a training plan proposes grids of ranks where they are predicted to win, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_grids import alike
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.stage_team import RUNTIME_BYTES
from tllm.planner.search import training_layouts
from tllm.planner.search.training_constraints import TrainingConstraints
from tllm.planner.search.training_layouts import TrainingLayouts
from tllm.planner.search.training_search import TrainingSearchResult, best_training
from tllm.spec.model_spec import ModelSpec, MoeSpec
from tllm.spec.trainable import check_trainable

SPEC = replace(spec_of(2, heads=32), hidden_size=4096, head_dim=128, num_kv_heads=32, intermediate_size=11008)
PACKED = TrainingFacts(8192, 1, documents=(512,) * 16)
"""One row of documents that fill it, so that no replicas share it."""

STEPS = 400

LITTLE = 2905
"""MiB beside a process: room for what a rank of a cube holds, and for no plan as fast as that."""


def cluster_of(mib: int) -> Cluster:
    cluster = alike(8)
    device = replace(cluster.devices[0], memory=RUNTIME_BYTES + mib * 2**20)
    return replace(cluster, devices=(device,) * 8)


def found(spec: ModelSpec, cluster: Cluster, with_grids: bool) -> TrainingSearchResult:
    with pytest.MonkeyPatch.context() as patch:
        if not with_grids:
            patch.setattr(training_layouts, "MODES", ("1d",))
        return best_training(spec, cluster, PACKED, steps=STEPS, constraints=TrainingConstraints(microbatch_sizes=(1,)))


def test_a_cube_is_chosen_where_memory_is_short() -> None:
    """Others compute layers again."""
    cluster = cluster_of(LITTLE)
    best, other = (found(SPEC, cluster, with_grids).choices[0] for with_grids in (True, False))
    assert str(best.placed.plan) == "pp=1,tp=8,layers=2,tensor=3d"
    assert best.predicted.seconds < other.predicted.seconds
    assert best.placed.fits(best.placed.memory())
    best.placed.plan.check(SPEC.num_layers)
    check_trainable(best.placed.plan, SPEC, [1])


def test_where_no_grid_wins_the_plan_is_that_of_a_search_without() -> None:
    plans = [found(SPEC, cluster_of(16000), with_grids).choices[0].placed.plan for with_grids in (True, False)]
    assert plans[0] == plans[1] and plans[0].tensor == "1d"


def test_nothing_is_proposed_that_the_trainer_refuses() -> None:
    experts = MoeSpec(num_experts=4, top_k=2, width=256)
    spec = replace(SPEC, layers=tuple(replace(layer, moe=experts) for layer in SPEC.layers))
    layouts = TrainingLayouts(spec, alike(8), replace(PACKED, microbatch_size=1), TrainingConstraints((1,)))
    assert {layout.plan.tensor for layout in layouts} == {"1d"}
