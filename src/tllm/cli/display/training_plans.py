"""What `tllm train --dry-run` shows: who would hold what, memory of each rank by kind, seconds of a step.

The best training plans for a cluster, as text and as JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tllm.cli.display.beside_steps import BesideSteps, PredictedPlan
from tllm.cli.display.serving_plans import certainty, given_plan
from tllm.cli.display.tables import indented_json, span, table
from tllm.cli.display.timeline import as_text, save_svg
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.planner.bounds.training_bound import is_bounded, least_step_seconds
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import judge_bytes, rollout_bytes
from tllm.planner.memory.training_memory import RankMemory, training_bytes
from tllm.planner.search.training_constraints import MICROBATCHES
from tllm.planner.search.training_search import TrainingChoice, TrainingSearchResult, best_training
from tllm.planner.simulate.explain import stage_names, step_timelines, training_bottleneck, training_breakdowns
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction, predict_step
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.data.packing import RowLengths
from tllm.training.job.initial_model import judge_specs, row_lengths
from tllm.training.job.job import Job
from tllm.training.job.job_parts import (
    can_mirror,
    role_nodes,
    role_plan_text,
    shares_prompts,
    training_facts,
    with_role_nodes,
    with_role_plans,
)
from tllm.training.job.key_limits import AUTO

KINDS = (
    "weights",
    "gradients",
    "waiting_sums",
    "optimizer",
    "wide_weights",
    "outer",
    "activations",
    "logits",
    "working",
    "heap",
    "buffers",
    "cache",
    "reference",
    "teacher",
    "reward",
    "copies",
    "saving",
    "runtime",
)


NOTHING = 1e-9
"""Seconds that are only the rounding of a difference."""

LOOPBACK = LinkSpeed(latency=40e-6, bandwidth=0.8e9)
"""A link between two processes of one machine, encrypted (measured; docs/log/communication.md)."""


def show_plan(job: Job, plan: Plan, spec: ModelSpec, lasting: bool = False) -> str:
    """The plan, rank by rank, and the memory that each takes; with copies of steps in a `lasting` run."""
    facts = facts_of(job, spec, lasting)
    ranks = training_bytes(spec, plan, facts)
    return "\n".join([*_head_of(job, plan, spec), "", table(_rows(spec, plan, facts, ranks)), *_apart(job, spec)])


def _head_of(job: Job, plan: Plan, spec: ModelSpec) -> list[str]:
    """Lines with the model, the plan, and what a step learns from."""
    microbatches = training_facts(job).microbatches
    return [
        f"{spec.family}: {counted(spec.num_layers, 'layer')}, width {spec.hidden_size}, vocabulary "
        f"{spec.vocab_size}, {job.dtype}",
        f"plan {plan}: {counted(plan.world_size, 'rank')}",
        f"a step: {counted(job.global_batch_size, 'row')} of {counted(job.seq_len, 'token')} in "
        f"{counted(microbatches, 'microbatch', 'microbatches')}",
    ]


def _apart(job: Job, spec: ModelSpec) -> list[str]:
    """The nodes that have roles beside the plan, and what each of them holds."""
    roles, alone = role_nodes(job), job
    for role in roles:
        alone = with_role_nodes(alone, role, ())
    facts = with_role_plans(job, training_facts(alone, judges=judge_specs(job)), spec)
    lines = list[str]()
    for role, wanted in roles.items():
        judge = {"teacher": facts.teacher, "reward": facts.reward}.get(role)
        nbytes = TRAINER_BYTES + (rollout_bytes(spec, facts) if judge is None else judge_bytes(judge))
        who = " ".join(wanted.names) or (
            "as many nodes as are best" if wanted.is_auto else counted(wanted.count, "node")
        )
        by = judge.plan if judge is not None else facts.sampling and facts.sampling.plan
        plan = f", by {by} together" if by is not None else ""
        if role_plan_text(job, role) == AUTO:
            plan = ", by the plan that is best"
        lines.append(f"{role}: {who}{plan}, {amount(nbytes)} at most on each")
    return ["", *lines] if lines else []


def facts_of(job: Job, spec: ModelSpec, lasting: bool = False, lengths: RowLengths | None = None) -> TrainingFacts:
    """What of a job decides its cost, where processors compute. Memory is for whole rows: it needs no `lengths`."""
    passes = has_value_pass(job, spec), shares_prompts(job, spec)
    return training_facts(job, lasting and can_mirror(job), judge_specs(job), *passes, lengths)


def has_value_pass(job: Job, spec: ModelSpec, device: str = "cpu") -> bool:
    """Whether what is learned from is also computed as the engine does it, to the bit. All nodes are taken to have the
    kernels that this one has, and a device of this kind."""
    if not job.deterministic or not device.startswith(("cpu", "auto")):
        return False
    from tllm.devices.choose import CPU, choose_device
    from tllm.training.job.rollout_combinations import wants_batch_invariance

    return wants_batch_invariance(job, spec) and choose_device(device) == CPU


def _rows(spec: ModelSpec, plan: Plan, facts: TrainingFacts, ranks: list[RankMemory]) -> list[list[str]]:
    """A line for each rank; kinds that no rank has are left out."""
    shown = [kind for kind in KINDS if any(getattr(rank, kind) for rank in ranks)]
    on_disk = any(rank.on_disk for rank in ranks)
    titles = [kind.replace("_", " ") for kind in shown]
    rows = [["rank", "replica", "stage", "layers", *titles, "sum", *(["on disk"] if on_disk else [])]]
    works = rank_works(spec, plan, facts)
    for index, rank in enumerate(ranks):
        if index < len(works):
            at, runs = works[index].at, works[index].runs
            where = [str(at.replica), str(at.stage), " ".join(span(run.start, run.stop) for run in runs)]
        else:
            where = ["server", "", ""]
        bytes_of = [amount(getattr(rank, kind)) for kind in shown]
        rows.append(
            [str(rank.rank), *where, *bytes_of, amount(rank.total), *([amount(rank.on_disk)] if on_disk else [])]
        )
    return rows


def show_prediction(job: Job, plan: Plan, spec: ModelSpec, speed: float, where: str, measuring: str) -> str:
    """What a step takes if every rank computes at `speed`, in flop/s, as this machine does on what `where` names.

    `measuring` is the command that measures machines for the job, which other roles than the policy's need.
    """
    lengths = row_lengths(job)
    facts = facts_of(job, spec, lengths=lengths)

    def predict(plan: Plan, facts: TrainingFacts) -> StepPrediction:
        return predict_step(spec, plan, facts, speed, LOOPBACK)

    predicted = predict(plan, facts)
    sent = sum(traffic.total for traffic in predicted.bytes_sent)
    parts = {"layers' sums": predicted.layers, "pipeline": predicted.pipeline, "gradients": predicted.gradients}
    waits = "".join(f", {name} {seconds:.3g}" for name, seconds in parts.items() if seconds > NOTHING)
    return "\n".join(
        [
            f"predicted: {predicted.seconds:.3g} s a step (compute {predicted.compute:.3g}{waits}), "
            f"{predicted.tokens_per_second:,.0f} tokens/s, bubble {100 * predicted.bubble:.0f} %, {amount(sent)} sent",
            f"if each rank reaches the {speed / 1e9:,.1f} Gflop/s that a layer reaches here on {where}, and links are "
            "those of one machine",
            *BesideSteps.of(job, spec, lengths).lines(PredictedPlan(plan, facts, predict)),
            *_policy_alone(job, facts, measuring),
        ]
    )


def _policy_alone(job: Job, facts: TrainingFacts, measuring: str) -> list[str]:
    """That other roles take time too, which only measured machines tell."""
    roles = {
        "sampling": facts.sampling is not None and facts.sampling.share > 0,
        "the reference": facts.reference,
        "the reward model": facts.reward is not None,
        "the teacher": facts.teacher is not None,
    }
    named = [name for name, is_there in roles.items() if is_there]
    comes = "comes" if len(named) == 1 else "come"
    told = f"this is the policy's part: {' and '.join(named)} {comes} on top, which `{measuring}` measures"
    alone = [told] if named else []
    return alone + not_predicted(job)


def roles_elsewhere(job: Job) -> dict[str, str]:
    """Roles of programs that the job names by their addresses, as records of steps call them, and the key of each."""
    found = dict[str, str]()
    if job.rollouts is not None and job.rollouts.rollout_servers:
        found["sampling"] = f"{job.task}.rollout_servers"
    if job.distill is not None and job.distill.teachers:
        found["teacher"] = "distill.teachers"
    return found


def not_predicted(job: Job) -> list[str]:
    """That such programs take time too, of which nothing is known before the run."""
    return [
        f"without the {role} at {key}: these machines are not measured, and what a step waits for them comes on top"
        for role, key in roles_elsewhere(job).items()
    ]


def show_training(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> None:
    """Choose, or take the plan that is given, and print what it comes to."""
    facts = TrainingFacts(args.seq, args.batch, dtype=args.dtype or spec.dtype)
    result = (
        given_training(given_plan(args.plan, spec, cluster), spec, cluster, facts)
        if args.plan
        else best_training(spec, cluster, facts, args.top)
    )
    show_choices(args, cluster, result)


def show_choices(args: argparse.Namespace, cluster: Cluster, result: TrainingSearchResult) -> None:
    """Print plans that were found, as text or as JSON."""
    best = result.choices[0]
    names = stage_names(best.placed.plan, cluster, best.placed.devices)
    lines = step_timelines(best.predicted.timeline, names) if best.predicted.timeline else []
    if args.json:
        print(indented_json(_as_json(cluster, result)))
    else:
        print("\n".join(_as_text(cluster, result, is_given=bool(args.plan))))
        if args.explain:
            print("\n".join(_explained(best, names)), as_text(lines), sep="\n")
    if args.svg is not None:
        save_svg(args.svg, lines, f"{best.placed.plan}: one step")


def given_training(plan: Plan, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> TrainingSearchResult:
    """The plan on the cluster's first devices, in their order, as if it had been searched for."""
    placed = PlacedPlan(spec, plan, facts, cluster, tuple(range(plan.world_size)))
    choice = TrainingChoice(placed, placed.predict(), tuple(placed.memory(placed.replicas)))
    return TrainingSearchResult((choice,), True, 1)


def _as_text(cluster: Cluster, result: TrainingSearchResult, is_given: bool) -> list[str]:
    rows = [["", "plan", "microbatch", "nodes", "s/step", "tokens/s", "MFU", "bubble", "most memory"]]
    for number, choice in enumerate(result.choices, 1):
        placed, predicted = choice.placed, choice.predicted
        rows.append(
            [
                str(number),
                str(placed.plan),
                str(placed.facts.microbatch_size),
                _nodes(choice),
                f"{predicted.seconds:.4g}",
                f"{predicted.tokens_per_second:,.0f}",
                f"{100 * placed.mfu(predicted.seconds):.1f} %",
                f"{100 * predicted.bubble:.0f} %",
                amount(max(rank.total for rank in choice.memory)),
            ]
        )
    best = result.choices[0]
    facts = best.placed.facts
    how = "as given" if is_given else certainty(result.exact, result.steps)
    return [
        f"a step of {counted(facts.global_batch_size, 'row')} of {counted(facts.seq_len, 'token')}, "
        f"{facts.dtype}; {how}",
        "",
        table(rows),
        "",
        *seconds_by_role(best.predicted),
        *not_timed(facts, best.predicted),
        f"the time goes to {training_bottleneck(best.predicted)}",
        *_beside_bound(cluster, best),
        *left_out(cluster, best),
        "",
        table(_ranks(cluster, best)),
    ]


def seconds_by_role(predicted: StepPrediction) -> list[str]:
    """What a step's seconds go to where more than the policy takes some."""
    if not predicted.roles:
        return []
    parts = [*predicted.roles, ("policy", predicted.policy)]
    return ["seconds of a step by role: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts)]


def not_timed(facts: TrainingFacts, predicted: StepPrediction) -> list[str]:
    """What is not in the seconds of a step, as nothing says how fast it is."""
    judges = ("teacher", "teacher", facts.teacher), ("rewards", "reward model", facts.reward)
    counted = dict(predicted.roles)
    return [
        f"the {name}'s seconds are not counted: it computes in {judge.dtype}, in which no machine was measured"
        for role, name, judge in judges
        if judge is not None and role not in counted
    ]


def _nodes(choice: TrainingChoice) -> str:
    """The nodes in the order of ranks, many of them by their number."""
    devices, cluster = choice.placed.devices, choice.placed.cluster
    return " ".join(map(cluster.name, devices)) if len(devices) <= 8 else f"{len(devices)} devices"


def _least(cluster: Cluster, best: TrainingChoice) -> float | None:
    """Seconds that every plan of the forms that are searched, but for grids, takes at least, with any size of
    microbatches that is tried or the one that is given; None beside a plan of another form, which may take less."""
    facts = best.placed.facts
    if not is_bounded(best.placed.plan, len(cluster), facts):
        return None
    return least_step_seconds(best.placed.spec, cluster, facts, sorted({*MICROBATCHES, facts.microbatch_size}))


def _beside_bound(cluster: Cluster, best: TrainingChoice) -> list[str]:
    least, seconds = _least(cluster, best), best.predicted.seconds
    if least is None:
        return []
    more = f"{100 * (seconds / least - 1):.0f} % more" if least else "more"
    of_what = "products on all nodes, whole layers, gradients"
    return [
        f"every plan without a grid, of the forms that are searched, takes {least:.4g} s or more ({of_what}); "
        f"this one takes {more}"
    ]


def left_out(cluster: Cluster, best: TrainingChoice) -> list[str]:
    used = set(best.placed.devices)
    unused = [cluster.name(device) for device in range(len(cluster)) if device not in used]
    if not unused:
        return []
    if len(used) == 1:
        return [f"{cluster.name(best.placed.devices[0])} alone is faster than with others"]
    return [f"left out, as they would slow it down or add nothing: {', '.join(unused)}"]


def _ranks(cluster: Cluster, choice: TrainingChoice) -> list[list[str]]:
    """A line for each rank of the replicas that stand for all: memory by kind, bytes sent by group."""
    shown = [kind for kind in KINDS if any(getattr(rank, kind) for rank in choice.memory)]
    sent = choice.predicted.bytes_sent
    groups = [name for name in asdict(sent[0]) if any(getattr(traffic, name) for traffic in sent)]
    titles = [kind.replace("_", " ") for kind in shown]
    rows = [["rank", "node", *titles, "sum", "of", *(f"{group} sent" for group in groups)]]
    for memory, traffic in zip(choice.memory, sent, strict=True):
        device = choice.placed.devices[memory.rank]
        bytes_of = [amount(getattr(memory, kind)) for kind in shown]
        has = [amount(memory.total), amount(cluster.devices[device].memory)]
        of_groups = [amount(getattr(traffic, group)) for group in groups]
        rows.append([str(memory.rank), cluster.name(device), *bytes_of, *has, *of_groups])
    return rows


def _explained(choice: TrainingChoice, names: list[str]) -> list[str]:
    rows = [["stage", "nodes", "busy", "waiting", "gradients", "sum"]]
    for number, (name, *seconds) in enumerate(training_breakdowns(choice.predicted, names)):
        rows.append([str(number), name, *(f"{part:.4f}" for part in (*seconds, sum(seconds)))])
    predicted = choice.predicted
    busiest = f"products {predicted.compute:.4f}, sums and exchanges inside layers {predicted.layers:.4f}"
    return ["", "where a step's time goes, s:", table(rows), f"of the busiest stage: {busiest}", ""]


def _as_json(cluster: Cluster, result: TrainingSearchResult) -> dict[str, Any]:
    return {
        "goal": "train",
        "exact": result.exact,
        "steps": result.steps,
        "least_seconds": _least(cluster, result.choices[0]),
        "choices": [_choice_json(cluster, choice) for choice in result.choices],
    }


def _choice_json(cluster: Cluster, choice: TrainingChoice) -> dict[str, Any]:
    placed, predicted = choice.placed, choice.predicted
    return {
        "plan": str(placed.plan),
        "microbatch_size": placed.facts.microbatch_size,
        "nodes": [cluster.name(device) for device in placed.devices],
        "seconds": predicted.seconds,
        "roles": dict(predicted.roles) | ({"policy": predicted.policy} if predicted.roles else {}),
        "compute": predicted.compute,
        "layers": predicted.layers,
        "pipeline": predicted.pipeline,
        "gradients": predicted.gradients,
        "tokens_per_second": predicted.tokens_per_second,
        "mfu": placed.mfu(predicted.seconds),
        "bubble": predicted.bubble,
        "bottleneck": training_bottleneck(predicted),
        "memory": [asdict(rank) | {"total": rank.total} for rank in choice.memory],
        "bytes_sent": [asdict(traffic) for traffic in predicted.bytes_sent],
    }
