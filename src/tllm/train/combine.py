"""What a job, a plan and a model cannot be together: refused before anything is started, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.ground.errors import PlanError
from tllm.spec.cut import cut_stage
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.schedule import build
from tllm.train.additions import check_deterministic
from tllm.train.job import Job
from tllm.train.job_parts import rate_schedule
from tllm.train.packing import deal


def check_combination(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """PlanError, or ConfigError of the job alone, for what cannot work."""
    rate_schedule(job)
    plan.check(spec.num_layers)
    total = microbatches_of(job)
    counts = [len(part) for part in deal(total, plan.dp)]
    for count in sorted(set(counts) - {0}):
        build(plan.schedule, plan.pp, count, plan.depth, plan.chunks)
    _check_experts(job, plan, spec, counts)
    for stage in plan.stages:
        cut_stage(spec, stage.shares, plan.experts, plan.ep)
    _check_sequence(plan)
    _check_gathered(plan, counts)
    _check_chunks(plan, spec)
    _check_served(job, plan, counts)
    _check_ways(job, plan)
    if job.deterministic:
        check_deterministic(plan, total, spec.tied)


def microbatches_of(job: Job) -> int:
    """Of a step, over all replicas."""
    return -(-job.global_batch_size // job.microbatch_size)


def _check_experts(job: Job, plan: Plan, spec: ModelSpec, counts: list[int]) -> None:
    has_experts = any(layer.moe for layer in spec.layers)
    if plan.ep > 1 and not has_experts:
        raise PlanError(f"ep={plan.ep} and the model has no experts", "leave ep out")
    if job.router_aux_loss_coef and not has_experts:
        raise PlanError(
            f"router_aux_loss_coef is {job.router_aux_loss_coef} and the model has no experts", "leave it out"
        )
    check_lock_step(counts, plan.ep)


def check_lock_step(microbatches: Sequence[int], ep: int) -> None:
    """Refuse, by PlanError, replicas that spread experts over each other and have unlike numbers of `microbatches`.

    `microbatches[r]` is the number of replica r in one step. A rank waits for the tokens of the others in each layer.
    """
    if ep < 1 or len(microbatches) % ep:
        raise PlanError(
            f"ep={ep} does not divide the {len(microbatches)} replicas",
            "give dp as a multiple of ep: experts are spread over ep replicas in a row",
        )
    for first in range(0, len(microbatches), ep):
        counts = microbatches[first : first + ep]
        if len(set(counts)) > 1:
            raise PlanError(
                f"replicas {first} to {first + ep - 1} spread experts over each other (ep={ep}) "
                f"and have {', '.join(map(str, counts))} microbatches in a step",
                "give these replicas equal shares and a global batch whose rows divide among them, or ep=1",
            )


def _check_sequence(plan: Plan) -> None:
    tps = {stage.tp for stage in plan.stages}
    if plan.sequence and len(tps) > 1:
        raise PlanError(
            f"sequence=true with stages of tp={'+'.join(str(stage.tp) for stage in plan.stages[: plan.pp])}: "
            "each rank sends its slice of the tokens to one rank of the next stage, which has as many",
            "give all stages one tp, or leave sequence out",
        )


def _check_gathered(plan: Plan, counts: list[int]) -> None:
    if plan.zero == 3 and len(set(counts)) > 1:
        raise PlanError(
            f"zero=3 gathers each layer's weights from all replicas at once, which have "
            f"{', '.join(map(str, counts))} microbatches",
            "give dp equal shares that divide the microbatches of a step, or take zero=2",
        )


def _check_chunks(plan: Plan, spec: ModelSpec) -> None:
    if plan.pp == 1 and plan.chunks > 1 and spec.tied:
        raise PlanError(
            f"one stage would hold the table of a tied model in 2 of its {plan.chunks} chunks",
            "give pp of 2 or more, or one chunk: on one stage there is nobody to interleave with",
        )


def _check_served(job: Job, plan: Plan, counts: Sequence[int]) -> None:
    """Refuse a plan with servers that cuts replicas: each holds the whole model, on one rank.

    `counts` are the replicas' microbatches of a step.
    """
    if not plan.servers:
        return
    if plan.replica_size > 1:
        raise PlanError(
            f"plan {plan} has servers={plan.servers} and replicas of {plan.replica_size} ranks",
            "with servers each replica is one rank: leave pp, tp and cp at 1, or leave servers out",
        )
    for name, plain in (("ep", 1), ("zero", 0), ("offload", "none")):
        if getattr(plan, name) != plain:
            raise PlanError(
                f"plan {plan} has servers={plan.servers} and {name}={getattr(plan, name)}",
                f"servers hold all of the optimizer's state and every expert: leave {name} out",
            )
    if job.max_staleness and not counts[0]:
        raise PlanError(
            f"replica 0 has none of the {sum(counts)} microbatches of a step, and where replicas do not wait for each "
            f"other (max_staleness={job.max_staleness}) it tells the losses of its own",
            "give replica 0 a larger share",
        )


def _check_ways(job: Job, plan: Plan) -> None:
    """The ways to send less, of which a run takes one, with or without compression."""
    local, late, served = job.local_steps > 1, job.delay_steps > 0, plan.servers > 0
    if local + late + served > 1:
        named = {"local_steps": local, "delay_steps": late, "servers": served}
        both = " and ".join(name for name, taken in named.items() if taken)
        raise PlanError(f"{both} are two answers to one question: when replicas hear of each other", "take one")
    for name, taken, shared in (
        ("local_steps", local, "zero" if plan.zero else "ep"),
        ("delay_steps", late, "ep"),
    ):
        if taken and getattr(plan, shared) > (shared == "ep"):
            raise PlanError(
                f"{name} and {shared}: replicas that are out of step cannot share their weights",
                f"leave out {shared}, or {name}",
            )
    if local and plan.cp > 1:
        raise PlanError(
            f"local_steps={job.local_steps} and cp={plan.cp}: a replica would sum gradients over the links that its "
            "attention goes round by",
            "leave one of them out; pp and tp go with local_steps",
        )
    if job.max_staleness and not served:
        raise PlanError(
            f"max_staleness is {job.max_staleness} and the plan has no servers",
            "give the plan servers=1, or leave it out",
        )
    if job.gradient_compression != "none" and (served or job.deterministic):
        raise PlanError(
            f"gradient_compression={job.gradient_compression} and {'servers' if served else 'deterministic=true'}: "
            f"{'gradients go to servers as they are' if served else 'what is lost hangs on how gradients are cut'}",
            "leave one of them out",
        )
