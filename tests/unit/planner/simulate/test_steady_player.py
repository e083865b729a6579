"""Steps of which only the first microbatches are played, against all of them played."""

from __future__ import annotations

import random

import pytest

from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork
from tllm.planner.simulate.steady_player import SteadyPlayer, played_counts
from tllm.spec.pipeline_schedule import build

SCHEDULES = (("1f1b", 1, 1), ("1f1b", 2, 1), ("zero_bubble", 1, 1), ("zero_bubble", 2, 1), ("interleaved", 1, 2))


@pytest.mark.parametrize(("name", "depth", "chunks"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 5])
def test_the_rest_goes_on_as_it_began(name: str, depth: int, chunks: int, stages: int) -> None:
    """Stages as unlike as drawn, over links that take less than an op. Where two stages are nearly as slow, a pipeline
    is not steady yet when it is taken to be."""
    draw = random.Random(stages)
    many = 80 * stages + (0 if chunks > 1 else 3)
    counts = played_counts(stages, many)
    assert counts is not None and counts[0] % stages == many % stages
    shorter, longer, whole = (SchedulePlayer(build(name, stages, count, depth, chunks)) for count in (*counts, many))
    for _ in range(10):
        works = [[StageWork(*(draw.uniform(0.5, 2) for _ in range(3))) for _ in range(chunks)] for _ in range(stages)]
        links = {pair: LinkSpeed(draw.uniform(0, 0.1), draw.uniform(10, 100)) for pair in whole.pairs}
        found = SteadyPlayer(shorter, longer, many).play(works, links, 1)
        exact = whole.play(works, links, 1)
        assert found.total == pytest.approx(exact.total, rel=5e-3)
        assert found.busy == pytest.approx(exact.busy, rel=1e-9)
        assert found.link_busy == pytest.approx(exact.link_busy, rel=1e-9)
        assert found.bubble == pytest.approx(exact.bubble, abs=5e-3)


def test_few_microbatches_are_all_played() -> None:
    assert played_counts(4, 128) is None and played_counts(4, 132) == (32, 64) and played_counts(1, 33) == (8, 16)
