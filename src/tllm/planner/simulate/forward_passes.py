"""What forward passes beside a run's steps take: of a reference before the first one, of rows held out after some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.plan import Plan

Predict = Callable[[Plan, TrainingFacts], StepPrediction]


def forward_seconds(plan: Plan, facts: TrainingFacts, predict: Predict) -> float:
    """Seconds in which the rows of a step of `facts` go through the model under `plan`, and nothing is learned; twice
    where a step has a second pass over them (`value_pass`).

    `predict` is for the whole model: what is learned beside an adapter alone is no measure of a forward pass.
    """
    whole = replace(facts, adapter=None, projections=None, sampling=None, reference=False, teacher=None, reward=None)
    step = predict(msgspec.structs.replace(plan, recompute="none"), whole)
    passes = 1 + facts.value_pass
    return passes / (passes + BACKWARD) * (step.compute + step.layers + step.pipeline)


def as_predicted(placed: PlacedPlan) -> Predict:
    """Other plans and facts on the same devices."""
    return lambda plan, facts: replace(placed, plan=plan, facts=facts).predict()
