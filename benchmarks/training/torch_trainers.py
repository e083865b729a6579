"""Trainers to compare with, on the same rows and weights: a plain loop, `transformers`, torch's DDP and FSDP2.

`python -m benchmarks.training.torch_trainers WAY FOLDER ROWS [--ranks 2 --rank R --address HOST --port PORT]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.processes.turns import Turns
from benchmarks.training.plain_llama import PlainLayer, PlainModel, plain_model

RATE, DECAY, CLIP = 3e-4, 0.1, 1.0
DDP_BUCKET = 25 * 2**20 // 4  # elements; what DDP sums at once

Loss = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("plain", "transformers", "ddp", "fsdp2", "sums"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dtype", default="float32", help="bfloat16: products in it, weights stay float32")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step on this rank")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.ranks > 1:
        where = f"tcp://{options.address}:{options.port}"
        wait = timedelta(minutes=10)
        dist.init_process_group("gloo", where, wait, rank=options.rank, world_size=options.ranks)
    rows = torch.tensor([json.loads(line)["input_ids"] for line in options.rows.read_text().splitlines()])
    if options.way == "sums":
        repeat_sums(plain_model(options.folder, rows.shape[1]))
    else:
        train(options, rows, torch.bfloat16 if options.dtype == "bfloat16" else None)


def train(options: argparse.Namespace, rows: Tensor, narrow: torch.dtype | None) -> None:
    """Take steps over the rows in their order, whenever it is this trainer's turn."""
    if options.way == "transformers":
        loss, model = transformers_model(options.folder)
    else:
        plain = plain_model(options.folder, rows.shape[1])
        model = wrapped(plain, options.way, narrow)
        loss = model
    decayed, kept = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=decayed, weight_decay=DECAY), dict(params=kept, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    casts = narrow is not None and options.way != "fsdp2"  # FSDP2 casts by its own policy
    turns, at = Turns(cpu=time.process_time), options.rank * options.batch
    turns()
    while True:
        ids_BT = rows[[(at + row) % len(rows) for row in range(options.batch)]]
        at += options.batch * options.ranks
        with torch.autocast("cpu", narrow) if casts else contextlib.nullcontext():
            value = loss(ids_BT)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns(value.item())


def wrapped(model: PlainModel, way: str, narrow: torch.dtype | None) -> nn.Module:
    """The model as one process, or torch's own data parallel, trains it."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None)
        for part in [*model.layers, model]:
            assert isinstance(part, PlainLayer | PlainModel)
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def transformers_model(folder: Path) -> tuple[Loss, nn.Module]:
    from transformers import AutoModelForCausalLM  # not at the top: only one of the trainers needs its long import

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    return lambda ids_BT: model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss, model


def repeat_sums(model: nn.Module) -> None:
    """All-reduce what DDP sends in a step, again and again, and compute nothing."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    runs = torch.split(torch.ones(elements), DDP_BUCKET)
    turns = Turns(cpu=time.process_time)
    turns()
    while True:
        for run in runs:
            dist.all_reduce(run)
        turns(0.0)


if __name__ == "__main__":
    main()
