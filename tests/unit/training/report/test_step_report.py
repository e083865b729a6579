"""The share of the peak that a step is said to have reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import solo
from tllm.devices.choose import CPU
from tllm.training.report.step_report import StepReport


def report_of(shares_prompts: bool = False, rank: int = 0) -> StepReport:
    """A rank's, whose peak is a billion flop/s."""
    world = SimpleNamespace(rank=rank, size=1, all_gather=solo().all_gather)
    groups = SimpleNamespace(world=world, tells_losses=True, bytes_sent=0)
    parts = {"job": SimpleNamespace(lora=None), "plan": SimpleNamespace(pp=1), "device": CPU}
    config: Any = SimpleNamespace(groups=groups, spec=spec_of(2), shares_prompts=shares_prompts, **parts)
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


def test_only_rank_0_warns_and_nobody_where_whole_rows_are_counted_of_shared_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = report_of(rank=1)
    assert other._mfu(1.5e9, other.peak) is None
    sharing = report_of(shares_prompts=True)
    assert sharing._mfu(4e9, sharing.peak) == 4 and sharing._mfu(0.5e9, sharing.peak) == 0.5
    assert not caplog.messages
