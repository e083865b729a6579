"""What ranks of a grid send and hold in a training step is what the planner says."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import msgspec
import pytest
import torch

from benchmarks.comm.tensor_parallel import spec_of
from tests.support.models.layouts import in_threads
from tests.support.models.live_tensors import Live
from tests.support.selection import soak_but
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import build
from tllm.parallel.grid.grid_mesh import GridMesh, grid_mesh_of
from tllm.parallel.replicated import ReplicatedParameters
from tllm.planner.cost.activations import logits_bytes, run_bytes
from tllm.planner.cost.grid_work import hidden_part
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.cost.traffic import step_traffic
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Recompute
from tllm.training.attention.grid_tokens import grid_tokens
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.step.recompute import recompute

LLAMA = replace(spec_of(64), layers=spec_of(64).layers[:2])
MODELS: dict[str, ModelSpec] = {
    "llama": LLAMA,
    "few key-value heads, biases": replace(LLAMA, num_kv_heads=1, attention_bias=True, output_bias=True, mlp_bias=True),
    "tied, norms on both sides and of heads": replace(LLAMA, tied=True, norm_order="both", qk_norm="head"),
    "norms of all heads": replace(LLAMA, norm_order="post", qk_norm="full"),
}
GRIDS = ("tp=4,tensor=2d", "tp=8,tensor=2.5d", "tp=8,tensor=3d")
WAYS: tuple[Recompute, ...] = ("none", "layer", "selective")
LENGTHS = (24, 15, 24, 24, 12)


class Taken(NamedTuple):
    """By one rank: what a microbatch sends, and sums of gradients that several have; bytes that the forward pass keeps,
    and the most that there are in both passes."""

    sent: int
    summed: int
    kept: int
    peak: int


def step(spec: ModelSpec, plan: Plan, dtype: torch.dtype, rank: int, group: Group) -> Taken:
    """Of the second of two passes: receive buffers are there."""
    mesh = grid_mesh_of(spec, plan, rank, group)
    assert isinstance(mesh, GridMesh)
    model = build(spec, mesh, dtype).requires_grad_()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.register_post_accumulate_grad_hook(let_go)  # as it goes to a bucket
    ids_T = torch.arange(sum(LENGTHS)) % 101
    places_T = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = grid_tokens(Tokens(ids_T, ids_T.clone(), places_T, list(LENGTHS)), mesh.grid)
    make, losses = recompute(plan.recompute, [model], TrainAttend), NextTokenLoss(mesh)

    def forward() -> torch.Tensor:
        attend = make(model.attention_specs(), tokens)
        return losses(model, model(tokens.ids_T, tokens.positions_T, attend, tokens.lengths_T), tokens).loss

    forward().backward()
    group.barrier()
    before = moved(group)
    with Live() as live:
        loss = forward()
        gc.collect()  # what is only in a circle is kept by nothing
        kept = live.now
        loss.backward()
        peak = live.peak
    sent = moved(group) - before
    holders = ReplicatedParameters(list(model.parameters()), group)
    before = moved(group)
    holders.sum_partial([torch.zeros_like(parameter) for parameter in model.parameters()])
    return Taken(sent, moved(group) - before, kept, peak)


def let_go(parameter: torch.Tensor) -> None:
    parameter.grad = None


def moved(group: Group) -> int:
    return sum(link.bytes_moved for link in group.send.values())


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """The collector has only to look at what the test makes."""
    gc.freeze()
    yield
    gc.unfreeze()


CASES = [*product(GRIDS, MODELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "case"), soak_but(CASES[::5], CASES))
def test_a_step_sends_and_holds_what_is_planned(text: str, case: str) -> None:
    spec, how = MODELS[case], WAYS[(GRIDS.index(text) + [*MODELS].index(case)) % 3]
    dtype = torch.float32 if how != "selective" else torch.bfloat16
    plan = msgspec.structs.replace(Plan.parse(text, spec.num_layers), recompute=how)
    facts = TrainingFacts(sum(LENGTHS), 1, dtype=str(dtype).removeprefix("torch."), documents=LENGTHS)
    groups = local_groups(plan.world_size)
    taken = in_threads([partial(step, spec, plan, dtype, rank, group) for rank, group in enumerate(groups)])
    works, part = rank_works(spec, plan, facts), hidden_part(spec, plan.grid)
    for got, work, sent, held in zip(
        taken, works, step_traffic(spec, plan, facts), training_bytes(spec, plan, facts), strict=True
    ):
        assert got.sent == sent.tp
        assert got.summed * facts.full_precision_bytes == sent.replica * facts.item_bytes
        kept = run_bytes(part, work.runs[0], work.cut, work.batch, how) + logits_bytes(part, work.cut, work.batch)
        assert got.kept == pytest.approx(kept, rel=0.02)
        assert got.peak == pytest.approx(held.activations + held.logits + held.working, rel=0.15)
