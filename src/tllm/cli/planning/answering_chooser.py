"""The plan that `tllm teach` and `tllm rollout` take for several machines when none is given, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tllm.cli.arguments.survey_settings import serving_settings
from tllm.cli.planning.plan_chooser import PlanChooser
from tllm.cluster.settings import SurveySettings
from tllm.core.errors import PlanError, counted
from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.outcome import AnsweringOutcome, AnswerNumbers
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.roles.answering_plans import (
    AnsweringChoice,
    AnsweringLoad,
    GroupLoad,
    RowLoad,
    answering_choices,
)

if TYPE_CHECKING:
    from tllm.node.coordinator.workload import Workload
    from tllm.node.serve.answering_cluster import Answerers, AnsweringCluster

log = logging.getLogger("tllm.model")

LOGIT_ROWS = 32
"""Rows that a teacher's logits are measured for: more at once are not faster for each."""

LOOK_SECONDS = 1.0
"""From one look at what answers took to the next: heartbeats of the nodes say it."""

LEAST_TOLD = 8
"""Answers after which what they took is first told beside what was predicted; then after twice as many, and so on."""


class AnsweringChooser(PlanChooser):
    """Chooses the plan by which `nodes` hold the model of the `answerers`, for questions like `load`."""

    def __init__(
        self,
        answerers: Answerers,
        load: AnsweringLoad,
        options: ClusterOptions,
        nodes: int,
        leave_out: bool = True,
    ) -> None:
        super().__init__(answerers.model.spec, "serve", options.authority, nodes)
        self.answerers, self.load, self.options, self.leave_out = answerers, load, options, leave_out
        self.chosen: AnsweringChoice | None = None

    def settings(self) -> SurveySettings:
        return serving_settings(_measured_as(self.load), self.nodes)

    def __call__(self, survey: Survey) -> tuple[Workload, tuple[int, ...]]:
        best = self.decide(survey)
        return replace(self.answerers, plan=best.plan).workload(self.options), best.devices

    def decide(self, survey: Survey) -> AnsweringChoice:
        """Choose by a survey, save it, and print what was chosen and why."""
        self.keep(survey)
        cluster = cluster_of(survey, self.spec)
        choices = answering_choices(cluster, self.load)
        everyone = next((one for one in choices if len(one.devices) == len(cluster)), None)
        if not self.leave_out and everyone is None:
            raise PlanError(
                f"no plan was found that uses all {len(cluster)} nodes",
                "leave some out (--leave-out auto), or give --plan",
            )
        best = self.chosen = choices[0] if self.leave_out or everyone is None else everyone
        names = [cluster.name(device) for device in best.devices]
        lines = [
            f"plan {best.plan} on {' '.join(names)}, the best of {len(choices)} that have room",
            f"predicted: {best.seconds:.3g} s for {in_words(self.load)}, "
            f"{self.load.tokens / best.seconds:,.4g} tokens/s, {amount(best.held)} at most on a node",
            *_left_out(cluster, best, everyone),
        ]
        self.says("\n".join(lines))
        return best


def answering_outcome(
    chooser: AnsweringChooser, plan: str, stats: Mapping[str, float], memory: int | None
) -> AnsweringOutcome | None:
    """What was answered, by what the first rank of a plan tells (`TimedAnswerer`), with what is predicted for questions
    like their mean. None where nothing was, or by a plan that was not predicted."""
    chosen, count = chooser.chosen, round(stats.get("timed", 0.0))
    if chosen is None or plan != str(chosen.plan) or not count:
        return None
    load, seconds = as_answered(chooser.load, stats), stats["answer_seconds"] / count
    predicted = answer_seconds(chooser, load)
    return AnsweringOutcome(
        plan=plan,
        answers=count,
        about=in_words(load),
        predicted=AnswerNumbers(seconds=predicted, tokens_per_second=load.tokens / predicted, memory=chosen.held),
        measured=AnswerNumbers(seconds=seconds, tokens_per_second=load.tokens / seconds, memory=memory),
    )


def answer_seconds(chooser: AnsweringChooser, load: AnsweringLoad, survey: Survey | None = None) -> float:
    """Of one answer like this by the plan that was chosen, as it is predicted by the survey that it was chosen by, or
    by another."""
    chosen, known = chooser.chosen, survey or chooser.survey
    assert chosen is not None and known is not None, "a plan was chosen"
    return load.seconds(cluster_of(known, chooser.spec), chosen.plan, chosen.devices)


async def tell_answers(chooser: AnsweringChooser, cluster: AnsweringCluster) -> None:
    """Log what answers took beside what was predicted for them, for as long as it is let."""
    told = LEAST_TOLD
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        found = answering_outcome(chooser, *cluster.answered())
        if found is not None and found.answers >= told:
            told = 2 * found.answers
            measured, predicted = found.measured.seconds, found.predicted.seconds
            log.info(
                "%s took %.3g s each, predicted %.3g s (%+.0f %%), for %s",
                *(counted(found.answers, "answer"), measured, predicted, 100 * (measured / predicted - 1), found.about),
            )


def in_words(load: AnsweringLoad) -> str:
    """One question."""
    if isinstance(load, GroupLoad):
        asked = load.sampling
        of = f"{counted(asked.num_generations, 'completion')} of {counted(asked.completion, 'token')}"
        return f"{of} of a prompt of {asked.prompt}" + (
            f", for {counted(asked.groups, 'prompt')}" if asked.groups > 1 else ""
        )
    return f"a row of {counted(load.tokens, 'token')}"


def as_answered(load: AnsweringLoad, stats: Mapping[str, float]) -> AnsweringLoad:
    """The same question with the mean lengths of those that were answered."""

    def mean(of: str, each: str) -> int:
        return max(1, round(stats[of] / stats[each]))

    if isinstance(load, RowLoad):
        return RowLoad.of(load.spec, load.judge.dtype, mean("row_tokens", "timed"))
    assert isinstance(load, GroupLoad), "whoever answers judges rows or samples"
    sampling = replace(
        load.sampling,
        groups=mean("prompts", "timed"),
        num_generations=mean("completions", "prompts"),
        prompt=mean("prompt_tokens", "prompts"),
        completion=mean("completion_tokens", "completions"),
    )
    return GroupLoad.of(load.spec, load.facts.dtype, sampling)


def _measured_as(load: AnsweringLoad) -> ServingFacts:
    """What a server would be asked whose survey tells what these questions take."""
    if isinstance(load, GroupLoad):
        asked = load.sampling
        return ServingFacts(load.facts.dtype, asked.prompt, asked.completion, asked.at_once)
    assert isinstance(load, RowLoad), "whoever answers judges rows or samples"
    return ServingFacts(load.judge.dtype, load.tokens, 1, LOGIT_ROWS)


def _left_out(cluster: Cluster, best: AnsweringChoice, everyone: AnsweringChoice | None) -> list[str]:
    """Whom the plan leaves out, and what all together would take."""
    unused = [cluster.name(device) for device in range(len(cluster)) if device not in best.devices]
    if not unused:
        return []
    takes = f"would take {everyone.seconds:.3g} s" if everyone is not None else "have no plan that fits"
    return [f"left out: {', '.join(unused)}; all {len(cluster)} together {takes}"]
