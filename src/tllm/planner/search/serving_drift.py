"""`ServingDriftDetector`: how much slower ranks compute and messages travel than when a server began. `serving_gain`:
what another plan would gain by that.

No two batches are alike, so the seconds that a rank takes are compared with those predicted for the same rows and keys;
only how this ratio changes counts. What messages take is what is left of a decode step when one batch has the ring for
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts, ServingLoad
from tllm.planner.cost.tensor_parallel.grid_team import stage_teams
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.search.drift import DriftDetector, Slowdown, slowed_survey
from tllm.planner.search.serving_search import ServingChoice
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.model_spec import ModelSpec

LEAST = 8
"""Batches of every rank that are needed before speeds are compared."""


class DecodeTotals(NamedTuple):
    """Sums of one rank so far over the batches in which each sequence got its next token."""

    batches: float
    """How many there were."""
    sequences: float
    rows: float
    keys: float
    """Keys that all their sequences attended to."""
    seconds: float
    """Seconds that the rank computed them."""


class LoneStepTotals(NamedTuple):
    """Decode steps so far in which one batch had the ring for itself."""

    turns: float
    """How many there were."""
    seconds: float
    """Seconds of all of them together."""


def decode_totals(stats: Mapping[str, float]) -> DecodeTotals:
    """The totals in a rank's heartbeat."""
    return DecodeTotals(*(stats.get(f"reply_{name}", 0.0) for name in DecodeTotals._fields))


def lone_step_totals(stats: Mapping[str, float]) -> LoneStepTotals:
    """The totals in the heartbeat of rank 0."""
    return LoneStepTotals(stats.get("turns", 0.0), stats.get("turn_seconds", 0.0))


class ServingDriftDetector:
    """Follows one plan while the cluster stays the same (one epoch)."""

    def __init__(self, spec: ModelSpec, choice: ServingChoice, cluster: Cluster, facts: ServingFacts) -> None:
        plan = choice.plan
        self._plan, self._decode = plan, ServingLoad(plan.pp, facts).decode
        self._teams = stage_teams(spec, plan, cluster, choice.devices, facts)
        self._ranks, self._links = DriftDetector(plan.world_size), DriftDetector(1)
        self._expected = [team.batch_time(plan.runs[i], self._decode).seconds for i, team in enumerate(self._teams)]
        self._last: tuple[list[DecodeTotals], LoneStepTotals] | None = None

    def record_totals(self, replies: Sequence[DecodeTotals], turns: LoneStepTotals) -> None:
        """Record what every rank has done so far, in the order of ranks.

        Where that is too little since the last call, it is left to the next one.
        """
        if self._last is None:
            self._last = (list(replies), turns)
            return
        before, turns_before = self._last
        done = [DecodeTotals(*_less(now, then)) for now, then in zip(replies, before, strict=True)]
        if min(totals.batches for totals in done) < LEAST:
            return
        self._last = (list(replies), turns)
        taken = [totals.seconds / totals.batches for totals in done]
        alike = [
            seconds * self._scale(rank, totals) for rank, (seconds, totals) in enumerate(zip(taken, done, strict=True))
        ]
        self._ranks.record_step(max(alike), alike)
        alone = LoneStepTotals(*_less(turns, turns_before))
        if alone.turns >= LEAST:
            stages = [max(taken[rank] for rank in self._plan.ranks(i)) for i in range(self._plan.pp)]
            waited = max(0.0, alone.seconds / alone.turns - sum(stages))
            self._links.record_step(sum(self._expected) + waited, [sum(self._expected)])

    def new_slowdown(self) -> Slowdown | None:
        """The slowdown now, if it differs from the one last reported; it counts as reported from here on."""
        ranks, links = self._ranks.new_slowdown(), self._links.new_slowdown()
        if ranks is None and links is None:
            return None
        return Slowdown(self._ranks.reported.rank_factors, self._links.reported.link_factor)

    def _scale(self, rank: int, done: DecodeTotals) -> float:
        """The factor that turns a measured batch's seconds into those of the batch that was planned for."""
        stage, _ = self._plan.place(rank)
        rows, sequences = done.rows / done.batches, done.sequences / done.batches
        batch = ExpectedBatch(rows, sequences, done.keys / done.sequences, rows, self._decode.after_idle)
        return self._expected[stage] / self._teams[stage].batch_time(self._plan.runs[stage], batch).seconds


def serving_gain(
    spec: ModelSpec,
    choice: ServingChoice,
    survey: Survey,
    drift: Slowdown,
    facts: ServingFacts,
    best: Callable[[Cluster], ServingChoice],
) -> tuple[float, ServingChoice]:
    """The share by which the best plan for machines as they are now is faster than this one (0.1: 10 %), and that
    plan."""
    cluster = cluster_of(slowed_survey(survey, choice.devices, drift), spec)
    now, other = predict_serving(spec, choice.plan, cluster, choice.devices, facts), best(cluster)
    return now.seconds / other.predicted.seconds - 1, other


def _less(now: Sequence[float], then: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(now, then, strict=True)]
