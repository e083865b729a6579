"""Prints a simulated ring of serving stages: batches in flight, seconds of a decode step, and where they go."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from typing import Any

from tllm.cli.arguments.survey_settings import serving_facts
from tllm.cli.display.serving_plans import drafting, given_plan, given_serving, pace, whose
from tllm.cli.display.tables import brief, indented_json, table
from tllm.cli.display.timeline import as_text, save_svg
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.message_time import TimeBreakdown
from tllm.planner.search.serving_search import ServingChoice, best_serving
from tllm.planner.simulate.explain import StageTimeline, TimelineBar, serving_bottleneck, stage_names, turn_breakdowns
from tllm.planner.simulate.ring import RingStage, RingTimeline, play_ring
from tllm.spec.model_spec import ModelSpec

SHOWN = 3
"""Rounds of the ring that are drawn."""


def show_ring(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> None:
    """Simulate the plan that is given, or the best one, and print the result."""
    facts = serving_facts(args, spec, args.dtype or spec.dtype)
    facts = replace(facts, weight_bits=args.weight_bits, message_bits=args.message_bits)
    result = (
        given_serving(given_plan(args.plan, spec, cluster), spec, cluster, facts)
        if args.plan
        else best_serving(spec, cluster, facts)
    )
    choice = result.choices[0]
    names = stage_names(choice.plan, cluster, choice.devices)
    turn = choice.predicted.turn
    stages = [RingStage(batch.seconds, hop.sending, hop.latency) for batch, hop in turn.stages]
    turns = math.ceil(facts.reply / choice.predicted.load.tokens_per_step)
    ring = play_ring(stages, turn.batches, turns)
    lines = _lines(play_ring(stages, min(turn.batches, SHOWN * len(stages)), min(turns, SHOWN)), names)
    if args.json:
        print(indented_json(_as_json(choice, ring)))
    else:
        print("\n".join([*_as_text(choice, ring, names), "", as_text(lines)]))
    if args.svg is not None:
        save_svg(args.svg, lines, f"{brief(choice.plan)}: {counted(min(turns, SHOWN), 'turn')} of the ring")


def _lines(ring: RingTimeline, names: list[str]) -> list[StageTimeline]:
    return [
        StageTimeline(
            name,
            tuple(
                TimelineBar(span.start, span.stop, f"batch {span.batch}, token {span.round}", "forward")
                for span in spans
            ),
        )
        for name, spans in zip(names, ring.spans, strict=True)
    ]


def _as_text(choice: ServingChoice, ring: RingTimeline, names: list[str]) -> list[str]:
    predicted, facts = choice.predicted, choice.predicted.load.facts
    asked = f"{counted(facts.prompt, 'token')} in, {facts.reply} out, {facts.concurrency} at once, {facts.dtype}"
    rows = [["stage", "nodes", *(field for field in TimeBreakdown._fields), "waiting", "sum"]]
    for number, account in enumerate(turn_breakdowns(predicted, names)):
        shown = [*account.parts, account.waiting]
        rows.append(
            [str(number), account.name, *(f"{1e3 * seconds:.3f}" for seconds in shown), f"{1e3 * sum(shown):.3f}"]
        )
    return [
        f"plan {brief(choice.plan)}; {asked}",
        "",
        pace(predicted),
        f"the ring as played: {counted(predicted.turn.batches, 'batch', 'batches')} in flight, {ring.total:.4g} s for "
        f"{counted(facts.reply, 'token')} each, bubble {100 * ring.bubble:.1f} %",
        *drafting(predicted.load),
        f"the time goes to {serving_bottleneck(predicted, names)}",
        f"most memory: {amount(max(rank.total for rank in predicted.memory))}",
        "",
        f"where {whose(predicted.load)} time goes, ms:",
        table(rows),
    ]


def _as_json(choice: ServingChoice, ring: RingTimeline) -> dict[str, Any]:
    predicted, between = choice.predicted, choice.predicted.between_tokens
    return {
        "goal": "serve",
        "plan": str(choice.plan),
        "milliseconds_per_token": None if between is None else 1e3 * between,
        "first_token": predicted.first_token,
        "tokens_per_second": predicted.tokens_per_second,
        "batches_in_flight": predicted.turn.batches,
        "drafted": predicted.load.draft_tokens,
        "tokens_per_turn": predicted.load.tokens_per_step,
        "ring": {"seconds": ring.total, "busy": ring.busy, "sending": ring.sending, "bubble": ring.bubble},
        "memory": [asdict(rank) | {"total": rank.total} for rank in predicted.memory],
    }
