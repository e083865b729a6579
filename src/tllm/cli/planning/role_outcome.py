"""What roles beside the policy took of a run's steps, and the plan as it is predicted for completions so long."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from tllm.planner.measured.outcome import WARM
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.training.report.metrics import StepRecord

LENGTH = "completions/mean_length"


def as_long_as_measured(placed: PlacedPlan, records: Sequence[StepRecord]) -> PlacedPlan:
    """The plan for prompts and completions of the mean length that the steps had, where they sampled any.

    What was predicted before the run is for the longest that the job allows.
    """
    sampling, counted = placed.facts.sampling, [one for one in _counted(records) if LENGTH in (one.metrics or {})]
    if sampling is None or not sampling.share or not counted:
        return placed
    completion = statistics.fmean((one.metrics or {})[LENGTH] for one in counted)
    kept = statistics.fmean((one.metrics or {}).get("rejection/kept_ratio", 1.0) for one in counted)
    rows = max(1, round(kept * placed.facts.global_batch_size))
    whole = statistics.fmean(one.tokens for one in counted) / rows
    found = replace(sampling, prompt=max(1, round(whole - completion)), completion=max(1, round(completion)))
    facts = replace(
        placed.facts, sampling=found, seq_len=max(1, min(placed.facts.seq_len, round(whole))), global_batch_size=rows
    )
    return replace(placed, facts=facts)


def mean_seconds(records: Sequence[StepRecord]) -> float:
    """Of a step, on an average: not all steps sample."""
    return statistics.fmean(one.seconds for one in _counted(records))


def measured_roles(records: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of a step by role, on an average, the policy's among them; nothing where it is alone."""
    counted = _counted(records)
    names = {name for one in counted for name in one.role_seconds or {}}
    found = {name: statistics.fmean((one.role_seconds or {}).get(name, 0.0) for one in counted) for name in names}
    return found | {"policy": mean_seconds(records) - sum(found.values())} if found else {}


def predicted_roles(predicted: StepPrediction) -> dict[str, float]:
    """The same as predicted."""
    return dict(predicted.roles) | {"policy": predicted.policy} if predicted.roles else {}


def _counted(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Without those at the beginning."""
    return records[WARM:] or records
