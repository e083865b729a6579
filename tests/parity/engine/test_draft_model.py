"""A draft model changes no token; how many of its drafts are accepted shows whether its cache is what it should be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import covering
from tests.unit.engine.kits import AlwaysDrafting, EveryDraft
from tllm.engine.draft.draft_model import CachedSequence, DraftModel
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.engine.schedule.model_drafting import ModelDrafting
from tllm.engine.schedule.speculative_decoding import Speculation
from tllm.spec.request import Request, SamplingParams
from tllm.spec.speculative_config import SpeculativeConfig

REPLY, TOKENS = 24, 4
GREEDY = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
SEEDED = msgspec.structs.replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
RICH = msgspec.structs.replace(SEEDED, frequency_penalty=0.4, repetition_penalty=1.1, logit_bias={5: 2.0}, logprobs=2)
LENGTHS = (3, 17, 40)
ROOMY = EngineConfig(dtype="float32", cache_tokens=512, page_size=4)
TIGHT = msgspec.structs.replace(ROOMY, cache_tokens=104, max_num_seqs=4, max_num_batched_tokens=48)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(3, 101, (length,), generator=chance).tolist() for length in LENGTHS]


@pytest.fixture(autouse=True)
def never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is the model's, and as long as it may be."""
    monkeypatch.setattr(ModelDrafting, "_seconds_of_step", lambda *_: 0.0)
    monkeypatch.setattr("tllm.engine.schedule.speculative_decoding.LONG_MATCH", 1000)
    monkeypatch.setattr("tllm.engine.schedule.proposer.NEW_REPLY_WEIGHT", 0.0)


@contextmanager
def drafting(
    target: Path, draft: Path, layout: str = "pp=1", config: EngineConfig = ROOMY, tokens: int = TOKENS
) -> Iterator[Engine]:
    """An engine in which every draft is made and checked, however long it takes."""
    drafts = SpeculativeConfig(model=str(draft), num_speculative_tokens=tokens)
    with Engine.load(target, layout, msgspec.structs.replace(config, speculative_config=drafts)) as engine:
        always_draft(engine)
        yield engine


def always_draft(engine: Engine) -> None:
    speculation = speculation_of(engine)
    assert speculation.model is not None
    speculation.cost, speculation.model.phases = EveryDraft(), AlwaysDrafting()
    speculation.ngram_rates.initial = -1.0


def speculation_of(engine: Engine) -> Speculation:
    speculation = engine.driver.scheduler.speculation
    assert speculation is not None
    return speculation


def draft_of(engine: Engine) -> DraftModel:
    model = speculation_of(engine).model
    assert model is not None and isinstance(model.proposer, DraftModel)
    return model.proposer


def accepted_share(engine: Engine) -> float:
    stats = engine.stats()
    assert stats["draft_tokens"] > 0 and stats["draft_model_steps"] > 0
    return stats["accepted_tokens"] / stats["draft_tokens"]


PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "rich": RICH}


@pytest.mark.parametrize(("case", "layout", "way"), covering(["llama", "gemma2"], ["pp=1", "pp=2", "tp=2"], PARAMS))
def test_a_draft_equal_to_the_target_is_always_right_and_a_random_one_seldom(
    case: str, layout: str, way: str, tmp_path: Path
) -> None:
    params = PARAMS[way]
    save_model(case, tmp_path / "target")
    save_model("llama", tmp_path / "other", seed=9, num_hidden_layers=1)
    with Engine.load(tmp_path / "target", "pp=1", ROOMY) as engine:
        truth = engine.generate(prompts(), params)
    with drafting(tmp_path / "target", tmp_path / "target", layout) as engine:
        assert engine.generate(prompts(), params) == truth
        assert accepted_share(engine) == 1.0
        assert engine.stats()["drafts"] <= -(-(REPLY - 1) // (1 + TOKENS)) * len(LENGTHS)
        assert draft_of(engine).pool.num_free == draft_of(engine).pool.num_pages, "all have ended"
    with drafting(tmp_path / "target", tmp_path / "other", "pp=2") as engine:
        assert engine.generate(prompts(), params) == truth
        assert accepted_share(engine) < 0.2


def test_a_draft_model_whose_logits_are_no_numbers_drafts_nothing(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        truth = engine.generate(prompts(), GREEDY)
    with drafting(tmp_path, tmp_path) as engine:
        sampler = draft_of(engine)._sampler
        healthy = sampler.logits
        sampler.logits = lambda x_TD: healthy(x_TD) * torch.nan
        assert engine.generate(prompts(), GREEDY) == truth
        assert engine.stats()["draft_tokens"] == 0


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_after_preemption_and_prefix_hits_drafts_go_on(layout: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        truth = engine.generate(prompts(), GREEDY)
    with drafting(tmp_path, tmp_path, layout, TIGHT) as engine:
        for _ in range(2):
            assert engine.generate(prompts(), GREEDY) == truth
            assert engine.stats()["preemptions"] > 0, "the cache was meant to be too small"
        assert engine.stats()["prefix_hits"] > 0
        assert accepted_share(engine) == 1.0
        draft_of(engine).pool.check()
        assert draft_of(engine).pool.num_free == draft_of(engine).pool.num_pages


@pytest.mark.parametrize("between", [0, 2])
def test_what_was_rejected_is_forgotten(between: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is nearly the target: with the cache rolled back as many are accepted as by a new one each time.

    `between` the steps with drafts there are some without, in which the sequence leaves the draft behind.
    """
    save_model("llama", tmp_path / "target")
    nearly_the_same(tmp_path / "target", tmp_path / "near")
    shares = []
    for way in ("as it is", "anew", "not rolled back"):
        if way == "anew":
            monkeypatch.setattr("tllm.engine.draft.draft_model.MOST_LAG", 1000)
            monkeypatch.setattr(CachedSequence, "roll_back", computed_anew)
        elif way == "not rolled back":
            monkeypatch.setattr(CachedSequence, "roll_back", not_rolled_back)
        turns = itertools.cycle([False] + [True] * between)
        monkeypatch.setattr(AlwaysDrafting, "begin_step", lambda *_, turns=turns: not next(turns))
        with drafting(tmp_path / "target", tmp_path / "near") as engine:
            for prompt in prompts():  # one after the other: which steps have drafts must not depend on when they come
                engine.generate([prompt], msgspec.structs.replace(GREEDY, max_tokens=48))
            shares.append(accepted_share(engine))
    right, truth, wrong = shares
    assert right == truth and 0.3 < right < 0.95
    assert wrong < 0.8 * right if between else wrong == right, "the last token alone is always computed anew"


def nearly_the_same(target: Path, near: Path) -> None:
    """A copy of a model with some noise in every weight."""
    model = save_model("llama", near)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=chance))
    model.save_pretrained(near)


def computed_anew(cached: CachedSequence, token_ids: list[int]) -> None:
    cached.sound, cached.drafted = 0, []


def not_rolled_back(cached: CachedSequence, token_ids: list[int]) -> None:
    cached.sound, cached.drafted = min(cached.sound + len(cached.drafted), len(token_ids) - 1), []


def test_a_sequence_without_room_in_the_draft_cache_gets_no_drafts(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "target")
    save_model("llama", tmp_path / "short", max_position_embeddings=32)
    with Engine.load(tmp_path / "target", "pp=1", ROOMY) as engine:
        truth = engine.generate(prompts(), GREEDY)
    with drafting(tmp_path / "target", tmp_path / "short") as engine:
        assert engine.generate(prompts(), GREEDY) == truth, "the longest prompt is beyond the draft model's context"
        assert accepted_share(engine) == 1.0
    with drafting(tmp_path / "target", tmp_path / "target") as engine:
        draft_of(engine).pool.cover(-7, 480)
        assert engine.generate(prompts(), GREEDY) == truth, "32 tokens of cache are left for all"
        assert 0 < engine.stats()["draft_tokens"] < 30


def test_tokens_that_only_one_model_has_are_no_error(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "target")
    for name, tokens in (("fewer", 90), ("more", 120)):
        save_model("llama", tmp_path / name, seed=5, vocab_size=tokens)
        with Engine.load(tmp_path / "target", "pp=1", ROOMY) as engine:
            truth = engine.generate([*prompts(), [5, 6, 7]], RICH)
        with drafting(tmp_path / "target", tmp_path / name) as engine:
            assert engine.generate([*prompts(), [5, 6, 7]], RICH) == truth
            assert engine.stats()["draft_model_steps"] > 0


def test_a_cancelled_request_lets_its_pages_go(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with drafting(tmp_path, tmp_path, "pp=2") as engine:
        params = msgspec.structs.replace(GREEDY, max_tokens=180)
        stream = engine.submit(Request(id="long", prompt_ids=(1, 2, 3), params=params))
        other = engine.submit(Request(id="short", prompt_ids=(4, 5), params=GREEDY))
        next(stream)
        next(stream)
        stream.close()
        assert sum(len(output.token_ids) for output in other) == REPLY
        assert list(stream)[-1].finish_reason == "cancelled"
        engine.generate([[7, 8]], GREEDY)
        assert draft_of(engine).pool.num_free == draft_of(engine).pool.num_pages


def test_a_draft_model_in_few_bits_drafts_for_itself_in_many(tmp_path: Path) -> None:
    target = Path("models/tiny")
    drafts = SpeculativeConfig(model=str(target), num_speculative_tokens=TOKENS, quantization="int8")
    with Engine.load(target, "pp=1", msgspec.structs.replace(ROOMY, speculative_config=drafts)) as engine:
        always_draft(engine)
        found = engine.generate(prompts(), GREEDY)
        assert accepted_share(engine) > 0.8
    with Engine.load(target, "pp=1", ROOMY) as engine:
        assert engine.generate(prompts(), GREEDY) == found


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_a_long_prompt_is_caught_up_with_in_pieces(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tllm.engine.draft.draft_model.CATCH_UP", 24)
    save_model("llama", tmp_path)
    long = [prompts()[2] * 4, prompts()[1] * 6]
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        truth = engine.generate(long, GREEDY)
    with drafting(tmp_path, tmp_path, layout) as engine:
        assert engine.generate(long, GREEDY) == truth
        assert accepted_share(engine) == 1.0
