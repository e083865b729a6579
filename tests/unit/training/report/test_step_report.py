"""The share of the peak that a step is said to have reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import solo
from tllm.training.report.step_report import StepReport


def test_no_share_is_told_once_a_step_has_reached_more_than_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    groups: Any = SimpleNamespace(world=solo(), tells_losses=True, bytes_sent=0)
    report = StepReport(groups, spec_of(2), False, peak=1e9)
    assert report._mfu(0.5e9, report.peak) == 0.5
    assert report._mfu(1.127e9, report.peak) is None
    assert report._mfu(0.5e9, report.peak) is None, "the peak is higher than was measured"
    assert report._mfu(1.5e9, report.peak) is None
    (told,) = caplog.messages
    assert told.startswith(
        "a step reached 1.13 Gflop/s, and the peak of all ranks was measured as 1: other programs ran"
    )
