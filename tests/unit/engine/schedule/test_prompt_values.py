"""Prompts that are pooled, through the scheduler: in chunks, beside replies, preempted, cancelled and refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.unit.engine.kits import FakeRing, expected, limits, request
from tests.unit.engine.schedule.test_scheduler import gathered
from tllm.core.errors import FrameError, RequestError
from tllm.engine.schedule.batch import Results, decode, encode
from tllm.engine.schedule.limits import check_results
from tllm.engine.schedule.scheduler import Scheduler
from tllm.spec.request import Output, PoolingKind, PoolingParams, Request, SamplingParams

WIDE = limits(hidden_size=1, num_pages=24)
PROMPT = [*range(1, 40)]


def mean(name: str, prompt: list[int]) -> Request:
    return pooled(name, prompt, "mean")


def pooled(name: str, prompt: list[int], kind: PoolingKind = "last", **more: object) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0, **more)  # type: ignore[arg-type]
    ids = (3,) if kind == "logprobs" else ()
    return Request(id=name, prompt_ids=tuple(prompt), params=params, pooling=PoolingParams(kind=kind, token_ids=ids))


def of(outputs: list[Output]) -> dict[str, list[tuple[float, ...]]]:
    """What each pooled prompt came to, which must come once and with its end."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for output in outputs:
        if output.pooled:
            assert output.finish_reason == "stop" and not output.token_ids
            found.setdefault(output.request_id, []).append(output.pooled)
    return found


@pytest.mark.parametrize("depth", [1, 3])
def test_means_come_once_beside_replies(depth: int) -> None:
    scheduler = Scheduler(WIDE, depth)
    ring = FakeRing(scheduler)
    talks = request("talks", [5, 6, 7], 12)
    for one in (talks, mean("long", PROMPT), mean("short", [9]), mean("two", [9, 10])):
        scheduler.add(one)
    outputs = ring.run()
    assert of(outputs) == {"long": [(20.0,)], "short": [(9.0,)], "two": [(9.5,)]}
    assert gathered([one for one in outputs if not one.pooled])["talks"][0] == expected(talks)[0]
    assert any(entries.count(1) and max(entries) > 1 for entries in ring.sizes), "prompts are computed beside replies"
    scheduler.pages.pool.check()
    assert scheduler.pages.pool.num_free == WIDE.num_pages


def test_a_mean_that_is_preempted_begins_again() -> None:
    """Replies take its pages while its prompt is half computed: sums of the first try count for nothing."""
    tight = limits(hidden_size=1, num_pages=15, max_num_batched_tokens=8)
    scheduler = Scheduler(tight)
    ring = FakeRing(scheduler)
    talks = [request(f"r{i}", [20 + i], 16) for i in range(3)]
    for one in talks:
        scheduler.add(one)
    ring.step()
    scheduler.add(mean("m", PROMPT))
    outputs = ring.run()
    assert scheduler.preemptions > 0
    assert of(outputs) == {"m": [(20.0,)]}


def test_what_is_cancelled_comes_to_nothing() -> None:
    scheduler = Scheduler(WIDE, depth=2)
    ring = FakeRing(scheduler)
    scheduler.add(mean("gone", PROMPT))
    assert ring.start()
    cancelled = scheduler.cancel("gone")
    assert cancelled is not None and cancelled.finish_reason == "cancelled"
    assert not ring.finish() and not scheduler.has_work


def test_numbers_that_are_not_finite_are_an_error_of_that_prompt_and_its_pages_are_computed_anew() -> None:
    scheduler = Scheduler(WIDE)
    ring = FakeRing(scheduler)
    for kind, values in (("mean", (math.inf, math.nan)), ("last", (math.nan,))):
        scheduler.add(pooled(kind, PROMPT[:9], kind))  # type: ignore[arg-type]
        step = scheduler.schedule()
        assert step is not None
        [output] = scheduler.accept(step, Results(number=step.batch.number, pooled=(values,)))
        assert output.finish_reason == "error" and "finite" in output.error and output.is_non_finite
        scheduler.add(request(f"after {kind}", PROMPT[:9]))
        assert ring.run()[0].cached_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (pooled("a", [1], "score"), "no classification head"),
        (pooled("a", [1] * 61), "61"),
        (pooled("a", []), "no token"),
        (pooled("a", [1], prompt_logprobs=0), "no prompt_logprobs"),
        (msgspec.structs.replace(pooled("a", [1]), pooling=PoolingParams(token_ids=(3,))), "1 tokens for pooling"),
        (msgspec.structs.replace(pooled("a", [1]), pooling=PoolingParams(kind="logprobs")), "0 tokens for pooling"),
        (
            msgspec.structs.replace(pooled("a", [1]), pooling=PoolingParams(kind="logprobs", token_ids=(50,))),
            "vocabulary of 50",
        ),
    ],
)
def test_what_cannot_be_pooled_is_refused(wrong: Request, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Scheduler(limits(hidden_size=1, num_pages=24)).add(wrong)


def test_a_prompt_may_fill_the_context() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.add(mean("full", [3] * WIDE.max_model_len))
    assert of(FakeRing(scheduler).run()) == {"full": [(3.0,)]}


def test_stages_check_what_was_pooled() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.add(mean("a", [1, 2]))
    scheduler.add(pooled("b", [1, 2]))
    step = scheduler.schedule()
    assert step is not None
    assert decode(encode(step.batch)) == step.batch
    for good in (((1.0, 0.0), (1.0,)),):
        check_results(Results(number=0, pooled=good), step.batch, WIDE)
    for bad in ((), ((1.0, 0.0),), ((1.0,), (1.0,)), ((1.0, 0.0), (1.0, 2.0))):
        with pytest.raises(FrameError, match="pooled"):
            check_results(Results(number=0, pooled=bad), step.batch, WIDE)
