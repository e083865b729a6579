"""What the engine gives beside ids: log-probabilities, resubmission, an early end, a rank that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tllm.core.errors import ClusterError, NonFiniteError, RequestError
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.model.transformer import Transformer
from tllm.spec.request import Output, Request, SamplingParams, TokenLogprobs

LENGTHS = (5, 17, 40, 33)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
ROOMY = EngineConfig(dtype="float32", cache_tokens=1024, max_num_seqs=8)
TIGHT = EngineConfig(dtype="float32", cache_tokens=100, page_size=4, max_num_seqs=3, max_num_batched_tokens=7)


def prompts() -> list[list[int]]:
    return [torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma2")
    save_model("gemma2", path)
    return path


def scored(engine: Engine, prompt: list[int]) -> list[Output]:
    params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    return list(engine.submit(Request(id=f"scored-{len(prompt)}", prompt_ids=tuple(prompt), params=params)))


def values(outputs: list[Output]) -> list[float]:
    found: list[TokenLogprobs | None] = [one for out in outputs for one in (*out.prompt_logprobs, *out.logprobs)]
    return [value for one in found if one for value in (one.logprob, *(chance for _, chance in one.top))]


def test_float64_layouts_agree_to_rounding(folder: Path) -> None:
    config = msgspec.structs.replace(ROOMY, dtype="float64")
    tight = msgspec.structs.replace(TIGHT, dtype="float64")
    with Engine.load(folder, "pp=1", config) as engine:
        want = scored(engine, prompts()[2])
    for layout, sizes in (("pp=2,tp=2", config), ("tp=3,shares=1:2:1", tight), ("pp=3,layers=1+2+1", tight)):
        with Engine.load(folder, layout, sizes) as engine:
            got = scored(engine, prompts()[2])
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert values(got) == pytest.approx(values(want), abs=1e-12)


def test_a_request_resubmitted_goes_on_as_it_would_have(folder: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True, frequency_penalty=0.3)
    whole = Request(id="whole", prompt_ids=tuple(prompts()[1]), params=params)
    with Engine.load(folder, "pp=2", ROOMY) as engine:
        ids = [token for out in engine.submit(whole) for token in out.token_ids]
        rest = msgspec.structs.replace(whole, id="rest", output_ids=tuple(ids[:7]))
        assert [token for out in engine.submit(rest) for token in out.token_ids] == ids[7:]


def test_a_stream_closed_early_frees_its_place(folder: Path) -> None:
    with Engine.load(folder, "pp=2", ROOMY) as engine:
        long = Request(id="long", prompt_ids=(1, 2, 3), params=msgspec.structs.replace(GREEDY, max_tokens=60))
        stream = engine.submit(long)
        next(stream)
        stream.close()
        assert [out.finish_reason for out in stream][-1] in ("cancelled", "length")
        with pytest.raises(RequestError, match="282; the context holds 256") as caught:
            engine.generate([[1] * 250], GREEDY)
        assert caught.value.hint and "hint:" not in caught.value.message


def test_a_prompt_that_is_refused_ends_those_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, "pp=1", ROOMY) as engine:
        cancelled: list[str] = []
        monkeypatch.setattr(engine, "cancel", cancelled.append)
        with pytest.raises(RequestError, match="the context holds 256"):
            engine.generate([[1] * 250, [1, 2, 3]], GREEDY)
        assert len(cancelled) == 1


def test_two_threads_may_generate_at_once(folder: Path) -> None:
    both_have_ids = threading.Barrier(2)

    class Prompt(list[int]):
        def __iter__(self) -> Iterator[int]:
            both_have_ids.wait(60)
            return super().__iter__()

    with Engine.load(folder, "pp=1", ROOMY) as engine, ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: engine.generate([Prompt([1, 2, 3])], GREEDY), range(2))
        assert one == other == engine.generate([[1, 2, 3]], GREEDY)


@pytest.mark.parametrize("plan", ["pp=1", "tp=2", "pp=2"])
def test_a_prompt_whose_numbers_overflow_ends_alone(plan: str, folder: Path) -> None:
    with Engine.load(folder, plan, ROOMY) as engine:
        [want] = engine.generate([[1, 2, 3]], GREEDY)
        bad = next(token for token in range(4, 101) if token not in want)

        def overflow(embedding: torch.nn.Module, args: tuple[torch.Tensor, ...], x_TD: torch.Tensor) -> torch.Tensor:
            return x_TD.masked_fill((args[0] == bad)[:, None], torch.inf)

        for stage in engine.stages:
            if isinstance(stage.model, Transformer) and stage.model.is_first:
                stage.model.embed_tokens.register_forward_hook(overflow)
        for params in (GREEDY, msgspec.structs.replace(GREEDY, temperature=0.8, seed=1, logprobs=2)):
            beside = engine.submit(Request(id="beside", prompt_ids=(1, 2, 3), params=GREEDY))
            with pytest.raises(NonFiniteError, match="no finite numbers"):
                list(engine.submit(Request(id="bad", prompt_ids=(1, 2, bad), params=params)))
            assert [token for output in beside for token in output.token_ids] == want
        assert engine.generate([[1, 2, 3]], GREEDY) == [want], "in its pages, too"


def test_a_rank_that_fails_is_the_reason_that_everyone_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(folder, "pp=2,tp=2", ROOMY) as engine:
        broken = engine.stages[3]
        monkeypatch.setattr(broken, "sampler", lambda *_: 1 // 0)
        streams = [engine.submit(Request(id=name, prompt_ids=(1, 2, 3), params=GREEDY)) for name in "ab"]
        for stream in streams:
            with pytest.raises(ClusterError, match=r"rank 3.*division"):
                list(stream)
        with pytest.raises(ClusterError, match="has ended"):
            engine.submit(Request(id="c", prompt_ids=(1, 2, 3), params=GREEDY))
