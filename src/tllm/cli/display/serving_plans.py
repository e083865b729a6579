"""Prints the best serving plans for a cluster, as text or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tllm.cli.arguments.survey_settings import serving_facts, within
from tllm.cli.display.tables import indented_json, table
from tllm.cli.display.tensor_modes import serving_modes
from tllm.cli.display.timeline import as_text, save_svg
from tllm.core.errors import PlanError, counted
from tllm.core.memory import amount
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import context_of
from tllm.planner.cost.serving_load import ServingFacts, ServingLoad
from tllm.planner.search.serving_search import ServingChoice, ServingSearchResult, best_serving
from tllm.planner.simulate.explain import (
    StageBreakdown,
    prefill_breakdowns,
    ring_timelines,
    serving_bottleneck,
    stage_names,
    turn_breakdowns,
)
from tllm.planner.simulate.serving import ServingPrediction, all_reduce_bytes, hop_bytes, predict_serving
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

KINDS = ("weights", "cache", "working", "runtime")


def show_serving(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> None:
    """Choose a plan, or take the one that is given, and print the prediction."""
    asked = serving_facts(args, spec, args.dtype or spec.dtype)
    longest = context_of(spec, args.max_model_len)
    facts = replace(within(asked, longest), max_num_seqs=args.max_num_seqs)
    result = (
        given_serving(given_plan(args.plan, spec, cluster), spec, cluster, facts)
        if args.plan
        else best_serving(spec, cluster, facts)
    )
    best = result.choices[0]
    names = stage_names(best.plan, cluster, best.devices)
    lines = ring_timelines(best.predicted, names)
    if args.json:
        print(indented_json(_as_json(spec, cluster, result, args.top)))
    else:
        if (facts.prompt, facts.reply) != (asked.prompt, asked.reply):
            print(
                f"{asked.prompt} tokens in and {asked.reply} out are more than the context of {longest}: "
                f"{facts.prompt} and {facts.reply} are counted"
            )
        print("\n".join(_as_text(spec, cluster, result, args.top, is_given=bool(args.plan))))
        if args.explain:
            print("\n".join(_explained(best, names)), as_text(lines), sep="\n")
    if args.svg is not None:
        save_svg(args.svg, lines, f"{best.plan}: {'two turns of the ring' if facts.reply > 1 else 'prompts'}")


def given_plan(text: str, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan that is given. Raises PlanError where the cluster has fewer devices than the plan has ranks."""
    plan = Plan.parse(text, spec.num_layers)
    if plan.world_size > len(cluster):
        raise PlanError(
            f"plan {plan} has {counted(plan.world_size, 'rank')} and the cluster {counted(len(cluster), 'device')}",
            "give the cluster more nodes, or the plan fewer ranks",
        )
    return plan


def given_serving(plan: Plan, spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> ServingSearchResult:
    """The plan on the cluster's first devices, in their order, as if it had been searched for."""
    devices = tuple(range(plan.world_size))
    choice = ServingChoice(plan, devices, predict_serving(spec, plan, cluster, devices, facts))
    return ServingSearchResult((choice,), True, 1)


def _as_text(spec: ModelSpec, cluster: Cluster, result: ServingSearchResult, top: int, is_given: bool) -> list[str]:
    best = result.choices[0]
    facts, names = best.predicted.load.facts, stage_names(best.plan, cluster, best.devices)
    of_reply = ["ms/token", "first token"] if facts.reply > 1 else ["answer"]
    rows = [["", "plan", "nodes", *of_reply, rate_unit(facts), "most memory"]]
    for number, choice in enumerate(result.choices[:top], 1):
        predicted = choice.predicted
        rows.append(
            [
                str(number),
                str(choice.plan),
                " ".join(stage_names(choice.plan, cluster, choice.devices)),
                *([f"{1e3 * predicted.per_token:.4g}"] if facts.reply > 1 else []),
                f"{predicted.first_token:.3g} s",
                f"{predicted.tokens_per_second:.4g}",
                amount(max(rank.total for rank in predicted.memory)),
            ]
        )
    asked = f"{facts.concurrency} requests at once" if facts.concurrency > 1 else "one request at a time"
    head = f"{counted(facts.prompt, 'token')} in, {facts.reply} out, {asked}, {facts.dtype}"
    how = "as given" if is_given else certainty(result.exact, result.steps)
    return [
        f"{head}; {how}",
        "",
        table(rows),
        "",
        *drafting(best.predicted.load),
        f"the time goes to {serving_bottleneck(best.predicted, names)}",
        *([] if is_given else advice(cluster, result)),
        "",
        table(_ranks(cluster, best)),
        *_sent(spec, best),
        *_otherwise_cut(spec, cluster, best),
    ]


def rate_unit(facts: ServingFacts) -> str:
    """Of what is counted by the second: tokens, or answers where each is one token or none (embeddings, scores)."""
    return "tokens/s" if facts.reply > 1 else "answers/s"


def pace(predicted: ServingPrediction) -> str:
    """What requests see, in words."""
    facts, rate = predicted.load.facts, f"{predicted.tokens_per_second:.4g}"
    if facts.reply == 1:
        return f"an answer after {predicted.first_token:.3g} s, {rate} a second"
    return f"{1e3 * predicted.per_token:.4g} ms a token, the first after {predicted.first_token:.3g} s, {rate} tokens/s"


def drafting(load: ServingLoad) -> list[str]:
    """How many draft tokens a decode step should check, if draft tokens are allowed."""
    most, acceptance = load.facts.num_speculative_tokens, f"{100 * load.facts.acceptance:.4g} % are right"
    if not most:
        return []
    model = load.facts.draft_model
    if not load.draft_tokens:
        costs = "a row more costs" if model is None else "a row more and a step of the draft model cost"
        return [f"drafts do not pay: {acceptance}, and {costs} more than that"]
    by = ""
    if model is not None:
        by = f" of a draft model on the first rank ({model.family}, {counted(model.num_layers, 'layer')})"
    return [
        f"a turn checks {counted(load.draft_tokens, 'drafted token')}{by} and gives "
        f"{load.tokens_per_step:.3g}, as {acceptance}"
    ]


def whose(load: ServingLoad) -> str:
    """Whose time a turn is: a token's, that of the several tokens that it gives, or that of all prompts."""
    if load.facts.reply == 1:
        return "all prompts'"
    return f"a turn's ({load.tokens_per_step:.3g} tokens)" if load.draft_tokens else "a token's"


def certainty(exact: bool, steps: int) -> str:
    """Whether the search was exhaustive, in words."""
    if exact:
        return "exact: no plan in this model of the machines is faster"
    return f"pruned: after {steps} steps, a faster plan may have been missed"


def advice(cluster: Cluster, result: ServingSearchResult, chosen: ServingChoice | None = None) -> list[str]:
    """How the plan that was `chosen` (the best one if None) compares with one device alone, and what it leaves out."""
    best, lines = chosen or result.choices[0], list[str]()
    unit = rate_unit(best.predicted.load.facts)
    single = next((choice for choice in result.choices if len(choice.devices) == 1), None)
    if len(best.devices) == 1 and len(cluster) > 1:
        lines.append(f"{cluster.name(best.devices[0])} alone is faster than any two together")
    elif single is not None and single is not best:
        gain = best.predicted.tokens_per_second / single.predicted.tokens_per_second
        lines.append(f"{gain:.3g} times the {unit} of {cluster.name(single.devices[0])} alone")
    elif single is None:
        lines.append("no machine can hold the model alone")
    unused = [cluster.name(device) for device in range(len(cluster)) if device not in best.devices]
    if unused:
        everyone = next((choice for choice in result.choices if len(choice.devices) == len(cluster)), None)
        rate = f"{everyone.predicted.tokens_per_second:.4g} {unit}" if everyone is not None else "no plan that fits"
        lines.append(
            f"left out: {', '.join(unused)}; all {len(cluster)} together would give {rate}, "
            f"this plan gives {best.predicted.tokens_per_second:.4g}"
        )
    return lines


def _ranks(cluster: Cluster, choice: ServingChoice) -> list[list[str]]:
    """A row for each rank: its node, and its memory by kind."""
    rows = [["rank", "node", "stage", *KINDS, "sum", "of"]]
    for rank, (device, memory) in enumerate(zip(choice.devices, choice.predicted.memory, strict=True)):
        bytes_of = [amount(getattr(memory, kind)) for kind in KINDS]
        has = amount(cluster.devices[device].memory)
        stage = str(choice.plan.place(rank)[0])
        rows.append([str(rank), cluster.name(device), stage, *bytes_of, amount(memory.total), has])
    return rows


def _sent(spec: ModelSpec, choice: ServingChoice) -> list[str]:
    """Bytes that are sent for one token, in all-reduces over tp and between stages."""
    facts = choice.predicted.load.facts
    rows = choice.predicted.load.rows_per_token
    tp = rows * max(all_reduce_bytes(spec, choice.plan, stage, facts) for stage in range(choice.plan.pp))
    parts = [f"{amount(tp)} by each rank in sums over tp"] if tp else []
    parts += [f"{amount(rows * hop_bytes(spec, facts))} from stage to stage"] if choice.plan.pp > 1 else []
    bubble = f"; stages stand still {100 * choice.predicted.bubble:.0f} % of the time" if choice.plan.pp > 1 else ""
    return ["", f"sent for each token: {', '.join(parts)}{bubble}"] if parts else []


def _otherwise_cut(spec: ModelSpec, cluster: Cluster, choice: ServingChoice) -> list[str]:
    """How many of its tokens/s the same plan would give if its ranks cut weights in each other way."""
    plan, facts, lines = choice.plan, choice.predicted.load.facts, list[str]()
    for mode in serving_modes(spec, plan):
        if mode != plan.tensor:
            other = predict_serving(spec, msgspec.structs.replace(plan, tensor=mode), cluster, choice.devices, facts)
            ratio = other.tokens_per_second / choice.predicted.tokens_per_second
            lines.append(f"with tensor={mode} in place of {plan.tensor}: {ratio:.3g} times the {rate_unit(facts)}")
    return lines


def _explained(choice: ServingChoice, names: Sequence[str]) -> list[str]:
    predicted = choice.predicted
    lines = ["", f"where {whose(predicted.load)} time goes, ms:"]
    lines += [table(_breakdown_rows(turn_breakdowns(predicted, names))), ""]
    if predicted.load.facts.reply > 1:
        lines += ["where the time of all prompts goes, ms:"]
        lines += [table(_breakdown_rows(prefill_breakdowns(predicted, names))), ""]
    return lines


def _breakdown_rows(breakdowns: Sequence[StageBreakdown]) -> list[list[str]]:
    fields = breakdowns[0].parts._fields
    rows = [["stage", "nodes", *fields, "waiting", "sum"]]
    for number, stage in enumerate(breakdowns):
        seconds = [*stage.parts, stage.waiting, stage.parts.seconds + stage.waiting]
        rows.append([str(number), stage.name, *(f"{1e3 * part:.3f}" for part in seconds)])
    return rows


def _as_json(spec: ModelSpec, cluster: Cluster, result: ServingSearchResult, top: int) -> dict[str, Any]:
    facts = result.choices[0].predicted.load.facts
    return {
        "goal": "serve",
        **{name: getattr(facts, name) for name in ("prompt", "reply", "concurrency")},
        "exact": result.exact,
        "steps": result.steps,
        "choices": [_choice_json(spec, cluster, choice) for choice in result.choices[:top]],
    }


def _choice_json(spec: ModelSpec, cluster: Cluster, choice: ServingChoice) -> dict[str, Any]:
    predicted, names = choice.predicted, stage_names(choice.plan, cluster, choice.devices)
    rows = predicted.load.rows_per_token
    return {
        "plan": str(choice.plan),
        "nodes": [cluster.name(device) for device in choice.devices],
        "seconds": predicted.seconds,
        "first_token": predicted.first_token,
        "per_token": predicted.between_tokens,
        "tokens_per_second": predicted.tokens_per_second,
        "drafted": predicted.load.draft_tokens,
        "tokens_per_turn": predicted.load.tokens_per_step,
        "bubble": predicted.bubble,
        "bottleneck": serving_bottleneck(predicted, names),
        "sent_per_token": {
            "tp": [
                round(rows * all_reduce_bytes(spec, choice.plan, stage, predicted.load.facts))
                for stage in range(choice.plan.pp)
            ],
            "pp": round(rows * hop_bytes(spec, predicted.load.facts)) if choice.plan.pp > 1 else 0,
        },
        "memory": [{kind: getattr(rank, kind) for kind in (*KINDS, "total")} for rank in predicted.memory],
        "stages": [
            {"nodes": stage.name, **stage.parts._asdict(), "waiting": stage.waiting}
            for stage in turn_breakdowns(predicted, names)
        ],
    }
