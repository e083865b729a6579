"""What a kept reply is counted as, beside what its objects really take."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import FrameType
from typing import Any

import msgspec
import pytest

from tests.unit.server.stored.test_stored_streams import Kept
from tllm.server.stored.kept_bytes import kept_bytes, output_bytes
from tllm.spec.request import Grammar, Output, Request, SamplingParams, StreamRecord, TokenLogprobs

LOGPROBS = tuple(
    TokenLogprobs(1000 + n, -n / 7, tuple((2000 + k, -k / 3) for k in range(1, 21)), rank=300 + n) for n in range(3)
)
REQUEST = Request(
    id="a" * 34,
    prompt_ids=tuple(range(1000, 3000)),
    params=SamplingParams(
        logit_bias={n: n / 3 for n in range(1000, 1100)},
        stop_token_ids=(1001, 1002),
        grammar=Grammar(kind="json_schema", text="{" * 500),
    ),
)
CASES = {
    "a token": Output(request_id="a" * 34, token_ids=(1234,)),
    "likeliest tokens": Output(request_id="a" * 34, token_ids=(1, 1001, 1002), logprobs=LOGPROBS),
    "of the prompt": Output(request_id="a" * 34, prompt_logprobs=(None, *LOGPROBS)),
    "pooled": Output(request_id="a" * 34, pooled=tuple(n / 7 for n in range(300)), finish_reason="stop"),
    "a request": REQUEST,
    "a record": StreamRecord(id="resp_" + "a" * 32, body=b"x" * 2000, owner="b" * 64, created=1_700_000_000),
}


def counted_as(value: Output | Request | StreamRecord) -> int:
    return output_bytes(value) if isinstance(value, Output) else kept_bytes(value)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_objects_take(case: str) -> None:
    """As they come: decoded, each with objects of its own. Of what is taken meanwhile only those are counted: another
    thread of the process, of a test before this one, may take some too."""
    value = CASES[case]
    text = msgspec.msgpack.encode(value)
    msgspec.msgpack.decode(text, type=type(value))  # the first one of a type keeps what it learns of it
    gc.collect()
    tracemalloc.start()
    try:
        made = [msgspec.msgpack.decode(text, type=type(value)) for _ in range(200)]
        here = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    finally:
        tracemalloc.stop()
    size = sum(line.size for line in here.statistics("filename"))
    taken, counted = size / len(made) - 8, counted_as(made[0])  # 8: the list's own
    assert taken <= counted <= 1.4 * taken + 100, f"{taken} are taken, {len(text)} when encoded"


def test_what_is_shared_counts_once() -> None:
    """The choices of a request have one prompt."""
    several = tuple(msgspec.structs.replace(REQUEST, id=f"{n}") for n in range(16))
    assert kept_bytes(several) < kept_bytes(REQUEST) + 16 * 500


def test_the_limit_is_of_memory() -> None:
    kept = Kept(max_bytes=100_000)
    stream = kept.open("a")
    output = CASES["likeliest tokens"]
    assert isinstance(output, Output)
    count = 0
    while kept.streams.is_kept(stream):
        kept.streams.delivered(stream, output)
        count += 1
    assert count == (100_000 - kept_bytes((stream.record, stream.requests))) // output_bytes(output) + 1
    assert kept.streams.nbytes == 0


@pytest.mark.parametrize("places", [0, 4000])
def test_counting_an_output_takes_no_time(places: int) -> None:
    """It is done between the tokens of all requests: a step for each place, and none for each likely token there."""
    kept = Kept()
    stream, calls = kept.open("a"), 0
    prompt = tuple(TokenLogprobs(n, -1.0, tuple((k, -n / 7) for k in range(20))) for n in range(places))
    output = Output(request_id="a", token_ids=(1,), prompt_logprobs=prompt)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event.endswith("call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        kept.streams.delivered(stream, output)
    finally:
        sys.setprofile(before)
    assert calls < 25 + 2 * places
