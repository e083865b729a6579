"""Ranks of `torch.distributed`: as threads that hold a process group each, or as processes of one program."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions as BackendOptions

from tllm.comm.c10d import backend

T = TypeVar("T")
Case = Callable[[int, int], Any]
SECONDS = 120.0


def options(store: dist.Store, rank: int, size: int, seconds: float = 20.0) -> BackendOptions:
    """What torch gives a backend to make rank `rank` of a group of `size` from."""
    found = BackendOptions()
    found.store, found.group_rank, found.group_size = store, rank, size
    found.timeout, found.group_id, found.global_ranks_in_group = timedelta(seconds=seconds), "test", []
    return found


def thread_groups(size: int, seconds: float = 20.0, store: dist.Store | None = None) -> list[backend.ProcessGroup]:
    """One process group for each of `size` ranks of this process, over TLS and loopback, by a store of their own."""
    store = store or dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        made = [pool.submit(backend.create, options(store, rank, size, seconds), None) for rank in range(size)]
        return [one.result() for one in made]


def on_each(groups: list[backend.ProcessGroup], work: Callable[[Any], T]) -> list[T]:
    """`work` on every rank at once; what it returns, by rank."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def run_processes(case: Case, size: int, backend: str, dying: int | None = None) -> list[Any]:
    """`case(rank, size)` in as many new processes with `backend`; what each returned. An error is raised here.

    Of a rank that is `dying` nothing is heard, and the others do not wait for each other at the end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, case.__module__])
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = list[Connection](), []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (case, rank, size, backend, str(Path(folder, "store")), there, dying is None)
            process = context.Process(target=_be_rank, args=arguments)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            return [None if rank == dying else _answer(rank, end) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                process.join(30)
                process.kill()
                process.join()


def _answer(rank: int, end: Connection) -> Any:
    assert end.poll(SECONDS), f"rank {rank} said nothing within {SECONDS:g} s"
    good, value = end.recv()
    assert good, f"rank {rank} failed:\n{value}"
    return value


def _be_rank(case: Case, rank: int, size: int, backend: str, store: str, end: Connection, together: bool) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    files = dist.FileStore(store, size)
    limit = timedelta(seconds=SECONDS - 10)
    dist.init_process_group(backend, store=files, rank=rank, world_size=size, timeout=limit)
    try:
        value = case(rank, size)
        if together:
            dist.barrier()
    except BaseException as error:
        end.send((False, repr(error)))
        raise
    end.send((True, value))
    dist.destroy_process_group()
