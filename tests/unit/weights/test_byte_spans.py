"""The bytes of a box, against slicing a numbered array."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tllm.weights.boxes import Box, chunks, regions, widths
from tllm.weights.byte_spans import Spans, one_span, spans_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = []
    for width in shape:
        start = draw(st.integers(0, width))
        box.append((start, draw(st.integers(start, width))))
    return shape, tuple(box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in box)


@given(boxes(), st.sampled_from([1, 2, 8]), st.integers(0, 100))
def test_spans_are_the_bytes_of_the_box(case: tuple[tuple[int, ...], Box], itemsize: int, base: int) -> None:
    shape, box = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    want = [
        base + number * itemsize + byte
        for number in numbers[slices(box)].flatten().tolist()
        for byte in range(itemsize)
    ]
    got = []
    for spans in spans_of(shape, box, itemsize, base):
        for i in range(spans.count):
            start = spans.start + i * spans.pitch
            got += range(start, start + spans.width)
        assert got[-1] + 1 == spans.stop
    assert got == want


def test_rows_are_one_run_and_columns_one_run_a_row() -> None:
    assert list(spans_of((8, 4), ((2, 6), (0, 4)), 2, 100)) == [one_span(116, 148)]
    assert list(spans_of((8, 4), ((2, 6), (1, 3)), 2, 100)) == [Spans(118, 4, 8, 4)]


def test_three_dims() -> None:
    columns = list(spans_of((3, 8, 4), ((1, 3), (0, 8), (0, 2)), 1, 0))
    assert columns == [Spans(32, 2, 4, 16)], "whole matrices of a column cut are one set of runs"
    rows = list(spans_of((3, 8, 4), ((1, 3), (2, 4), (0, 4)), 1, 0))
    assert rows == [Spans(40, 8, 32, 2)]
    assert len(list(spans_of((3, 8, 4), ((1, 3), (2, 4), (0, 2)), 1, 0))) == 2


@given(boxes(), st.integers(1, 20))
def test_chunks_are_the_box_in_order(case: tuple[tuple[int, ...], Box], limit: int) -> None:
    shape, box = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    parts = list(chunks(box, limit))
    assert all(0 < math.prod(widths(part)) <= limit for part in parts)
    got = [number for part in parts for number in numbers[slices(part)].flatten().tolist()]
    assert got == numbers[slices(box)].flatten().tolist()


@given(st.data())
def test_regions_count_every_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    given_boxes = []
    for _ in range(data.draw(st.integers(0, 4))):
        box = []
        for width in shape:
            start = data.draw(st.integers(0, width))
            box.append((start, data.draw(st.integers(start, width))))
        given_boxes.append(tuple(box))
    want = torch.zeros(shape, dtype=torch.long)
    for i, box in enumerate(given_boxes):
        want[slices(box)] += 1 << i
    got = torch.full(shape, -1)
    for box, holders in regions(shape, given_boxes):
        assert (got[slices(box)] == -1).all(), "regions overlap"
        got[slices(box)] = sum(1 << i for i in holders)
    assert torch.equal(got, want)
