"""What `tllm train --dry-run` shows: who would hold what, and how much memory each rank takes, by kind."""

from __future__ import annotations

from tllm.cli.tables import amount, span, table
from tllm.planner.ranks import TrainingFacts, work_of
from tllm.planner.training import RankMemory, training_bytes
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.job import Job

STATES = {"adamw": 2, "sgd": 1}
"""Tensors that an optimizer keeps, each as large as the weights."""

KINDS = ("weights", "gradients", "optimizer", "wide_weights", "activations", "logits", "working", "buffers", "runtime")


def show_plan(job: Job, plan: Plan, spec: ModelSpec) -> str:
    """The plan, rank by rank."""
    facts = facts_of(job)
    ranks = training_bytes(spec, plan, facts)
    head = [
        f"{spec.family}: {spec.num_layers} layers, width {spec.hidden_size}, vocabulary {spec.vocab_size}, {job.dtype}",
        f"plan {plan}: {plan.world_size} ranks",
        f"a step: {job.global_batch_size} rows of {job.seq_len} tokens in {facts.microbatches} microbatches",
        "",
    ]
    return "\n".join([*head, table(_rows(spec, plan, facts, ranks))])


def facts_of(job: Job) -> TrainingFacts:
    """What of a job decides its cost."""
    return TrainingFacts(
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        microbatch_size=job.microbatch_size,
        dtype=job.dtype,
        states=STATES[job.optimizer],
    )


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
