"""One rank of tllm that takes turns of steps: the trainer of `tllm train`, over links between processes.

`python -m benchmarks.training.tllm_rank FOLDER ROWS RUN [--plan dp=2] [--job JSON] [--rank R --addresses HOST:PORT,…]`
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from benchmarks.processes.turns import Sampled, Turns
from tllm.cluster.certificates import Identity
from tllm.cluster.tls import data_client, data_server
from tllm.comm.links.connect import LinkOptions, Listener, open_links
from tllm.comm.links.link import Link
from tllm.core.memory import LARGEST_TRAINED, keep_freed_memory
from tllm.core.program import reexecute_to_compute
from tllm.model.transformer import build
from tllm.node.roles.colocated_rollouts import colocated_rollouts
from tllm.parallel.mesh import whole
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import wires
from tllm.training.gradients.bucket_layout import lay_out
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, Rollouts
from tllm.training.report.events import RunBegan, RunEvent, RunStepped
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import Groups, RankConfig, groups_of
from tllm.training.step.rank_model import RankModel
from tllm.training.trainer import RankTrainer
from tllm.weights.byte_source import LocalFiles

STEPS = 1_000_000  # more than any benchmark asks for
DEADLINE = 600.0


def main() -> None:
    reexecute_to_compute()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--plan", default="pp=1")
    parser.add_argument("--job", default="{}", help="further fields of the job, as JSON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--addresses", default="", help="HOST:PORT of every rank")
    parser.add_argument("--identity", type=Path, help="TLS with this certificate; without it, plain connections")
    parser.add_argument("--sums", action="store_true", help="only send what a step of dp sends")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory(LARGEST_TRAINED)
    job = job_of(options)
    beginning = open_initial_model(job)
    plan = Plan.parse(options.plan, beginning.spec.num_layers)
    groups = groups_of(plan, options.rank, open_all(plan, options) if plan.world_size > 1 else {})
    if options.sums:
        repeat_sums(groups, beginning.spec)
    config = RankConfig(job, plan, beginning.spec, options.rank, groups)
    weights = InitialWeights(LocalFiles(options.folder))
    trainer = RankTrainer(config, weights, None if options.rank else beginning, make_rollouts=endless_rollouts)
    trainer.prepare()
    sampled = Sampled()
    counters = dict(cpu=time.process_time, sent=lambda: groups.bytes_sent, **sampled.counters)
    trainer.run(ReportToTurns(Turns(**counters), sampled))


def job_of(options: argparse.Namespace) -> Job:
    """The job: rows in the order of the file, without packing; a step has one microbatch for each replica."""
    fields = dict(
        model_name_or_path=str(options.folder),
        train_files=(str(options.rows),),
        output_dir=str(options.run),
        max_steps=STEPS,
        save_steps=STEPS,
        seq_len=4096,
        lr_scheduler_type="constant",
        learning_rate=3e-4,
        weight_decay=0.1,
        shuffle=False,
        packing=False,
    )
    return msgspec.convert({**fields, **json.loads(options.job)}, Job)


def open_all(plan: Plan, options: argparse.Namespace) -> dict[Wire, Link]:
    """Open this rank's end of every wire of the plan."""
    identity = msgspec.json.decode(options.identity.read_bytes(), type=Identity) if options.identity else None
    places = [place.rsplit(":", 1) for place in options.addresses.split(",")]
    addresses = {rank: (host, int(port)) for rank, (host, port) in enumerate(places)}
    listener = Listener(*addresses[options.rank], data_server(identity) if identity else None)
    tls = LinkOptions(context=data_client(identity) if identity else None)
    links = open_links(options.rank, addresses, listener, wires(plan), cluster="bench", epoch=1, options=tls)
    listener.close()
    for link in links.values():
        link.set_deadline(DEADLINE)
    return links


def repeat_sums(groups: Groups, spec: ModelSpec) -> None:
    """All-reduce what data parallelism sends in a step, again and again, and compute nothing."""
    runs = [torch.ones(b.size) for b in lay_out(list(build(spec, whole(spec), torch.float32).parameters()))]
    turns = Turns(cpu=time.process_time, sent=lambda: groups.bytes_sent)
    turns()
    while True:
        for run in runs:
            groups.dp.all_reduce(run)
        turns(0.0)


class ReportToTurns:
    """Tells the turns when the run begins and when it has done a step."""

    def __init__(self, turns: Turns, sampled: Sampled) -> None:
        self._turns, self._sampled = turns, sampled

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, RunBegan):
            self._turns()
        elif isinstance(event, RunStepped):
            record = event.record
            self._sampled.add(record.metrics or {}, (record.role_seconds or {}).get("sampling", 0.0))
            self._turns(record.loss)


def endless_rollouts(config: RankConfig, model: RankModel) -> EndlessRollouts:
    """What samples completions of the greatest length, as nothing ends them before."""
    return EndlessRollouts(colocated_rollouts(replace(config, spec=replace(config.spec, eos_token_ids=())), model))


class EndlessRollouts:
    """Rollouts without tokens that end a completion."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts, self.close, self.share = rollouts, rollouts.close, rollouts.share

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._rollouts.metrics

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        return self._rollouts.sample(groups, (), sampling)


if __name__ == "__main__":
    main()
