"""`SteadyPlayer`: plays a schedule of very many microbatches by playing only the first of them.

Once a pipeline is full, every further microbatch takes as long as those before it: the clocks of a schedule that
repeats itself grow linearly in the end (Baccelli et al. 1992, Synchronization and Linearity). So from steps of a and of
b microbatches, a < b, the step of n follows by a straight line: it takes what that of b takes, and (n - b) / (b - a)
times the difference of the two. Where stages are nearly equally slow this is off by some thousandths. So a search
compares plans by it, and plays the plan that it chooses whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork, StepTimeline

ROUNDS = 8
"""Microbatches for each stage until a pipeline is taken to be steady, and as many again to see what one takes."""


def played_counts(stages: int, microbatches: int) -> tuple[int, int] | None:
    """The two numbers of microbatches that are played in the place of so many; None where these are not many more.

    All three leave the same rest over the stages, as a round of an interleaved schedule has a microbatch for each.
    """
    first = ROUNDS * stages + microbatches % stages
    second = first + ROUNDS * stages
    return (first, second) if microbatches > 2 * second else None


class SteadyPlayer:
    """Plays as `SchedulePlayer` does, for `microbatches` of which `longer` has only the first."""

    def __init__(self, shorter: SchedulePlayer, longer: SchedulePlayer, microbatches: int) -> None:
        self.shorter, self.longer = shorter, longer
        first, second = shorter.schedule.microbatches, longer.schedule.microbatches
        self._times = (microbatches - second) / (second - first)

    def play(
        self,
        work: StageWork | Sequence[Sequence[StageWork]],
        links: LinkSpeed | Mapping[tuple[int, int], LinkSpeed] | None = None,
        hop_bytes: int = 0,
        one_port: Collection[int] = (),
    ) -> StepTimeline:
        """The step's seconds of the whole schedule; `spans` and `peak_live` are those of the part that is played."""
        one, other = (player.play(work, links, hop_bytes, one_port) for player in (self.shorter, self.longer))

        def grown(before: float, after: float) -> float:
            return after + self._times * (after - before)

        return replace(
            other,
            total=grown(one.total, other.total),
            busy=tuple(grown(before, after) for before, after in zip(one.busy, other.busy, strict=True)),
            link_busy={pair: grown(one.link_busy[pair], after) for pair, after in other.link_busy.items()},
        )
