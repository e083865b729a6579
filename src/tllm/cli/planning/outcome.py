"""At the end of a run: what was predicted and what was measured, and the survey that is corrected by both."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tllm.cli.arguments.survey_settings import within
from tllm.cli.display.tables import table
from tllm.cli.planning.answering_chooser import AnsweringChooser, answer_seconds, answering_outcome, as_answered
from tllm.cli.planning.plan_chooser import PlanChooser, ServingChooser, TrainingChooser
from tllm.cli.planning.role_outcome import (
    as_long_as_measured,
    mean_evaluation,
    mean_seconds,
    measured_roles,
    share_of_peak,
)
from tllm.core.errors import counted
from tllm.core.memory import amount
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
from tllm.training.report.metrics import StepRecord

SECONDS = (
    *("seconds", "first_token", "per_token"),
    *("sampling", "rewards", "reference", "teacher", "policy", "evaluation"),
)
SHARES = ("mfu", "bubble")
SIZES = ("memory", "bytes_sent")
ANSWERED = {"first_token": "answer", "tokens_per_second": "answers per second"}
"""What is said of answers that are one token, or none."""


def training_outcome(chooser: TrainingChooser, records: Sequence[StepRecord]) -> TrainingOutcome | None:
    """The outcome of the steps since this start; None where there was none, or the plan was not predicted.

    Both MFUs refer to the peak flop/s that the run measured on its ranks.
    """
    if chooser.chosen is None or not records:
        return None
    placed = as_long_as_measured(chooser.chosen.placed, records)
    predicted = chooser.chosen.predicted if placed is chooser.chosen.placed else placed.predict()
    step_seconds = chooser.step_seconds(placed, predicted)
    seconds = mean_seconds(records) if predicted.roles else median([record.seconds for record in records])
    memory, bytes_sent = (median([getattr(record, name) for record in records]) for name in SIZES)
    mfu = median([record.mfu for record in records])
    assert seconds is not None, "every record has its seconds"
    return TrainingOutcome(
        plan=str(placed.plan),
        microbatch_size=placed.facts.microbatch_size,
        steps=len(records[WARM:] or records),
        predicted=StepNumbers(
            seconds=step_seconds,
            tokens_per_second=predicted.tokens_per_second * predicted.seconds / step_seconds,
            mfu=None if mfu is None else share_of_peak(mfu * seconds / step_seconds),
            bubble=predicted.bubble if placed.plan.pp > 1 else None,
            memory=max(rank.total for rank in chooser.chosen.memory),
            bytes_sent=placed.bytes_of_all(predicted),
            evaluation=chooser.evaluation_seconds(placed),
            **chooser.seconds_by_role(placed, predicted),
        ),
        measured=StepNumbers(
            seconds=seconds,
            tokens_per_second=statistics.median(record.tokens for record in records) / seconds,
            mfu=mfu,
            bubble=median([record.bubble for record in records]),
            memory=None if memory is None else round(memory),
            bytes_sent=None if bytes_sent is None else round(bytes_sent),
            evaluation=mean_evaluation(records),
            **measured_roles(records),
        ),
    )


def serving_outcome(chooser: ServingChooser, timed: TimedEngine, memory: int | None) -> ServingOutcome | None:
    """The outcome of the requests that were served, with what is predicted for requests like their mean."""
    ended = list(timed.times if chooser.spec.writes else timed.pooled)
    counted = [request for request in ended[WARM:] or ended if request.tokens != 1]
    if chooser.chosen is None or not counted:
        return None
    mean = statistics.fmean
    # A prompt that was found in part begins sooner than one of its length that is computed, which is what is predicted.
    computed = [request for request in counted if not request.cached] or counted
    busy = _covered([(request.came, request.last) for request in counted])
    mean_facts = replace(
        chooser.facts,
        prompt=round(mean(request.prompt for request in counted)),
        reply=round(mean(max(1, request.tokens) for request in counted)),
        concurrency=max(1, round(sum(request.last - request.came for request in counted) / busy)),
        acceptance=_acceptance(timed, chooser.facts),
    )
    facts = within(mean_facts, chooser.options.max_model_len)
    predicted = _serving_predictor(chooser, facts)(_survey(chooser))
    return ServingOutcome(
        plan=str(chooser.chosen.plan),
        requests=len(counted),
        prompt=facts.prompt,
        reply=facts.reply,
        concurrency=facts.concurrency,
        acceptance=facts.acceptance if facts.num_speculative_tokens else None,
        predicted=predicted,
        measured=ReplyNumbers(
            first_token=mean(request.first - request.came for request in computed),
            per_token=mean((request.last - request.first) / (request.tokens - 1) for request in counted)
            if chooser.spec.writes
            else None,
            tokens_per_second=sum(max(1, request.tokens) for request in counted) / busy,
            memory=memory,
        ),
    )


def conclude_training(chooser: TrainingChooser, records: Sequence[StepRecord], folder: Path) -> None:
    """Print and save the outcome, and correct the survey by it."""
    outcome = training_outcome(chooser, records)
    if outcome is None or chooser.chosen is None:
        return
    placed = as_long_as_measured(chooser.chosen.placed, records)

    def seconds(survey: Survey) -> float:
        moved = replace(placed, cluster=cluster_of(survey, chooser.spec))
        return chooser.step_seconds(moved, PlacedPlan.predict(moved))

    _conclude(outcome, folder, outcome.measured.seconds, seconds, chooser)


def conclude_serving(chooser: ServingChooser, timed: TimedEngine, memory: int | None) -> None:
    """The same for a server; without a folder nothing is saved."""
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
    predict = _serving_predictor(chooser, facts)
    folder = chooser.path.parent if chooser.path else None
    _conclude(outcome, folder, _pace(outcome.measured), lambda survey: _pace(predict(survey)), chooser)


def _pace(numbers: ReplyNumbers) -> float:
    """Seconds by which a survey is corrected: of a token, or of a whole answer."""
    return numbers.first_token if numbers.per_token is None else numbers.per_token


def conclude_answering(chooser: AnsweringChooser, plan: str, stats: Mapping[str, float], memory: int | None) -> None:
    """The same for what answers runs, by what the first rank of a plan tells."""
    outcome = answering_outcome(chooser, plan, stats, memory)
    if outcome is None:
        return
    load, folder = as_answered(chooser.load, stats), chooser.path.parent if chooser.path else None
    chooser.says(f"{counted(outcome.answers, 'answer')}, each {outcome.about}:")
    _conclude(outcome, folder, outcome.measured.seconds, lambda survey: answer_seconds(chooser, load, survey), chooser)


def _acceptance(timed: TimedEngine, facts: ServingFacts) -> float:
    """The acceptance rate of draft tokens; the expected one, where there were none."""
    stats = timed.stats()
    right, wrong = (stats.get(f"draft_{name}", 0.0) for name in ("right", "wrong"))
    return right / (right + wrong) if right + wrong else facts.acceptance


def as_text(outcome: Outcome) -> str:
    """A table of what was predicted and what was measured."""
    rows = [["", "predicted", "measured", "measured is"]]
    for name in outcome.predicted.__struct_fields__:
        predicted, measured = getattr(outcome.predicted, name), getattr(outcome.measured, name)
        if predicted is None or measured is None:
            continue
        error = f"{100 * (measured / predicted - 1):+.1f} %" if predicted else ""
        shown = ANSWERED.get(name) if isinstance(outcome, ServingOutcome) and outcome.reply == 1 else None
        rows.append([shown or name.replace("_", " "), _shown(name, predicted), _shown(name, measured), error])
    return table(rows)


def _conclude(
    outcome: Outcome,
    folder: Path | None,
    measured: float,
    predict: Callable[[Survey], float],
    chooser: PlanChooser,
) -> None:
    chooser.says(as_text(outcome))
    if folder is None or chooser.path is None:
        return
    save_outcome(outcome, folder / FILE)
    survey, factor = refitted(_survey(chooser), predict, measured)
    survey.save(chooser.path)
    chooser.says(f"{folder / FILE} keeps both; the survey is corrected: computing takes {factor:.3g} times as long")


def _survey(chooser: PlanChooser) -> Survey:
    assert chooser.survey is not None, "a plan was chosen by it"
    return chooser.survey


def _serving_predictor(chooser: ServingChooser, facts: ServingFacts) -> Callable[[Survey], ReplyNumbers]:
    """A function that predicts these requests from a survey; memory is counted with the engine's whole cache."""
    assert chooser.chosen is not None
    plan, devices = chooser.chosen.plan, chooser.chosen.devices
    ranks = rank_bytes(chooser.spec, plan, facts.dtype, facts.kv_cache_dtype)
    caches = [rank.kv_per_token * chooser.cache_tokens for rank in ranks]

    def predict(survey: Survey) -> ReplyNumbers:
        prediction = predict_serving(chooser.spec, plan, cluster_of(survey, chooser.spec), devices, facts)
        totals = [replace(rank, cache=cache).total for rank, cache in zip(prediction.memory, caches, strict=True)]
        return ReplyNumbers(
            first_token=prediction.first_token,
            per_token=prediction.between_tokens,
            tokens_per_second=prediction.tokens_per_second,
            memory=round(max(totals)),
        )

    return predict


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans (start, stop) covers."""
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
