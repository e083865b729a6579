"""The plan of a test's `Layout`, and microbatches that are as long as its facts say."""

from __future__ import annotations

import torch

from tests.support.training.training_step import Layout
from tllm.spec.plan import Plan, Stage
from tllm.training.data.batch_tensors import Tokens


def plan_of(layout: Layout, num_layers: int) -> Plan:
    """What the planner is asked about where the tests train under `layout`."""
    stages = tuple(
        Stage(run.start, run.stop, layout.tp(index % layout.stages))
        for index, run in enumerate(layout.places(num_layers))
    )
    return Plan(
        stages,
        layout.experts,
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        zero=layout.zero,
        schedule=layout.order,
        depth=layout.depth,
        chunks=layout.chunks,
        sequence=layout.sequence,
        recompute=layout.recompute,
    )


def full_rows(count: int, tokens: int) -> list[Tokens]:
    """Microbatches of one document each, all of which is learned."""
    ids_T = torch.arange(tokens) % 101
    return [Tokens(ids_T, ids_T.clone(), torch.arange(tokens), [tokens]) for _ in range(count)]
