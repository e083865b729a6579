"""What recorded batches read, and which batches are played; what graphs compute is in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm.core.errors import CapacityError
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.decode_graphs import DecodeGraphs, RecordedBatch, sizes_up_to
from tllm.engine.schedule.batch import Batch, BatchEntry
from tllm.engine.schedule.limits import Limits

LIMITS = Limits(num_pages=8, vocab_size=50, max_model_len=10, page_size=4, max_num_seqs=5, max_num_batched_tokens=6)
SPARE = LIMITS.num_pages


class NotRecorded(DecodeGraphs):
    """Graphs that compute nothing."""

    def _record(self, size: int, pool: Any) -> RecordedBatch:
        graph: Any = SimpleNamespace(replay=lambda: None, pool=lambda: None)
        return RecordedBatch(graph, torch.full((size, 1), float(size)))


class Full(DecodeGraphs):
    """On a device whose memory is taken."""

    def _record(self, size: int, pool: Any) -> RecordedBatch:
        raise torch.OutOfMemoryError("out of memory, tried to allocate 2.00 GiB.\nmore")


def made(kind: type[DecodeGraphs]) -> Any:
    """Of a first stage without layers."""
    model: Any = SimpleNamespace(received_width=2, is_first=True, parameters=lambda: iter(()))
    kernels: Any = None
    return kind(model, KVCache({}, LIMITS, torch.float32), LIMITS, kernels)


def batch_of(*sequences: tuple[int, int, tuple[tuple[int, int], ...]], count: int = 1, lora: str = "") -> Batch:
    """Of (token id, position, page table) of each."""
    entries = tuple(
        BatchEntry(key, start, count, 1, table, lora=lora) for key, (_, start, table) in enumerate(sequences)
    )
    return Batch(0, entries, tuple(token for token, _, _ in sequences for _ in range(count)))


def test_a_batch_is_written_where_its_graph_finds_it_and_filled_up() -> None:
    """The context is no whole number of pages; rows of the batch before are of the spare page again."""
    graphs = made(NotRecorded)
    assert graphs._device.tables.shape == (5, 3)
    five = batch_of(*((9, 9, ((number, 3),)) for number in range(5)))
    assert graphs(five, None).flatten().tolist() == [5.0] * 5
    assert graphs._device.positions.tolist() == [9] * 5
    three = batch_of((7, 9, ((6, 1), (0, 2))), (8, 3, ((5, 1),)), (2, 4, ((2, 2),)))
    assert graphs(three, None).flatten().tolist() == [4.0] * 3
    ids, positions, places, _, tiles, tables = (numbers[:4] for numbers in graphs._device)
    assert ids.tolist() == [7, 8, 2, 0] and positions.tolist() == [9, 3, 4, 0]
    assert places.tolist() == [1 * 4 + 1, 5 * 4 + 3, 3 * 4, SPARE * 4]
    assert tiles.tolist() == [[0, 1, 9, 0], [1, 1, 3, 1], [2, 1, 4, 2], [3, 1, 0, 3]]
    assert [tables[0].tolist(), tables[1, 0], tables[2, :2].tolist(), tables[3, 0]] == [[6, 0, 1], 5, [2, 3], SPARE]


def test_a_batch_whose_ids_the_device_alone_knows() -> None:
    """They are tokens of the batch before, of which not all rows go on; the host's numbers of both lie apart."""
    graphs = made(NotRecorded)
    graphs(batch_of(*((9, 4, ((number, 2),)) for number in range(5))), None)
    tokens_R = torch.tensor([40, 41, 42, 43, 44])
    following = batch_of((0, 5, ((1, 2),)), (0, 5, ((4, 2),)), (0, 5, ((2, 2),)))
    assert graphs.follow(following, (1, 4, 2), tokens_R).flatten().tolist() == [4.0] * 3
    ids, positions, places, _, _, tables = (numbers[:4] for numbers in graphs._device)
    assert ids.tolist() == [41, 44, 42, 0] and positions.tolist() == [5, 5, 5, 0]
    assert places.tolist() == [2 * 4 + 1, 5 * 4 + 1, 3 * 4 + 1, SPARE * 4]
    assert tables[:3, :2].tolist() == [[1, 2], [4, 5], [2, 3]]
    one, other = next(graphs._hosts), next(graphs._hosts)
    assert one.of_rows(1).data_ptr() != other.of_rows(1).data_ptr()
    assert one.rows.ids[0] == 9, "a device may still read it"


def test_only_replies_without_adapters_are_played_and_no_more_than_recorded() -> None:
    graphs, one = made(NotRecorded), (7, 3, ((0, 1),))
    assert graphs.takes(batch_of(one)) and graphs.takes(batch_of(*[one] * 5))
    assert not graphs.takes(batch_of(*[one] * 6))
    assert not graphs.takes(batch_of(one, count=2)), "a prompt, or draft tokens"
    assert not graphs.takes(batch_of(one, lora="a"))


def test_a_device_without_memory_for_them_is_told_with_what_to_do() -> None:
    with pytest.raises(CapacityError, match="to record steps of up to 5 sequences") as told:
        made(Full)
    assert told.value.message.endswith("tried to allocate 2.00 GiB."), "of many lines the first"
    assert "--max-num-seqs" in told.value.hint


def test_sizes_that_are_recorded() -> None:
    assert [sizes_up_to(most) for most in (1, 5, 16, 40)] == [
        [1],
        [1, 2, 4, 5],
        [1, 2, 4, 8, 16],
        [1, 2, 4, 8, 16, 32, 40],
    ]
