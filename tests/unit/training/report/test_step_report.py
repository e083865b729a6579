"""The share of the peak that a step is said to have reached."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import solo
from tllm.devices.choose import CPU
from tllm.planner.cost.flops import attention_flops, layer_flops, training_flops
from tllm.spec.cut import cut_stage
from tllm.spec.plan import Plan
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.job.lora_job import LoraJob
from tllm.training.report.step_report import RankCounters, StepReport
from tllm.training.step.pipeline_step import StepResult

SPEC = spec_of(2)


def report_of(rank: int = 0, lora: LoraJob | None = None, plan: str = "dp=2,pp=2") -> StepReport:
    """A rank's, whose peak is a billion flop/s."""
    world = SimpleNamespace(rank=rank, size=1, all_gather=solo().all_gather)
    groups = SimpleNamespace(world=world, tells_losses=True, bytes_sent=0)
    parts = {"job": SimpleNamespace(lora=lora, distill=None), "plan": Plan.parse(plan, 2), "device": CPU}
    config: Any = SimpleNamespace(groups=groups, rank=rank, spec=SPEC, shares_prompts=False, **parts)
    return StepReport(config, 1e9)


def test_no_share_is_told_once_a_step_has_reached_more_than_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of()
    assert report._mfu(0.5e9, report.peak) == 0.5
    assert report._mfu(1.127e9, report.peak) is None
    assert report._mfu(0.5e9, report.peak) is None, "the peak is higher than was measured"
    assert report._mfu(1.5e9, report.peak) is None
    (told,) = caplog.messages
    assert told.startswith(
        "a step reached 1.13 Gflop/s, and the peak of all ranks was measured as 1: other programs ran"
    )


def test_only_rank_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    other = report_of(rank=1)
    assert other._mfu(1.5e9, other.peak) is None
    assert not caplog.messages


@pytest.mark.parametrize(("rank", "share"), [(0, 1), (1, 0), (2, 1), (3, 0)])
def test_the_first_rank_of_each_replica_tells_what_all_of_it_have_computed(rank: int, share: int) -> None:
    """And not the rows of the batch, of which a prompt may be computed once for several."""
    batch = ReplicaBatch(lengths=(50, 60), predicted=7, denominator=2.0, global_microbatches=1)
    ids, labels = torch.arange(9), torch.tensor([IGNORED] * 5 + [1, 2, 3, 4])
    tokens = Tokens(ids, labels, ids, [5, 4], prefixes=(None, 0))
    counters = RankCounters(batch, [tokens, tokens], StepResult(3.0, 7), 1.0, 0.1, time.monotonic() - 0.5)
    record, _ = report_of(rank).record(1, counters, stopped=False)
    assert record.mfu is not None and record.tokens == 110
    computed = 2 * training_flops(SPEC, [5, 4], 4, before=(0, 5))
    assert record.mfu * record.seconds * 1e9 == pytest.approx(computed * share)


@pytest.mark.parametrize(("keys", "plan", "below"), [((1,), "dp=2", 1), ((1,), "pp=2", 1), ((0,), "dp=2", 0)])
def test_layers_below_the_lowest_adapted_one_count_forward_alone(keys: tuple[int, ...], plan: str, below: int) -> None:
    report = report_of(lora=LoraJob(r=2, layers_to_transform=keys), plan=plan)
    (whole,) = cut_stage(SPEC, (1,))
    layer = layer_flops(SPEC, SPEC.layers[0], whole, [9])
    back = layer + attention_flops(SPEC, SPEC.layers[0], whole, [9])
    tokens = Tokens(torch.arange(9), torch.arange(9), torch.arange(9), [9])
    every = training_flops(SPEC, [9], tokens.predicted, is_frozen=True)
    assert report._flops([tokens]) == every - below * back
