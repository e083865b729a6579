"""What roles beside the policy took of a run's steps, and the plan as it is predicted for completions so long."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from tllm.planner.measured.outcome import WARM
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.training.report.metrics import StepRecord

LENGTH = "completions/mean_length"


def as_long_as_measured(placed: PlacedPlan, records: Sequence[StepRecord]) -> PlacedPlan:
    """The plan for prompts and completions of the mean length that the steps had, where they sampled any.

    What was predicted before the run is for the longest that the job allows.
    """
    sampling, shared = placed.facts.sampling, placed.facts.shared_prompts
    counted = [one for one in _counted(records) if LENGTH in (one.metrics or {})]
    is_sampled = shared is not None or (sampling is not None and sampling.share > 0)  # perhaps by servers elsewhere
    if not is_sampled or not counted:
        return placed
    mean = statistics.fmean((one.metrics or {})[LENGTH] for one in counted)
    kept = statistics.fmean((one.metrics or {}).get("rejection/kept_ratio", 1.0) for one in counted)
    rows = max(1, round(kept * placed.facts.global_batch_size))
    whole = statistics.fmean(one.tokens for one in counted) / rows
    reward = placed.facts.reward
    if reward is not None:
        row = max(1, min(reward.row, round(whole)))
        reward = replace(reward, tokens=reward.tokens // reward.row * row, row=row)
    prompt, completion = max(1, round(whole - mean)), max(1, round(mean))
    sampling = sampling and replace(sampling, prompt=prompt, completion=completion)
    shared = shared and shared._replace(prompt=prompt, completion=completion)
    seq_len = max(1, min(placed.facts.seq_len, round(whole)))
    targets = None if placed.facts.target_tokens is None else completion
    sized = replace(placed.facts, seq_len=seq_len, global_batch_size=rows, target_tokens=targets)
    return replace(placed, facts=replace(sized, sampling=sampling, shared_prompts=shared, reward=reward))


def without_roles(record: StepRecord, roles: Collection[str]) -> StepRecord:
    """The step without what these roles took of it, as if nobody had waited for them."""
    taken = sum(seconds for role, seconds in (record.role_seconds or {}).items() if role in roles)
    if not taken or taken >= record.seconds:
        return record
    longer = record.seconds / (record.seconds - taken)
    return msgspec.structs.replace(
        record,
        seconds=record.seconds - taken,
        tokens_per_second=record.tokens_per_second * longer,
        mfu=None if record.mfu is None else share_of_peak(record.mfu * longer),
        bubble=None if record.bubble is None else record.bubble * longer,
        role_seconds={role: seconds for role, seconds in (record.role_seconds or {}).items() if role not in roles},
    )


def share_of_peak(mfu: float) -> float | None:
    """An MFU; None where it would be more than all: the peak was measured while other programs ran, and is higher."""
    return mfu if mfu <= 1 else None


def mean_seconds(records: Sequence[StepRecord]) -> float:
    """Of a step, on an average: not all steps sample."""
    return statistics.fmean(one.seconds for one in _counted(records))


def mean_evaluation(records: Sequence[StepRecord]) -> float | None:
    """Seconds of an evaluation, on an average; None where there was none."""
    found = [one.eval_seconds for one in records if one.eval_seconds is not None]
    return statistics.fmean(found) if found else None


def measured_roles(records: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of a step by role, on an average, the policy's among them; nothing where it is alone."""
    counted = _counted(records)
    names = {name for one in counted for name in one.role_seconds or {}}
    found = {name: statistics.fmean((one.role_seconds or {}).get(name, 0.0) for one in counted) for name in names}
    return found | {"policy": mean_seconds(records) - sum(found.values())} if found else {}


def predicted_roles(predicted: StepPrediction, teaching: float = 0.0) -> dict[str, float]:
    """The same as predicted, with what teachers elsewhere take."""
    apart = {"teacher": teaching} if teaching else {}
    return dict(predicted.roles) | apart | {"policy": predicted.policy} if predicted.roles or apart else {}


def _counted(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Without those at the beginning."""
    return records[WARM:] or records
