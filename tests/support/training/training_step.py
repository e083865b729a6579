"""One step of training under a layout, its ranks as threads, and the same step by `transformers`: gradients by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.reference_gradients import forget_corrections
from tests.support.models.slow_load import slices, slow_load, text_tensors_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.links.link import LocalLink
from tllm.model.transformer import Transformer
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import Mesh
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import shard_of
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import Schedule
from tllm.spec.pipeline_schedule import build as build_schedule
from tllm.spec.plan import Experts, Recompute, Zero
from tllm.spec.process_groups import targets
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.attention.packed_attention import MakeAttend, TrainAttend
from tllm.training.attention.ring_attention import RingAttention
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.packing import deal
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.objectives.objective import Objective
from tllm.training.optim.optimizer import AdamW, Optimizer
from tllm.training.optim.sharded_update import OptimizerUpdate
from tllm.training.optim.zero3 import Zero3Gathering, unit_numbers, units_of
from tllm.training.state.optimizer_offload import StatePlacement
from tllm.training.step.model_chunks import build_chunks, parameters_of
from tllm.training.step.pipeline_step import TrainStage, run_schedule
from tllm.training.step.pipeline_wires import Wires
from tllm.training.step.recompute import recompute

Named = dict[str, Tensor]
Mutate = Callable[[int, list[Transformer]], None]
Learn = Callable[[transformers.PreTrainedModel, list[Tokens]], float]


@dataclass(frozen=True)
class Layout:
    """Where the work is done. `layers` of each place in the model's order, as even as can be when left out.

    `shares` of the tp ranks, one list for all stages or one for each; `dp` holds how many microbatches of each five
    a replica takes, `cp` how many ranks share each one's tokens, `ep` how many replicas in a row spread experts.
    """

    stages: int = 1
    order: str = "gpipe"
    chunks: int = 1
    depth: int = 1
    layers: tuple[int, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ((1,),)
    sequence: bool = False
    dp: tuple[int, ...] = (1,)
    cp: int = 1
    ep: int = 1
    experts: Experts = "cut"
    zero: Zero = 0
    recompute: Recompute = "none"
    deterministic: bool = False

    def schedule(self, microbatches: int) -> Schedule:
        depth = {"depth": self.depth} if self.order in ("1f1b", "zero_bubble") else {}
        return build_schedule(self.order, self.stages, microbatches, chunks=self.chunks, **depth)

    def places(self, num_layers: int) -> list[range]:
        """The layers of every place, in the model's order."""
        count = self.stages * self.chunks
        ends = [num_layers * place // count for place in range(1, count + 1)]
        starts = itertools.accumulate(self.layers, initial=0) if self.layers else [0, *ends]
        return [range(a, b) for a, b in itertools.pairwise(starts)]

    def tp(self, stage: int) -> tuple[int, ...]:
        return self.shares[stage % len(self.shares)]

    def meshes(self, spec: ModelSpec) -> list[Mesh]:
        """Of each rank of one replica, without layers: these are its chunks'."""
        made = []
        for stage in range(self.stages):
            cuts = cut_stage(spec, self.tp(stage), self.experts, self.ep)
            for group, cut in zip(local_groups(len(cuts)), cuts, strict=True):
                made.append(Mesh(stage, self.stages, range(0), group, cut, self.sequence))
        return made

    def gradient_groups(self) -> list[GradientGroups]:
        """Of the rank at one place of each replica and each cp rank, replica by replica."""
        dps, rows = local_groups(len(self.dp) * self.cp, name="dp"), range(len(self.dp) // self.ep)
        eps = [[local_groups(self.ep, name="ep") for _ in range(self.cp)] for _ in rows]
        edps = [local_groups(len(rows) * self.cp, name="edp") for _ in range(self.ep)]
        made = []
        for dp, (replica, cp) in zip(dps, itertools.product(range(len(self.dp)), range(self.cp)), strict=True):
            row, place = divmod(replica, self.ep)
            made.append(GradientGroups(dp, edps[place][row * self.cp + cp], eps[row][cp][place]))
        return made


def random_tokens(count: int, seed: int = 3, vocab: int = 101) -> list[Tokens]:
    """Microbatches of unequal lengths, each of several documents, some of whose tokens are not predicted."""
    dice = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        lengths = [5 + (index * 3) % 7, 9, 2 + index % 3]
        total = sum(lengths)
        ids_T = torch.randint(0, vocab, (total,), generator=dice)
        labels_T = torch.randint(0, vocab, (total,), generator=dice)
        labels_T[torch.rand(total, generator=dice) < 0.2] = -100
        made.append(Tokens(ids_T, labels_T, torch.cat([torch.arange(n) for n in lengths]), lengths))
    return made


def predicted(microbatches: list[Tokens]) -> int:
    return sum(microbatch.predicted for microbatch in microbatches)


def saved(folder: Path) -> Named:
    """Every tensor of a folder, by the checkpoint's names."""
    return text_tensors_of(folder)


def gradients_of_transformers(
    model: transformers.PreTrainedModel, microbatches: list[Tokens], folder: Path, learn: Learn | None = None
) -> tuple[float, Named]:
    """Mean loss and gradients of a plain loop over documents; `folder` is where it may save them as weights.

    Saving is what gives them the checkpoint's names and shapes, which are not those of all models in memory.
    """
    model.zero_grad()
    loss = (learn or learn_documents)(model, microbatches)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            ours.copy_(torch.zeros_like(ours) if theirs.grad is None else theirs.grad)
        forget_corrections(twin)
    twin.save_pretrained(folder)
    return loss, saved(folder)


def learn_documents(model: transformers.PreTrainedModel, microbatches: list[Tokens]) -> float:
    """The mean loss over predicted tokens, one document at a time; its gradients are added to the parameters'."""
    total = predicted(microbatches)
    loss = 0.0
    for microbatch in microbatches:
        documents = zip(
            microbatch.ids_T.split(microbatch.lengths), microbatch.labels_T.split(microbatch.lengths), strict=True
        )
        for ids_T, labels_T in documents:
            part = F.cross_entropy(model(ids_T[None]).logits[0], labels_T, reduction="sum") / total
            part.backward()
            loss += part.item()
    return loss


def chunks_of(spec: ModelSpec, folder: Path, layout: Layout, mesh: Mesh, dtype: torch.dtype) -> list[Transformer]:
    """One rank's chunks, filled and ready to learn."""
    chunks = build_chunks(spec, mesh, layout.places(spec.num_layers), dtype)
    for model in chunks:
        slow_load(model, folder)
    return chunks


def wires_of(layout: Layout) -> list[Wires]:
    """Of each rank of one replica."""
    sizes = [len(layout.tp(stage)) for stage in range(layout.stages)]
    ranks = [(stage, place) for stage in range(layout.stages) for place in range(sizes[stage])]
    links: dict[tuple[tuple[int, int], tuple[int, int]], LocalLink] = {}
    for a, (stage, place) in enumerate(ranks):
        for other in range(layout.stages):
            if other != stage:
                for there in targets(place, sizes[stage], sizes[other]):
                    links[(stage, place), (other, there)] = LocalLink(a, ranks.index((other, there)))
    return [
        Wires(
            {
                other: [link for (a, b), link in links.items() if a == here and b[0] == other]
                for other in range(layout.stages)
                if other != here[0]
            },
            {a[0]: link for (a, b), link in links.items() if b == here},
        )
        for here in ranks
    ]


@dataclass
class Rank:
    """One rank: its model, and all that turns microbatches into new weights."""

    layout: Layout
    replica: int
    mesh: Mesh
    chunks: list[Transformer]
    wires: Wires
    groups: GradientGroups
    group: Group
    cp: Group
    optimizer: Optimizer
    weight_decay: float
    clip: float | None
    place: StatePlacement | None = None

    def build(self) -> None:
        """What needs the other ranks to be there."""
        self.parameters = parameters_of(self.chunks)
        self.ring = RingAttention(self.cp)
        whole: MakeAttend = self.ring if self.cp.size > 1 else TrainAttend
        self.make_attend = recompute(self.layout.recompute, self.chunks, whole)
        units = units_of(self.chunks)
        self.buckets = GradientBuckets(
            BucketLayout(
                self.parameters,
                self.groups,
                self.layout.zero,
                4096,
                units=unit_numbers(units, self.parameters) if self.layout.zero == 3 else None,
            ),
            ReplicatedParameters(self.parameters, self.group),
            deterministic=self.layout.deterministic,
        )
        self.update = OptimizerUpdate(self.buckets, self.optimizer, self.weight_decay, self.place)
        self.gathering = Zero3Gathering(units, self.update.flat, self.buckets)
        self.norm = GradientNorm(self.buckets, deterministic=self.layout.deterministic)

    def stage(self, objective: Objective | None = None) -> TrainStage:
        """What the rank computes with, for the usual loss or another one."""
        loss = objective or NextTokenLoss(self.mesh)
        return TrainStage(self.mesh.stage, self.chunks, self.wires, loss, self.make_attend)

    def gradients(self, microbatches: list[Tokens]) -> float:
        """One pass over a global batch; this rank's part of the mean loss."""
        mine = [cut_tokens(m, self.cp.rank, self.cp.size) for m in dealt(microbatches, self.layout.dp)[self.replica]]
        scale = 1 / predicted(microbatches)
        self.buckets.begin(len(mine))
        self.gathering.begin(len(mine))
        if self.mesh.balance is not None:
            self.mesh.balance.begin(len(microbatches))
        loss = 0.0
        if mine:
            loss = run_schedule(self.layout.schedule(len(mine)), self.stage(), mine, scale).loss_sum
        self.buckets.finish()
        self.gathering.finish()
        return loss * scale if self.mesh.tp.rank == 0 else 0.0

    def step(self, number: int, microbatches: list[Tokens], rate: float) -> tuple[float, float]:
        """Loss (this rank's part) and norm of the gradient of step `number`, counted from 1."""
        loss = self.gradients(microbatches)
        norm = self.norm.norm() if self.clip is None else self.norm.clip(self.clip)
        self.update.apply(number, rate)
        return loss, norm

    def make_whole(self) -> None:
        """Have all weights here, as nothing but a test wants them."""
        for number in range(len(self.buckets.layout.buckets)):
            if self.update.flat.is_sharded(number):
                self.update.flat.allocate(number)
                self.update.flat.gather(number)


def dealt(microbatches: list[Tokens], shares: tuple[int, ...]) -> list[list[Tokens]]:
    return [[microbatches[i] for i in part] for part in deal(len(microbatches), shares)]


def ranks_of(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    optimizer: Optimizer | None = None,
    weight_decay: float = 0.0,
    clip: float | None = None,
    mutate: Mutate = lambda rank, chunks: None,
    balance: float = 0.0,
    place: StatePlacement | None = None,
) -> list[Rank]:
    """Every rank of every replica, replica by replica. `balance` is the load-balance loss's coefficient."""
    spec = spec_of(folder)
    size = sum(len(layout.tp(stage)) for stage in range(layout.stages))
    sums = [layout.gradient_groups() for _ in range(size)]
    ranks = []
    cps = [[local_groups(layout.cp, name="cp") for _ in range(size)] for _ in layout.dp]
    for replica, c in itertools.product(range(len(layout.dp)), range(layout.cp)):
        groups, wires = local_groups(size, name="replica"), wires_of(layout)
        for at, bare in enumerate(layout.meshes(spec)):
            summed, cp = sums[at][replica * layout.cp + c], cps[replica][at][c]
            mesh = with_experts(spec, bare, summed.ep, balance, cp)
            chunks = chunks_of(spec, folder, layout, mesh, dtype)
            mutate(len(ranks), chunks)
            options = (cp, optimizer or AdamW(), weight_decay, clip, place)
            ranks.append(Rank(layout, replica, mesh, chunks, wires[at], summed, groups[at], *options))
    in_threads([rank.build for rank in ranks])
    return ranks


def with_experts(spec: ModelSpec, mesh: Mesh, ep: Group, balance: float, cp: Group) -> Mesh:
    """A mesh whose rank shares experts with those of `ep`, and evens out their load with `cp` if asked."""
    layers = sum(layer.moe is not None for layer in spec.layers)
    return replace(mesh, ep=ep, balance=LoadBalance(balance, layers, mesh.tp, cp) if balance else None)


def gather(ranks: list[Rank], of: Callable[[Rank, int], Tensor], shapes: Named) -> Named:
    """Whole tensors by the checkpoint's names, each element from the first rank of the first replica that holds it."""
    named: Named = {}
    for rank in reversed(ranks):
        for index, parameter in enumerate(rank.parameters):
            tensor = of(rank, index).detach()
            for piece in shard_of(parameter).pieces:
                whole = named.setdefault(
                    piece.name, torch.full(shapes[piece.name].shape, torch.nan, dtype=tensor.dtype)
                )
                part = whole[slices(piece.source)]
                part.copy_(tensor[slices(piece.target)].reshape(part.shape))
    return named


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.buckets.close()
        rank.ring.close()


def gradients_under(
    folder: Path,
    layout: Layout,
    microbatches: list[Tokens],
    dtype: torch.dtype,
    shapes: Named,
    mutate: Mutate = lambda rank, chunks: None,
    balance: float = 0.0,
) -> tuple[float, Named]:
    """Mean loss and gradients of one step under a layout."""
    ranks = ranks_of(folder, layout, dtype, mutate=mutate, balance=balance)
    loss = sum(in_threads([partial(rank.gradients, microbatches) for rank in ranks]))
    named = gather(ranks, lambda rank, index: rank.buckets.accumulator.view(index), shapes)
    close(ranks)
    return loss, named


def train_under(
    folder: Path,
    layout: Layout,
    batches: list[list[Tokens]],
    dtype: torch.dtype,
    shapes: Named,
    rate: float,
    damage: Callable[[Rank], None] = lambda rank: None,
    **options: Any,
) -> tuple[list[float], list[float], Named]:
    """Losses and norms by step, and the weights after them. `damage` may break a rank before it begins."""
    ranks = ranks_of(folder, layout, dtype, **options)
    for rank in ranks:
        damage(rank)

    def learn(rank: Rank) -> list[tuple[float, float]]:
        return [rank.step(number, batch, rate) for number, batch in enumerate(batches, 1)]

    results = in_threads([partial(learn, rank) for rank in ranks])
    in_threads([rank.make_whole for rank in ranks])
    named = gather(ranks, lambda rank, index: rank.parameters[index], shapes)
    close(ranks)
    losses = [sum(of_rank[i][0] for of_rank in results) for i in range(len(batches))]
    return losses, [norm for _, norm in results[0]], named


def furthest(got: Named, want: Named) -> tuple[float, str]:
    """The largest difference of a parameter from what it should be relative to its size, and whose it is."""
    assert set(got) == set(want), set(got) ^ set(want)
    return max(
        (float((got[name].double() - want[name].double()).norm() / want[name].double().norm()), name) for name in want
    )
