"""One rank's groups and pipeline wires, made of the links that its plan asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tllm.comm.collectives.group import Group, group_of, solo
from tllm.comm.collectives.intra_host import connect_devices
from tllm.comm.collectives.tuning import tune_between_hosts
from tllm.comm.links.link import Link
from tllm.comm.nccl.device_backend import DeviceBackend
from tllm.devices.choose import CPU
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import DATA, PIPELINE, SERVERS, computing, members
from tllm.training.job.job import Job
from tllm.training.questions.answerer_pool import ClusterAnswerers
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.step.pipeline_wires import Wires

SUMMED = ("tp", "dp", "edp")
"""Groups that sum activations or gradients; the others pass pieces on, or sum a few numbers a step."""

ON_DEVICES = ("tp", "cp", "dp", "ep", "edp")
"""Groups that exchange tensors of the device; the others exchange what the host has made."""


@dataclass(frozen=True)
class Groups:
    """The ranks that a rank works with on each axis (`spec.process_groups.members`), and its other links."""

    tp: Group = field(default_factory=solo)
    cp: Group = field(default_factory=solo)
    dp: Group = field(default_factory=solo)
    ep: Group = field(default_factory=solo)
    edp: Group = field(default_factory=solo)
    replica: Group = field(default_factory=solo)
    world: Group = field(default_factory=solo)
    save: Group = field(default_factory=solo)
    wires: Wires = field(default_factory=Wires)
    data: Mapping[int, Link] = field(default_factory=dict)
    """The links that rows travel by: on rank 0 to every other rank, by its global number; elsewhere from rank 0."""
    to: Mapping[int, Link] = field(default_factory=dict)
    back: Mapping[int, Link] = field(default_factory=dict)
    """Links to and from the parameter servers, on a replica; to and from replicas, on a server; by global rank."""
    grid: GridShape | None = None
    """That which the ranks of `tp` form, where weights and activations are cut both ways."""
    network: str = ""
    """In words: what was measured of the links between machines, and how sums go over them."""

    @property
    def all(self) -> tuple[Group, ...]:
        return (self.tp, self.cp, self.dp, self.ep, self.edp, self.replica, self.world, self.save)

    def close_devices(self) -> None:
        """Give up the ways from device to device, of those that have one."""
        for group in self.all:
            group.close_devices()

    @property
    def tells_losses(self) -> bool:
        """Whether this rank tells the losses of its tokens: of those who have the same, the first does."""
        return self.tp.rank == 0 if self.grid is None else self.grid.place(self.tp.rank).column == 0

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this rank so far, but for saves, and those that came to it from servers."""
        links = [link for group in self.all if group is not self.save for link in group.send.values()]
        rows = self.data.values() if self.world.rank == 0 else ()
        sent: int = sum(link.bytes_moved for link in [*links, *rows, *self.to.values(), *self.back.values()])
        return sent + self.wires.bytes_sent


@dataclass(frozen=True)
class RankConfig:
    """What one rank is asked to do: the job, the plan with this rank's number in it, the model, and the links.

    `device` is where it keeps its part of the model, and computes. `answerers` are nodes of the cluster that rank 0 may
    ask, where it has any. `predicted` are the seconds of a step, by role, if the plan was predicted. `stop` says if the
    run is to save and end. `shares_prompts`: a prompt is computed once for its completions.
    """

    job: Job
    plan: Plan
    spec: ModelSpec
    rank: int
    groups: Groups
    device: torch.device = CPU
    answerers: ClusterAnswerers | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    stop: StopSignal = field(default_factory=StopSignal)
    shares_prompts: bool = False


def groups_of(plan: Plan, rank: int, links: Mapping[Wire, Link]) -> Groups:
    """The groups of a global rank from all its links."""
    to = {wire.target: link for wire, link in links.items() if wire.name == SERVERS and wire.source == rank}
    back = {wire.source: link for wire, link in links.items() if wire.name == SERVERS and wire.target == rank}
    groups: dict[str, Any] = {name: group_of(name, group, rank, links) for name, group in members(plan, rank).items()}
    if rank not in computing(plan):
        return Groups(save=groups["save"], to=to, back=back)
    data = {wire.target if rank == 0 else 0: link for wire, link in links.items() if wire.name == DATA}
    return Groups(**groups, wires=_wires(plan, rank, links), data=data, to=to, back=back, grid=plan.grid)


def on_devices(
    groups: Groups,
    plan: Plan,
    rank: int,
    host: str,
    device: torch.device,
    seconds: float,
    backend: DeviceBackend | None = None,
) -> Groups:
    """The groups that exchange tensors of the device, connected inside each machine as `connect_devices` says.

    Every rank calls it, with the name of its machine and the seconds that an exchange may take.
    """
    if rank not in computing(plan):
        return groups
    names = [name for name in ON_DEVICES if name != "edp" or plan.ep > 1]  # else nobody uses it
    lines = [connect_devices(getattr(groups, name), host, device, seconds, backend) for name in names]
    return replace(groups, network=_joined(groups.network, *lines))


def tuned(groups: Groups, plan: Plan, rank: int, hosts: Sequence[str]) -> Groups:
    """The groups whose sums are long, tuned to the links between machines; `hosts` names that of each rank.

    Every rank calls it, and each measures its groups in the same order.
    """
    if rank not in computing(plan):
        return groups
    mates = members(plan, rank)
    lines = [tune_between_hosts(getattr(groups, name), [hosts[mate] for mate in mates[name]]) for name in SUMMED]
    return replace(groups, network=_joined(groups.network, *lines))


def _joined(*lines: str) -> str:
    return "; ".join(filter(None, lines))


def _wires(plan: Plan, rank: int, links: Mapping[Wire, Link]) -> Wires:
    send: dict[int, list[Link]] = defaultdict(list)
    recv = {}
    for wire, link in links.items():
        if wire.name == PIPELINE and wire.source == rank:
            link.unbounded()  # the schedule bounds what is under way
            send[plan.coordinates(wire.target).stage].append(link)
        elif wire.name == PIPELINE and wire.target == rank:
            recv[plan.coordinates(wire.source).stage] = link
    return Wires(send, recv)
