"""A run that outlives its ranks, as threads: nodes that keep their copies from epoch to epoch, and some that die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.support.models.layouts import in_threads
from tests.support.training.local_links import local_links
from tests.support.training.runs import short_peak
from tllm.comm.collectives.group import group_of
from tllm.comm.links.link import Link, LocalLink
from tllm.core.errors import LinkError
from tllm.spec.plan import Plan, Wire
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.report.events import RunEvent
from tllm.training.snapshot.memory_snapshot import MemorySnapshots
from tllm.training.snapshot.placement import RESTORE, restore_wires, snapshot_wires
from tllm.training.snapshot.replication import SnapshotReplicator, snapshot_links
from tllm.training.snapshot.spare_node import SpareNode
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig, groups_of
from tllm.training.trainer import RankTrainer
from tllm.weights.byte_source import LocalFiles

Hurt = Callable[[RankTrainer, Callable[[], None]], None]
"""hurt(trainer, die): have it die somewhere; `die` closes its links and does not return"""


class Died(Exception):
    """A rank is no more."""


class Epochs:
    """Nodes by name, each with a folder of its own. `hosts` are their machines, all one if left out."""

    def __init__(self, job: Job, hosts: dict[str, str] | None = None) -> None:
        self.job, self.hosts = job, hosts or {}
        self.copies: dict[str, MemorySnapshots] = {}
        self.number = 0

    def run(
        self,
        plan_text: str,
        nodes: Sequence[str],
        hurt: dict[str, Hurt] | None = None,
        lives: bool = False,
        lenders: Sequence[str] = (),
    ) -> list[RunEvent]:
        """One epoch, to the end of the run or until nodes die: what rank 0 told. The dead have no memory afterwards.

        Unless each `lives`, and only breaks off. `lenders` are nodes without a rank that have something in memory.
        """
        self.number += 1
        beginning = open_initial_model(self.job)
        plan = Plan.parse(plan_text, beginning.spec.num_layers)
        assert len(nodes) == plan.world_size
        hosts = [self.hosts.get(node, "here") for node in nodes]
        links: dict[Wire, Link] = {**local_links(plan)}
        total = len(nodes) + len(lenders)
        more = [*snapshot_wires(hosts), *restore_wires(len(nodes), total)]
        links |= {wire: LocalLink(wire.source, wire.target) for wire in more}
        news: list[RunEvent] = []
        dead: list[str] = []

        def rank(number: int) -> None:
            node = nodes[number]
            mine = {wire: link for wire, link in links.items() if number in wire[:2]}
            groups = groups_of(plan, number, mine)
            memory = self.copies.setdefault(node, MemorySnapshots())
            every = group_of(RESTORE, range(total), number, mine) if lenders else groups.save
            mirror = SnapshotReplicator(memory, self.number, every, hosts, snapshot_links(number, mine))
            own = self.job if number == 0 else replace(self.job, output_dir=f"{self.job.output_dir}-{node}")
            source = LocalFiles(Path(self.job.model_name_or_path or ""))
            first = beginning if number == 0 else None
            config = RankConfig(own, plan, beginning.spec, number, groups)
            trainer = RankTrainer(config, InitialWeights(source), first, mirror)

            def die() -> None:
                dead.append(node)
                for link in mine.values():
                    link.close()
                raise Died

            try:
                trainer.prepare()
                if hurt and node in hurt:
                    hurt[node](trainer, die)
                trainer.run(news.append if number == 0 else lambda one: None)
            except (LinkError, Died):
                assert hurt, "nobody was to die"
            finally:
                for link in mine.values():
                    link.close()
                try:
                    trainer.close()
                except (LinkError, Died):
                    assert hurt, "nobody was to die"
                source.close()

        def lend(number: int) -> None:
            mine = {wire: link for wire, link in links.items() if number in wire[:2]}
            memory = self.copies[lenders[number - len(nodes)]]
            mirror = SnapshotReplicator(memory, self.number, group_of(RESTORE, range(total), number, mine), hosts)
            lender = SpareNode(mirror)
            lender.prepare()
            lender.close()
            assert memory.complete() == [], "what all ranks have anew is not kept here"

        ranks = [partial(rank, number) for number in range(plan.world_size)]
        with short_peak():
            in_threads([*ranks, *(partial(lend, number) for number in range(len(nodes), total))])
        assert bool(dead) == bool(hurt), "somebody was to die"
        for node in hurt or {}:  # also who was woken by another's death before its own
            if not lives:
                del self.copies[node]
        return news
