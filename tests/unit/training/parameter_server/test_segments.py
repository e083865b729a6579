from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.training.gradients.bucket_layout import LINE, lay_out
from tllm.training.parameter_server.segments import first_row, segments


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [cut_parameter(shape, Shard((ShardPiece(f"p{number}"),))) for number, shape in enumerate(shapes)]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    return parameters


@given(st.integers(1, 40), st.sampled_from([1, 3, 8, 16, 20, 32]), st.integers(1, 6), st.booleans())
def test_servers_keep_each_element_once_in_whole_lines_and_whole_rows(
    vocab: int, width: int, servers: int, by_rows: bool
) -> None:
    parameters = parameters_of((9, 7), (vocab, width), (30, 11), (5,))
    buckets = lay_out(parameters, limit=2000)
    table = 1 if by_rows else None
    kept = [torch.zeros(bucket.size, dtype=torch.int8) for bucket in buckets]
    rows: list[int] = []
    for server in range(servers):
        for segment in segments(buckets, parameters, table, server, servers):
            kept[segment.bucket][segment.start : segment.stop] += 1
            assert segment.start % LINE == segment.stop % LINE == 0
            if segment.row:
                assert segment.row == width and segment.rows * width <= segment.size
                first = first_row(segment, buckets, 1)
                rows += range(first, first + segment.rows)
                run = torch.arange(buckets[segment.bucket].size)
                place = buckets[segment.bucket].views(run, parameters)[buckets[segment.bucket].parameters.index(1)]
                assert torch.equal(segment.by_rows(run[segment.start : segment.stop]), place[first:][: segment.rows])
    assert all(bool((times == 1).all()) for times in kept)
    assert rows == (list(range(vocab)) if by_rows else [])
