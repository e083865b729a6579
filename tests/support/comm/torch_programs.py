"""PyTorch programs for several ranks, which know nothing of the backend that they run on; float64 throughout.

Each is `program(rank, size)` with a default process group that is up, and gives tensors as nested lists.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tllm.core.errors import TllmError

WIDTH, LAYERS, TOKENS, WORDS = 16, 2, 6, 20
STEPS = 3


class Words(nn.Module):
    """A small transformer that guesses the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """A residual block whose tokens may be cut outside of its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def fresh() -> Words:
    torch.manual_seed(7)
    return Words().double()


def train(model: nn.Module, parameters: list[Tensor], rank: int) -> list[float]:
    """A few steps, on words of this rank's own."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    words = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (2, TOKENS + 1), generator=words)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank: int, size: int) -> Any:
    """Gradients in many small buckets, summed while the backward pass goes on."""
    model = fresh()
    if rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # DDP takes rank 0's
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
    losses = train(wrapped, list(wrapped.parameters()), rank)
    return [losses, *(parameter.tolist() for parameter in model.parameters())]


def fsdp2(rank: int, size: int) -> Any:
    return _sharded(rank, init_device_mesh("cpu", (size,)))


def hybrid(rank: int, size: int) -> Any:
    """FSDP2 in groups of two whose gradients are summed between groups."""
    return _sharded(rank, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))


def _sharded(rank: int, mesh: Any) -> Any:
    model = fresh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, list(model.parameters()), rank)
    return [losses, *(parameter.full_tensor().tolist() for parameter in model.parameters())]


def titan(rank: int, size: int) -> Any:
    """As torchtitan trains: a mesh of two dimensions, tensor and sequence parallel layers that FSDP2 shards, gradients
    clipped over the whole mesh, the loss averaged, and a checkpoint that is read again in mid-run."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *(Block() for _ in range(LAYERS)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    ).double()
    cut: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        str(LAYERS + 1): SequenceParallel(),
        str(LAYERS + 2): ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(1, LAYERS + 1):
        whole_rows = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        cut |= {f"{number}.norm": SequenceParallel(), f"{number}.mlp": whole_rows}
        cut |= {f"{number}.mlp.0": ColwiseParallel(), f"{number}.mlp.2": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, mesh["tp"], cut)
    for block in model[1 : LAYERS + 1]:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    words, found = torch.Generator().manual_seed(mesh.get_local_rank("dp_shard")), []
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    for step in range(STEPS):
        ids = torch.randint(0, WORDS, (2, TOKENS + 1), generator=words)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp_shard"].get_group())
        found.append([mean.item() / mesh["dp_shard"].size(), norm.full_tensor().item()])
        state: dict[str, Any] = {"model": model.state_dict()}
        if step == 0:
            checkpoint.save(state, checkpoint_id=folder[0])
        if step == 1:
            checkpoint.load(state, checkpoint_id=folder[0])
            model.load_state_dict(state["model"])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return [found, *(parameter.full_tensor().tolist() for parameter in model.parameters())]


def dtensor(rank: int, size: int) -> Any:
    """A cut MLP, and tensors that change how they are cut."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).double()
    cut = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = cut(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad.full_tensor().tolist() for p in cut.parameters() if isinstance(p.grad, DTensor)]
    whole = torch.arange(7.0 * 5, dtype=torch.float64).view(7, 5)
    moved = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    return [y.tolist(), x.grad.tolist(), grads, moved.to_local().tolist()]


def traced(rank: int, size: int) -> Any:
    """Functional collectives, whose results wait for themselves."""
    everyone = dist.group.WORLD
    x = torch.arange(4.0 * size, dtype=torch.float64).view(2 * size, 2) + rank
    found = [
        functional.all_reduce(x, "sum", everyone),
        functional.all_reduce(x, "avg", everyone),
        functional.all_gather_tensor(x, 1, everyone),
        functional.reduce_scatter_tensor(x, "sum", 0, everyone),
        functional.all_to_all_single(x, None, None, everyone),
        functional.broadcast(x, 1, everyone),
        *functional.all_reduce_coalesced([x, 2 * x], "max", everyone),
    ]
    return [functional.wait_tensor(one).tolist() for one in found]


def plain(rank: int, size: int) -> Any:
    """What user code calls by hand, objects and smaller groups included."""
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(3, dtype=torch.float64)
    ops = [
        dist.P2POp(dist.irecv, got, before),
        dist.P2POp(dist.isend, torch.full((3,), rank, dtype=torch.float64), after),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    said: list[Any] = [None] * size
    dist.all_gather_object(said, {"rank": rank, "text": "x" * (rank + 1)})
    told = ["from the last"] if rank == size - 1 else [None]
    dist.broadcast_object_list(told, src=size - 1)
    pairs = [dist.new_group([a, a + 1]) for a in range(0, size - 1, 2)]
    x = torch.full((2,), rank, dtype=torch.float64)
    mine = pairs[rank // 2] if rank // 2 < len(pairs) else None
    if mine is not None:
        dist.all_reduce(x, group=mine)
        dist.broadcast(x, src=2 * (rank // 2) + 1, group=mine)
    local = dist.new_group([0, size - 1], use_local_synchronization=True)
    if rank in (0, size - 1):
        dist.all_reduce(x, group=local)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 has other names for these two
        whole = torch.zeros(2 * size, dtype=torch.float64)
        dist.all_gather_into_tensor(whole, x)
        part = torch.zeros(2, dtype=torch.float64)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
    if mine is not None:
        dist.destroy_process_group(mine)
    return [got.tolist(), said, told, x.tolist(), whole.tolist(), part.tolist()]


PROGRAMS = {program.__name__: program for program in (ddp, fsdp2, titan, dtensor, traced, plain)}


def everything(rank: int, size: int) -> dict[str, Any]:
    """Every program, one after the other."""
    found = {name: program(rank, size) for name, program in PROGRAMS.items()}
    return found | ({"hybrid": hybrid(rank, size)} if size == 4 else {})


def last_one_dies(rank: int, size: int) -> Any:
    """The last rank is killed while the others wait for it: what these are told, and what they compute without it in
    the same processes, after they have met again by a store of their own."""
    x = torch.ones(5)
    dist.all_reduce(x)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(x)
    except (RuntimeError, TllmError) as error:
        said = f"{type(error).__name__}: {error}"
        return said, _go_on(rank, size - 1, dist.PrefixStore("again", _store()))
    return "nothing", {}


def last_one_dies_in_backward(rank: int, size: int) -> Any:
    """The same where DDP sums gradients, in threads of torch's own; they meet again by the store that they had."""
    model = DistributedDataParallel(fresh(), bucket_cap_mb=0.005)
    ids = torch.arange(TOKENS)[None]
    if rank == size - 1:
        model.module.layers[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for _ in range(2):
            model(ids).sum().backward()
    except (RuntimeError, TllmError) as error:
        return f"{type(error).__name__}: {error}", _go_on(rank, size - 1, _store())
    return "nothing", {}


def _store() -> dist.Store:
    """The one that the process group was made with, without the prefixes that torch has put before its keys."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _go_on(rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    dist.destroy_process_group()
    dist.init_process_group("tllm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return everything(rank, size)
