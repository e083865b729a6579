"""What `tllm train --dry-run` shows: who would hold what, memory of each rank by kind, seconds of a step."""

from __future__ import annotations

from tllm.cli.tables import amount, span, table
from tllm.planner.predict import predict_step
from tllm.planner.ranks import TrainingFacts, work_of
from tllm.planner.simulate import LinkSpeed
from tllm.planner.training import RankMemory, training_bytes
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.job import Job
from tllm.train.job_parts import can_mirror, training_facts

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
    "copies",
    "saving",
    "runtime",
)


LOOPBACK = LinkSpeed(latency=40e-6, bandwidth=0.8e9)
"""A link between two processes of one machine, encrypted (measured; docs/log.md)."""


def show_plan(job: Job, plan: Plan, spec: ModelSpec, lasting: bool = False) -> str:
    """The plan, rank by rank, and the memory that each takes; with copies of steps in a `lasting` run."""
    facts = facts_of(job, lasting)
    ranks = training_bytes(spec, plan, facts)
    head = [
        f"{spec.family}: {spec.num_layers} layers, width {spec.hidden_size}, vocabulary {spec.vocab_size}, {job.dtype}",
        f"plan {plan}: {plan.world_size} ranks",
        f"a step: {job.global_batch_size} rows of {job.seq_len} tokens in {facts.microbatches} microbatches",
        "",
    ]
    return "\n".join([*head, table(_rows(spec, plan, facts, ranks))])


def facts_of(job: Job, lasting: bool = False) -> TrainingFacts:
    """What of a job decides its cost."""
    return training_facts(job, lasting and can_mirror(job))


def _rows(spec: ModelSpec, plan: Plan, facts: TrainingFacts, ranks: list[RankMemory]) -> list[list[str]]:
    """A line for each rank; kinds that no rank has are left out."""
    shown = [kind for kind in KINDS if any(getattr(rank, kind) for rank in ranks)]
    on_disk = any(rank.on_disk for rank in ranks)
    titles = [kind.replace("_", " ") for kind in shown]
    rows = [["rank", "replica", "stage", "layers", *titles, "sum", *(["on disk"] if on_disk else [])]]
    works = work_of(spec, plan, facts)
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


def show_prediction(job: Job, plan: Plan, spec: ModelSpec, speed: float, threads: int) -> str:
    """What a step takes if every rank computes at `speed`, in flop/s, as this machine does with so many threads."""
    found = predict_step(spec, plan, facts_of(job), speed, LOOPBACK)
    sent = sum(one.total for one in found.bytes_sent)
    parts = {"layers' sums": found.layers, "pipeline": found.pipeline, "gradients": found.gradients}
    waits = "".join(f", {name} {seconds:.3g}" for name, seconds in parts.items() if seconds > 0)
    return "\n".join(
        [
            f"predicted: {found.seconds:.3g} s a step (compute {found.compute:.3g}{waits}), "
            f"{found.tokens_per_second:,.0f} tokens/s, bubble {100 * found.bubble:.0f} %, {amount(sent)} sent",
            f"if each rank reaches the {speed / 1e9:,.1f} Gflop/s that a layer reaches here on {threads} "
            f"thread{'s' if threads > 1 else ''}, and links are those of one machine",
        ]
    )
