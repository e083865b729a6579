"""Training with servers, replicas and servers as threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.models.layouts import in_threads, spec_of
from tests.support.training.training_step import Layout, Named, chunks_of, dealt, predicted
from tllm.comm.collectives.group import solo
from tllm.comm.links.link import LocalLink
from tllm.model.transformer import Transformer
from tllm.parallel.replicated import ReplicatedParameters
from tllm.spec.pipeline_schedule import build as build_schedule
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.bucket_layout import BucketLayout, lay_out
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.optim.optimizer import AdamW, Optimizer
from tllm.training.parameter_server.client import ParameterServerClient
from tllm.training.parameter_server.connections import ReplicaLinks
from tllm.training.parameter_server.segments import row_table, segments
from tllm.training.parameter_server.server import ParameterServer
from tllm.training.parameter_server.server_state import ServerState
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.step.model_chunks import build_chunks, parameters_of
from tllm.training.step.pipeline_step import TrainStage, run_schedule
from tllm.training.step.pipeline_wires import Wires

LIMIT = 4096
"""Bytes of a bucket: many for a small model."""


def lines_between(
    replicas: int, servers: int, deadline: float = 20.0
) -> tuple[list[list[ReplicaLinks]], list[list[ReplicaLinks]]]:
    """Each replica's lines to the servers, and each server's to the replicas. Replicas are the first ranks."""
    to_server = {(r, s): LocalLink(r, replicas + s, deadline) for r in range(replicas) for s in range(servers)}
    to_replica = {(r, s): LocalLink(replicas + s, r, deadline) for r in range(replicas) for s in range(servers)}
    return (
        [[ReplicaLinks(to_server[r, s], to_replica[r, s]) for s in range(servers)] for r in range(replicas)],
        [[ReplicaLinks(to_replica[r, s], to_server[r, s]) for r in range(replicas)] for s in range(servers)],
    )


def buckets_of(parameters: Sequence[nn.Parameter], limit: int = LIMIT) -> GradientBuckets:
    return GradientBuckets(
        BucketLayout(parameters, GradientGroups(solo()), 0, limit), ReplicatedParameters(parameters, solo())
    )


def state_of(
    parameters: Sequence[nn.Parameter],
    table: int | None,
    server: int,
    servers: int,
    optimizer: Optimizer,
    weight_decay: float = 0.0,
    limit: int = LIMIT,
) -> ServerState:
    buckets = lay_out(parameters, limit)
    return ServerState(
        parameters, buckets, segments(buckets, parameters, table, server, servers), optimizer, weight_decay
    )


@dataclass
class Replica:
    """One that computes: the whole model on one rank."""

    number: int
    shares: tuple[int, ...]
    chunks: list[Transformer]
    update: ParameterServerClient

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.update.buckets.layout.parameters

    def step(self, batch: list[Tokens], rate: float) -> tuple[float, float]:
        """This replica's part of the mean loss, and the norm, of the next step."""
        mine, everyones = dealt(batch, self.shares)[self.number], predicted(batch)
        self.update.begin(mine)
        self.update.buckets.begin(len(mine))
        loss = 0.0
        if mine:
            schedule, objective = (
                build_schedule("gpipe", 1, len(mine)),
                NextTokenLoss(Layout().meshes(self.chunks[0].spec)[0]),
            )
            scale = self.update.scale(predicted(mine), everyones)
            stage = TrainStage(0, self.chunks, Wires(), objective)
            loss = run_schedule(schedule, stage, mine, scale).loss_sum
        self.update.buckets.finish()
        norm = self.update.apply(self.update.step + 1, rate)
        return loss * (1 / everyones), norm


@dataclass
class Served:
    """All ranks of a plan with servers."""

    replicas: list[Replica]
    servers: list[ParameterServer]

    def run(self, work: Callable[[Replica], Any], saves: Sequence[Callable[[int], None]] = ()) -> list[Any]:
        """`work` on every replica, which says farewell after it, while the servers serve; results by replica."""

        def of(replica: Replica) -> Any:
            result = work(replica)
            replica.update.close()
            return result

        tasks: list[Callable[[], Any]] = [partial(of, replica) for replica in self.replicas]
        for number, server in enumerate(self.servers):
            tasks.append(partial(server.run, saves[number]) if saves else server.run)
        return in_threads(tasks)[: len(self.replicas)]

    @property
    def blocks(self) -> list[list[TensorBlock]]:
        return [server.state.blocks() for server in self.servers]

    def saved(self, shapes: Named, state: str = "") -> Named:
        """Whole tensors put together of the servers' blocks; every element must be held once."""
        named: Named = {}
        count = {name: torch.zeros(whole.shape, dtype=torch.int8) for name, whole in shapes.items()}
        for block in (block for of_server in self.blocks for block in of_server):
            owner, _, name = block.name.rpartition("/")
            if owner == state:
                box = tuple(slice(*ends) for ends in block.box)
                named.setdefault(name, torch.empty(shapes[name].shape, dtype=block.tensor.dtype))[box] = block.tensor
                count[name][box] += 1
        assert all(bool((times == 1).all()) for times in count.values())
        return named


def served(
    folder: Path,
    shares: tuple[int, ...],
    servers: int,
    dtype: torch.dtype,
    optimizer: Optimizer | None = None,
    weight_decay: float = 0.0,
    clip: float = 0.0,
    max_staleness: int = 0,
    by_rows: bool = True,
) -> Served:
    """The ranks, of which only replica 0 has the folder's weights: in the others' place there are NaNs."""
    spec, layout = spec_of(folder), Layout()
    up, down = lines_between(len(shares), servers)
    replicas = []
    for number in range(len(shares)):
        chunks = chunks_of(spec, folder, layout, layout.meshes(spec)[0], dtype)
        parameters = parameters_of(chunks)
        if number > 0:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.fill_(torch.nan)
        table = row_table(chunks[0], parameters) if by_rows else None
        update = ParameterServerClient(buckets_of(parameters), table, up[number], max_staleness, clip)
        replicas.append(Replica(number, shares, chunks, update))
    rule, ranks = optimizer or AdamW(), []
    for server in range(servers):
        empty = build_chunks(spec, layout.meshes(spec)[0], layout.places(spec.num_layers), dtype, "meta")
        parameters = parameters_of(empty)
        table = row_table(empty[0], parameters) if by_rows else None
        state = state_of(parameters, table, server, servers, rule, weight_decay)
        ranks.append(ParameterServer(state, down[server], max_staleness))
    return Served(replicas, ranks)


def train_served(
    folder: Path,
    shares: tuple[int, ...],
    servers: int,
    batches: list[list[Tokens]],
    dtype: torch.dtype,
    shapes: Named,
    rate: float,
    damage: Callable[[Served], None] = lambda ranks: None,
    **options: Any,
) -> tuple[list[float], list[float], Named]:
    """Losses and norms by step, and the weights that the servers hold after them."""
    ranks = served(folder, shares, servers, dtype, **options)
    damage(ranks)

    def learn(replica: Replica) -> list[tuple[float, float]]:
        if replica.number == 0:
            replica.update.give()
        return [replica.step(batch, rate) for batch in batches]

    results = ranks.run(learn)
    losses = [sum(of_replica[step][0] for of_replica in results) for step in range(len(batches))]
    return losses, [norm for _, norm in results[0]], ranks.saved(shapes)
