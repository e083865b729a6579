"""`verify`: compares the divided model, in processes of this machine, with the undivided one, on the user's weights."""

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
from tllm.core.errors import ClusterError, TllmError, decoded
from tllm.engine.schedule.limits import Limits
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming, local_names
from tllm.node.coordinator.job import check_pieces
from tllm.node.coordinator.workload import Workload
from tllm.node.roles.comparison_record import Compared, digest, part_of, place_of
from tllm.node.roles.reference_model import batches_of, limits_for, write_reference
from tllm.node.verify.verdict import Damaged, Differs, Pass
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_form import with_weight_form
from tllm.weights.boxes import Box, show
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import read_piece

_COMPARED = msgspec.json.Decoder(Compared)

LINK_SECONDS = 30.0
"""How long a rank waits for a message of another one."""


class VerifyJob:
    """A coordinator's job in which all ranks compute one prompt together, and each compares what it computed with the
    reference. One that fails ends it."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self._results: asyncio.Queue[Compared | TllmError] = asyncio.Queue()
        self.fault: TllmError | None = None
        self.coordinator = Coordinator(self, work, authority, address, first)

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        await self.coordinator.form(seconds, on_progress)

    async def compared(self) -> list[Compared]:
        """What each rank found, by rank."""
        results: dict[int, Compared] = {}
        while len(results) < self.coordinator.work.plan.world_size:
            result = await self._results.get()
            if isinstance(result, TllmError):
                raise result
            results[result.rank] = result
        return [results[rank] for rank in sorted(results)]

    def fail(self, error: TllmError) -> None:
        """End the comparison with this."""
        self.fault = error
        self._results.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        check_pieces(prepared)

    def acts(self, node: str) -> Mapping[type, Act]:
        async def compared(message: News) -> None:
            result = decoded(message.content, _COMPARED, f"{node} sent findings that are none", ClusterError)
            member = self.coordinator.state.member(node)
            if member is None or member.rank != result.rank:
                raise ClusterError(f"{node} spoke for rank {result.rank}")
            self._results.put_nowait(result)

        return {News: compared}

    def adopt(self, work: Workload) -> Workload:
        return work


async def verify(
    folder: Path,
    plan: Plan,
    dtype: str,
    token_ids: tuple[int, ...],
    *,
    threads: int = 0,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> Pass:
    """Compare in one dtype. The undivided model is run first, layer by layer and on the processor, then the ranks as
    processes, each on its `device`."""
    raw = with_weight_form(read_config(folder), None, dequantize=True)
    spec = spec_from_config(raw)
    plan.check(spec.num_layers)
    limits = limits_for(spec, len(token_ids))
    with tempfile.TemporaryDirectory(prefix="tllm-verify-") as reference:
        batches = batches_of(token_ids, limits)
        await asyncio.to_thread(write_reference, folder, Path(reference), spec, torch_dtype(dtype), batches, limits)
        settings = settings_for(limits, dtype, token_ids, reference)
        nodes = local_names(plan, None)
        job = VerifyJob(Workload(folder, json.dumps(raw), plan, settings), Authority.create(), LOOPBACK, nodes)
        options = ClusterOptions(threads=threads, device=device, on_progress=on_progress)
        async with forming(job, nodes, LOOPBACK[0], options):
            results = await job.compared()
    return await asyncio.to_thread(as_pass, results, folder, dtype, spec.num_layers)


def settings_for(limits: Limits, dtype: str, token_ids: tuple[int, ...], reference: str) -> VerifySettings:
    """What every rank is told. `reference` is the folder of what the undivided model gave."""
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
    return VerifySettings(engine=engine, token_ids=token_ids, truth=reference, threads=0, link_seconds=LINK_SECONDS)


def as_pass(results: Sequence[Compared], folder: Path, dtype: str, num_layers: int) -> Pass:
    """What differs, and which pieces are not as in the files, each in the model's order."""
    differs = [
        Differs(result.rank, part.what, place_of(part.what, num_layers), part.largest, part.relative)
        for result in results
        for part in result.differences
        if not part.equal
    ]
    damaged = list(_damaged(results, folder, dtype))
    return Pass(
        dtype,
        tuple(sorted(differs, key=lambda part: (part.place, part.rank))),
        tuple(sorted(damaged, key=lambda piece: (place_of(piece.layer, num_layers), piece.rank, piece.name))),
    )


def _damaged(results: Sequence[Compared], folder: Path, dtype: str) -> Iterator[Damaged]:
    """Pieces whose elements are not those of the files, which are read here once for each different piece."""
    source = LocalFiles(folder)
    index = open_index(source, read_config(folder))
    known: dict[tuple[str, Box], str] = {}
    for result in results:
        for held in result.fingerprints:
            piece = (held.name, held.box)
            if piece not in known:
                known[piece] = digest(read_piece(*piece, index, source).to(torch_dtype(dtype)))
            if held.digest != known[piece]:
                yield Damaged(result.rank, part_of(held.name), held.name, show(held.box) if held.box else "")
