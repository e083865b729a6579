"""Steps that a device begins before the host knows the last tokens give what steps one after another give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.serving.followed_layers import overlap
from tllm.core.errors import NonFiniteError
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Output, Request, SamplingParams

TIGHT = EngineConfig(dtype="float32", cache_tokens=56, page_size=4, max_num_seqs=4, max_num_batched_tokens=48)
WIDE = EngineConfig(dtype="float32", cache_tokens=2048, page_size=4, max_num_seqs=8)
GREEDY = dict(temperature=0.0, ignore_eos=True)
SAMPLED = dict(temperature=0.9, top_p=0.9, top_k=40, ignore_eos=True)
KINDS = (
    GREEDY,
    SAMPLED,
    dict(SAMPLED, min_p=0.02, logit_bias={7: 2.0}),
    dict(SAMPLED, repetition_penalty=1.1, max_tokens=3),
    dict(GREEDY, logprobs=2, max_tokens=3),
    dict(GREEDY, min_tokens=6, stop_token_ids=tuple(range(50))),
    dict(SAMPLED, prompt_logprobs=1, max_tokens=9),
)


def requests(kinds: tuple[dict[str, object], ...], count: int = 9) -> list[Request]:
    chance = torch.Generator().manual_seed(2)
    made = []
    for n in range(count):
        ids = torch.randint(3, 101, (3 + 5 * n % 17,), generator=chance).tolist()
        stops = tuple(torch.randint(0, 101, (3,), generator=chance).tolist())
        params = {"stop_token_ids": stops, "max_tokens": 6 + 7 * n % 23, "seed": n, **kinds[n % len(kinds)]}
        made.append(Request(id=f"{n}", prompt_ids=tuple(ids), params=SamplingParams(**params)))  # type: ignore[arg-type]
    return made


def replies(engine: Engine, asked: list[Request]) -> list[list[Output]]:
    return [list(stream) for stream in [engine.submit(request) for request in asked]]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("sizes", [TIGHT, WIDE])
@pytest.mark.parametrize("kinds", [(GREEDY,), (SAMPLED,), KINDS])
def test_tokens(kinds: tuple[dict[str, object], ...], sizes: EngineConfig, tmp_path: Path) -> None:
    """With stops in the middle of replies, which nobody knows in advance, preemptions, and requests of other kinds."""
    save_model("llama", tmp_path)
    asked = requests(kinds)
    with Engine.load(tmp_path, "pp=1", sizes) as engine:
        engine.stages[0].graphs = None
        want = replies(engine, asked)
    with Engine.load(tmp_path, "pp=1", sizes) as engine:
        engine.stages[0].graphs = None
        layers = overlap(engine.driver)
        got = replies(engine, asked)
        stats = engine.stats()
        engine.driver.scheduler.pages.pool.check()
    assert [tokens(one) for one in got] == [tokens(one) for one in want]
    assert [one[-1].finish_reason for one in got] == [one[-1].finish_reason for one in want]
    reasons = {one[-1].finish_reason for one in want}
    assert reasons == {"stop", "length"}, "both ends were to be seen"
    assert layers.batches > 5
    assert (stats["preemptions"] > 0) == (sizes is TIGHT)
    assert stats["turns"] > layers.batches, "each of them was alone on its way"


def test_a_reply_that_is_cancelled_and_one_that_comes_late(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    long = [
        Request(id=f"{n}", prompt_ids=(5 + n, 6, 7), params=SamplingParams(max_tokens=40, **GREEDY))  # type: ignore[arg-type]
        for n in range(3)
    ]
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        engine.stages[0].graphs = None
        want = [tokens(outputs) for outputs in replies(engine, long)]
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        engine.stages[0].graphs = None
        layers = overlap(engine.driver)
        first, second = (engine.submit(request) for request in long[:2])
        began = [next(first), next(first)]
        first.close()
        late = engine.submit(long[2])
        cancelled = began + list(first)
        assert cancelled[-1].finish_reason == "cancelled"
        assert tokens(cancelled) == want[0][: len(tokens(cancelled))]
        assert [tokens(list(stream)) for stream in (second, late)] == want[1:]
        assert layers.batches > 10
        assert engine.driver.scheduler.in_flight == 0 and not engine.driver.in_flight


def test_logits_that_are_no_numbers_end_a_reply_with_a_step_under_way(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        engine.stages[0].graphs = None
        layers, sampler = overlap(engine.driver), engine.stages[0].sampler
        assert sampler is not None
        healthy = sampler.logits
        sampler.logits = lambda x: healthy(x) * (torch.nan if layers.batches == 4 else 1.0)
        stream = engine.submit(
            Request(id="a", prompt_ids=(5, 6), params=SamplingParams(max_tokens=20, **GREEDY))  # type: ignore[arg-type]
        )
        with pytest.raises(NonFiniteError, match="no finite numbers"):
            list(stream)
        assert layers.batches == 5, "the step after it had begun"
        assert engine.generate([[5, 6]], SamplingParams(max_tokens=2, **GREEDY))  # type: ignore[arg-type]
