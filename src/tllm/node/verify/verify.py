"""`verify`: runs the split model, in processes of this machine, beside the unsplit one, on the user's own weights."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import News, Prepared
from tllm.cluster.settings import EngineSettings, VerifySettings
from tllm.core.errors import UNREADABLE, ClusterError, TllmError
from tllm.engine.schedule.limits import Limits
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming, local_names
from tllm.node.coordinator.workload import Workload
from tllm.node.roles.comparison_record import Compared, digest, part_of, place_of
from tllm.node.roles.reference_model import batches_of, limits_for, write_reference
from tllm.node.verify.verdict import Damaged, Differs, Pass
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.weights.boxes import Box, show
from tllm.weights.byte_source import LocalFiles
from tllm.weights.coverage import HeldBlock, check_coverage
from tllm.weights.dtypes import torch_dtype
from tllm.weights.safetensors_index import Index

LINK_SECONDS = 30.0


class VerifyJob:
    """A cluster whose ranks each compute one prompt together and say what they found. One that fails ends it."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self._found: asyncio.Queue[Compared | TllmError] = asyncio.Queue()
        self.fault: TllmError | None = None
        self.coordinator = Coordinator(self, work, authority, address, first)

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        await self.coordinator.form(seconds, on_progress)

    async def compared(self) -> list[Compared]:
        """What each rank found, by rank."""
        found: dict[int, Compared] = {}
        while len(found) < self.coordinator.work.plan.world_size:
            one = await self._found.get()
            if isinstance(one, TllmError):
                raise one
            found[one.rank] = one
        return [found[rank] for rank in sorted(found)]

    def fail(self, error: TllmError) -> None:
        """End the comparison with this."""
        self.fault = error
        self._found.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Each element that the model needs is held exactly once, or as often as the plan means it to be."""
        held = {
            rank: [HeldBlock(piece.name, piece.source, piece.replicated) for piece in one.pieces]
            for rank, one in prepared.items()
        }
        check_coverage(held, prepared[0].needed)

    def acts(self, node: str) -> Mapping[type, Act]:
        async def news(message: News) -> None:
            try:
                found = msgspec.json.decode(message.content, type=Compared)
            except UNREADABLE as error:
                raise ClusterError(f"{node} sent findings that are none: {error}") from error
            member = self.coordinator.state.member(node)
            if member is None or member.rank != found.rank:
                raise ClusterError(f"{node} spoke for rank {found.rank}")
            self._found.put_nowait(found)

        return {News: news}

    def adopt(self, work: Workload) -> Workload:
        return work


async def verify(
    folder: Path,
    plan: Plan,
    dtype: str,
    token_ids: tuple[int, ...],
    *,
    threads: int = 0,
    on_progress: OnProgress | None = None,
) -> Pass:
    """Compare in one dtype. The unsplit model is run first, layer by layer, then the ranks as processes."""
    raw = read_config(folder)
    spec = spec_from_config(raw)
    plan.check(spec.num_layers)
    limits = limits_for(spec, len(token_ids))
    with tempfile.TemporaryDirectory(prefix="tllm-verify-") as truth:
        batches = batches_of(token_ids, limits)
        await asyncio.to_thread(write_reference, folder, Path(truth), spec, torch_dtype(dtype), batches, limits)
        settings = settings_for(limits, dtype, token_ids, truth)
        nodes = local_names(plan, None)
        run = VerifyJob(Workload(folder, json.dumps(raw), plan, settings), Authority.create(), LOOPBACK, nodes)
        async with forming(run, nodes, LOOPBACK[0], ClusterOptions(threads=threads, on_progress=on_progress)):
            found = await run.compared()
    return await asyncio.to_thread(as_pass, found, folder, dtype, spec.num_layers)


def settings_for(limits: Limits, dtype: str, token_ids: tuple[int, ...], truth: str) -> VerifySettings:
    """What every rank is told."""
    engine = EngineSettings(
        dtype=dtype,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        threads=0,
        link_seconds=LINK_SECONDS,
    )
    return VerifySettings(engine=engine, token_ids=token_ids, truth=truth, threads=0, link_seconds=LINK_SECONDS)


def as_pass(found: Sequence[Compared], folder: Path, dtype: str, num_layers: int) -> Pass:
    """What differs, and which pieces are not as in the files, each in the model's order."""
    differs = [
        Differs(one.rank, part.what, place_of(part.what, num_layers), part.largest, part.relative)
        for one in found
        for part in one.differences
        if not part.equal
    ]
    damaged = list(_damaged(found, folder, dtype))
    return Pass(
        dtype,
        tuple(sorted(differs, key=lambda one: (one.place, one.rank))),
        tuple(sorted(damaged, key=lambda one: (place_of(one.layer, num_layers), one.rank, one.name))),
    )


def _damaged(found: Sequence[Compared], folder: Path, dtype: str) -> Iterator[Damaged]:
    """Pieces whose elements are not those of the files, which are read here once for each different piece."""
    source = LocalFiles(folder)
    index = Index.read(source)
    known: dict[tuple[str, Box], str] = {}
    for one in found:
        for held in one.fingerprints:
            piece = (held.name, held.box)
            if piece not in known:
                known[piece] = digest(index.slice(source, *piece).to(torch_dtype(dtype)))
            if held.digest != known[piece]:
                yield Damaged(one.rank, part_of(held.name), held.name, show(held.box) if held.box else "")
