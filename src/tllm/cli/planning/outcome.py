"""What was predicted beside what was measured, at a run's end; and the survey that is corrected by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tllm.cli.arguments.survey_settings import within
from tllm.cli.display.tables import amount, table
from tllm.cli.planning.plan_chooser import ServingChooser, TrainingChooser
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.outcome import (
    FILE,
    WARM,
    Outcome,
    ReplyNumbers,
    ServingOutcome,
    StepNumbers,
    TrainingOutcome,
    median,
    refitted,
    save_outcome,
)
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.serving import predict_serving
from tllm.server.latency import TimedEngine
from tllm.train.report.metrics import StepRecord

SECONDS = ("seconds", "first_token", "per_token")
SHARES = ("mfu", "bubble")
SIZES = ("memory", "bytes_sent")


def training_outcome(chooser: TrainingChooser, records: Sequence[StepRecord]) -> TrainingOutcome | None:
    """Of the steps that this start has taken; None where it took none, or the plan was not chosen.

    What a step's flops are a share of is for both what the run measured: its ranks' matrix peaks.
    """
    if chooser.chosen is None or not records:
        return None
    placed, predicted = chooser.chosen.placed, chooser.chosen.predicted
    sent = sum(one.total for one in predicted.bytes_sent)
    seconds = median([record.seconds for record in records])
    memory, bytes_sent = (median([getattr(record, name) for record in records]) for name in SIZES)
    mfu = median([record.mfu for record in records])
    assert seconds is not None, "every record has its seconds"
    return TrainingOutcome(
        plan=str(placed.plan),
        microbatch_size=placed.facts.microbatch_size,
        steps=len(records[WARM:] or records),
        predicted=StepNumbers(
            seconds=predicted.seconds,
            tokens_per_second=predicted.tokens_per_second,
            mfu=None if mfu is None else mfu * seconds / predicted.seconds,
            bubble=predicted.bubble if placed.plan.pp > 1 else None,
            memory=max(one.total for one in chooser.chosen.memory),
            bytes_sent=sent * placed.plan.replicas // len(placed.replicas),
        ),
        measured=StepNumbers(
            seconds=seconds,
            tokens_per_second=statistics.median(record.tokens for record in records) / seconds,
            mfu=mfu,
            bubble=median([record.bubble for record in records]),
            memory=None if memory is None else round(memory),
            bytes_sent=None if bytes_sent is None else round(bytes_sent),
        ),
    )


def serving_outcome(chooser: ServingChooser, timed: TimedEngine, memory: int | None) -> ServingOutcome | None:
    """Of the requests that were served, beside what is predicted of requests like them on an average."""
    counted = [one for one in timed.times[WARM:] or timed.times if one.tokens > 1]
    if chooser.chosen is None or not counted:
        return None
    mean = statistics.fmean
    busy = _covered([(one.came, one.last) for one in counted])
    like_them = replace(
        chooser.facts,
        prompt=round(mean(one.prompt for one in counted)),
        reply=round(mean(one.tokens for one in counted)),
        concurrency=max(1, round(sum(one.last - one.came for one in counted) / busy)),
        acceptance=_acceptance(timed, chooser.facts),
    )
    facts = within(like_them, chooser.options.max_model_len)
    predicted = _served(chooser, facts)(_survey(chooser))
    return ServingOutcome(
        plan=str(chooser.chosen.plan),
        requests=len(counted),
        prompt=facts.prompt,
        reply=facts.reply,
        concurrency=facts.concurrency,
        acceptance=facts.acceptance if facts.num_speculative_tokens else None,
        predicted=predicted,
        measured=ReplyNumbers(
            first_token=mean(one.first - one.came for one in counted),
            per_token=mean((one.last - one.first) / (one.tokens - 1) for one in counted),
            tokens_per_second=sum(one.tokens for one in counted) / busy,
            memory=memory,
        ),
    )


def conclude_training(chooser: TrainingChooser, records: Sequence[StepRecord], folder: Path) -> None:
    """Print both, keep both, and correct the survey."""
    outcome = training_outcome(chooser, records)
    if outcome is None or chooser.chosen is None:
        return
    placed = chooser.chosen.placed

    def seconds(survey: Survey) -> float:
        moved = replace(placed, cluster=cluster_of(survey, chooser.spec))
        return PlacedPlan.predict(moved).seconds

    _conclude(outcome, folder, outcome.measured.seconds, seconds, chooser)


def conclude_serving(chooser: ServingChooser, timed: TimedEngine, memory: int | None) -> None:
    """The same of a server; without a folder nothing is kept."""
    outcome = serving_outcome(chooser, timed, memory)
    if outcome is None:
        return
    if outcome.acceptance is not None:
        chooser.says(f"{100 * outcome.acceptance:.3g} % of drafted tokens were right")
    facts = replace(
        chooser.facts,
        prompt=outcome.prompt,
        reply=outcome.reply,
        concurrency=outcome.concurrency,
        acceptance=outcome.acceptance or 0.0,
    )
    predict = _served(chooser, facts)
    folder = chooser.path.parent if chooser.path else None
    _conclude(outcome, folder, outcome.measured.per_token, lambda survey: predict(survey).per_token, chooser)


def _acceptance(timed: TimedEngine, facts: ServingFacts) -> float:
    """Of what could be drafted, the part that was right; what was expected, where nothing was seen."""
    stats = timed.stats()
    right, wrong = (stats.get(f"draft_{name}", 0.0) for name in ("right", "wrong"))
    return right / (right + wrong) if right + wrong else facts.acceptance


def as_text(outcome: Outcome) -> str:
    """Both, number by number."""
    rows = [["", "predicted", "measured", "measured is"]]
    for name in outcome.predicted.__struct_fields__:
        foretold, came = getattr(outcome.predicted, name), getattr(outcome.measured, name)
        if foretold is None or came is None:
            continue
        more = f"{100 * (came / foretold - 1):+.1f} %" if foretold else ""
        rows.append([name.replace("_", " "), _shown(name, foretold), _shown(name, came), more])
    return table(rows)


def _conclude(
    outcome: Outcome,
    folder: Path | None,
    measured: float,
    predict: Callable[[Survey], float],
    chooser: TrainingChooser | ServingChooser,
) -> None:
    chooser.says(as_text(outcome))
    if folder is None or chooser.path is None:
        return
    save_outcome(outcome, folder / FILE)
    survey, factor = refitted(_survey(chooser), predict, measured)
    survey.save(chooser.path)
    chooser.says(f"{folder / FILE} keeps both; the survey is corrected: computing takes {factor:.3g} times as long")


def _survey(chooser: TrainingChooser | ServingChooser) -> Survey:
    assert chooser.survey is not None, "a plan was chosen by it"
    return chooser.survey


def _served(chooser: ServingChooser, facts: ServingFacts) -> Callable[[Survey], ReplyNumbers]:
    """What is predicted of these requests by a survey; of memory with all the cache that the engine made."""
    assert chooser.chosen is not None
    plan, devices = chooser.chosen.plan, chooser.chosen.devices
    caches = [one.kv_per_token * chooser.cache_tokens for one in rank_bytes(chooser.spec, plan, facts.dtype)]

    def predict(survey: Survey) -> ReplyNumbers:
        found = predict_serving(chooser.spec, plan, cluster_of(survey, chooser.spec), devices, facts)
        held = [replace(one, cache=cache).total for one, cache in zip(found.memory, caches, strict=True)]
        return ReplyNumbers(
            first_token=found.first_token,
            per_token=found.per_token,
            tokens_per_second=found.tokens_per_second,
            memory=round(max(held)),
        )

    return predict


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans goes on."""
    total, until = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


def _shown(name: str, value: float) -> str:
    if name in SECONDS:
        return f"{1e3 * value:.4g} ms"
    if name in SHARES:
        return f"{100 * value:.1f} %"
    return amount(value) if name in SIZES else f"{value:,.4g}"
