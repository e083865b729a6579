"""What two ranks measure of a ring that they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.core.errors import FrameError
from tllm.engine.measure import ring_speed
from tllm.engine.measure.benchmark_layers import LayersAsModel
from tllm.engine.measure.ring_speed import MIN_STEPS, ring_step_overhead
from tllm.engine.ring_links import RingLinks
from tllm.engine.stage import PipelineStage
from tllm.spec.request import Output

SLOW = 0.05


def overheads(seconds: float, given: list[Output]) -> list[float]:
    def one(group: Group) -> float:
        time.sleep(0.05 * group.rank)
        ring = RingLinks(group.recv[1 - group.rank], group.send[1 - group.rank])
        return ring_step_overhead(spec_of(4), torch.float32, ring, group.rank, seconds * (1 + group.rank), given.extend)

    return run_ranks(local_groups(2, deadline=20.0), one)


def late(function: Callable[..., object]) -> Callable[..., object]:
    def called(*values: object) -> object:
        time.sleep(SLOW)
        return function(*values)

    return called


pytestmark = pytest.mark.usefixtures("own_clock", "computed")


def test_both_are_the_driver_once_and_end_together() -> None:
    given = list[Output]()
    assert all(turn > 0 for turn in overheads(0.1, given))
    assert len(given) > 2 * MIN_STEPS, "tokens are handed out"


def test_layers_do_not_count_and_all_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that take 50 ms longer on either rank make no turn longer; what is done before them does."""
    alone = max(overheads(0.1, []))

    monkeypatch.setattr(LayersAsModel, "__call__", late(LayersAsModel.__call__))
    assert max(overheads(0.1, [])) < alone + SLOW
    monkeypatch.setattr(PipelineStage, "send_round", late(PipelineStage.send_round))
    assert min(overheads(0.1, [])) > SLOW


def test_what_is_no_list_of_seconds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_speed, "_SECONDS", msgspec.json.Decoder(dict[str, float]))
    with pytest.raises(FrameError, match="no seconds came from the other rank"):
        overheads(0.1, [])
