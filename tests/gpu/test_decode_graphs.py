"""Recorded layers give what layers give, over batches of replies: on a CUDA device, or interpreted without a graph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)
pytest.importorskip("triton")

from tests.support.models.families import save_model  # noqa: E402
from tllm.engine import decode_graphs  # noqa: E402
from tllm.engine.compute.kv_cache import KVCache  # noqa: E402
from tllm.engine.compute.paged_attention import PagedAttend  # noqa: E402
from tllm.engine.compute.positions import positions  # noqa: E402
from tllm.engine.decode_graphs import DecodeGraphs, RecordedBatch  # noqa: E402
from tllm.engine.schedule.batch import Batch, BatchEntry  # noqa: E402
from tllm.engine.schedule.limits import Limits  # noqa: E402
from tllm.kernels.gpu_kernels import gpu_kernels  # noqa: E402
from tllm.model.transformer import build  # noqa: E402
from tllm.parallel.mesh import whole  # noqa: E402
from tllm.spec.families import spec_from_config  # noqa: E402
from tllm.spec.hf_config import read_config  # noqa: E402
from tllm.weights.byte_source import LocalFiles  # noqa: E402
from tllm.weights.formats.open_index import open_index  # noqa: E402
from tllm.weights.load import HeldAs, load  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LIMITS = Limits(num_pages=24, vocab_size=101, max_model_len=96, page_size=4, max_num_seqs=5, max_num_batched_tokens=64)


class Played(NamedTuple):
    """What a graph does, without one: computes again and leaves the result where the first one lay."""

    graphs: DecodeGraphs
    size: int
    x_TD: Tensor

    def replay(self) -> None:
        self.x_TD.copy_(self.graphs._compute(self.size))

    def pool(self) -> None:
        return None


class Interpreted(DecodeGraphs):
    """On the processor, where there are no graphs."""

    def _record(self, size: int, pool: Any) -> RecordedBatch:
        x_TD = self._compute(size)
        return RecordedBatch(Played(self, size, x_TD), x_TD)  # type: ignore[arg-type]


def batch_of(number: int, starts: list[int], pages: list[tuple[int, ...]]) -> Batch:
    entries = [
        BatchEntry(key=n, start=at, count=1, prompt_length=1, page_table=tuple((page, 1) for page in held))
        for n, (at, held) in enumerate(zip(starts, pages, strict=True))
    ]
    return Batch(number, tuple(entries), tuple((7 * number + 3 * n) % 101 for n in range(len(entries))))


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3", "gemma4_e2b"])
@torch.inference_mode()
def test_replies(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    config = read_config(tmp_path)
    spec, source = spec_from_config(config), LocalFiles(tmp_path)
    model = build(spec, whole(spec), torch.float32, "meta")
    load(model, open_index(source, config), source, torch.float32, held=HeldAs(device=DEVICE))
    kernels = gpu_kernels("cuda")
    assert kernels is not None
    caches = [KVCache(model.attention_specs(), LIMITS, torch.float32, device=DEVICE) for _ in range(2)]
    if INTERPRETED:  # a page of the pool in place of the one that a processor's cache has not
        caches[0].spare_page = LIMITS.num_pages - 1
        graphs: DecodeGraphs = Interpreted(model, caches[0], LIMITS, kernels)
    else:
        found = decode_graphs.decode_graphs(model, caches[0], LIMITS)
        assert found is not None
        graphs = found
    pages = [(5, 2, 9), (1, 0, 3), (7, 8, 4), (10, 11, 12), (13, 6, 14)]
    for number in range(9):
        rows = (1, 2, 3, 5, 4)[number % 5]
        batch = batch_of(number, [number + 0 * n for n in range(rows)], pages[:rows])
        assert graphs.takes(batch)
        got = graphs(batch, None)
        ids = torch.tensor(batch.token_ids, device=DEVICE)
        attend = PagedAttend(caches[1], batch.entries)
        want = model(ids, positions(batch, DEVICE), attend, ids_T=ids)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert len(got) == rows
        if number % 2 == 0:  # the next token of the first rows, in another order
            places = list(reversed(range(rows)))[: max(1, rows - 1)]
            tokens_R = torch.tensor([(5 * number + n) % 101 for n in range(rows)], device=DEVICE)
            after = batch_of(number, [number + 1] * len(places), [pages[place] for place in places])
            got = graphs.follow(after, places, tokens_R)
            attend = PagedAttend(caches[1], after.entries)
            want = model(tokens_R[places], positions(after, DEVICE), attend, ids_T=tokens_R[places])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
