"""Pages on disk change no token: chats go on after restarts, under other plans, beside `transformers`."""

from __future__ import annotations

import logging
import shutil
from array import array
from pathlib import Path

import msgspec
import pytest

from tests.parity.engine.test_prefix_cache import GREEDY, ROOMY, random_ids, turns_of
from tests.support.models.families import save_model
from tllm.core.errors import ConfigError
from tllm.engine.engine import Engine
from tllm.engine.page_store import page_buffer
from tllm.engine.schedule.limits import EngineConfig
from tllm.engine.schedule.prefix_cache import FIRST, PageContent, page_name
from tllm.spec.request import Request, SamplingParams

PLANS = ("pp=1", "tp=3,shares=1:2:1", "pp=2,tp=1+2", "pp=3,layers=1+2+1")
TIGHT = msgspec.structs.replace(ROOMY, cache_tokens=160, max_num_seqs=2)


def on_disk(folder: Path, config: EngineConfig = ROOMY) -> EngineConfig:
    return msgspec.structs.replace(config, cache_dir=str(folder))


def asked(engine: Engine, prompt: list[int], salt: str = "", params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """The reply, and how many tokens of the prompt were found."""
    outputs = list(engine.submit(Request(id="one", prompt_ids=tuple(prompt), params=params, cache_salt=salt)))
    return [token for output in outputs for token in output.token_ids], outputs[0].cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma2", "deepseek_v3_moe", "gemma4_e2b"])
def test_each_turn_after_a_restart_under_another_plan(case: str, tmp_path: Path) -> None:
    """Every server begins with what those before it, of other plans, have saved: all full pages of earlier turns."""
    turns, folder = turns_of(save_model(case, tmp_path / "model")), tmp_path / "pages"
    for turn, (prompts, replies) in enumerate(turns):
        for layout in PLANS[turn : turn + 2]:
            with Engine.load(tmp_path / "model", layout, on_disk(folder)) as engine:
                for prompt, reply in zip(prompts, replies, strict=True):
                    ids, found = asked(engine, prompt)
                    assert ids == reply, f"turn {turn}, {layout}"
                    if turn and layout == PLANS[turn]:
                        # the turn before, but for the last token of its reply, and 4 tokens to a page
                        assert found == (len(prompt) - 5 - 1) // 4 * 4
                    elif layout != PLANS[turn]:
                        assert found == (len(prompt) - 1) // 4 * 4
                stats = engine.stats()
                assert stats["page_store_damaged"] == 0
                if turn or layout != PLANS[turn]:
                    assert stats["external_prefix_hits"] > 0.5 * stats["external_prefix_queries"]
    shutil.rmtree(folder)


def test_what_had_to_make_room_in_memory_comes_back(tmp_path: Path) -> None:
    turns = turns_of(save_model("llama", tmp_path / "model"))
    for layout in ("pp=1", "pp=2,tp=1+2"):
        with Engine.load(tmp_path / "model", layout, on_disk(tmp_path / layout, TIGHT)) as engine:
            for prompts, replies in turns:
                assert engine.generate(prompts, GREEDY) == replies, layout
            stats = engine.stats()
            assert stats["external_prefix_hits"] > 0, "memory has room for one of three chats"


def test_salts_and_models_keep_to_themselves(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    config, prompt = on_disk(tmp_path / "pages"), random_ids(30, 1)
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        truth, _ = asked(engine, prompt, "one")
    weights = tmp_path / "model" / "model.safetensors"
    for salt, found in (("two", 0), ("", 0), ("one", 28)):
        with Engine.load(tmp_path / "model", "pp=2", config) as engine:
            assert asked(engine, prompt, salt) == (truth, found)
    for other in (dict(dtype="float64"), dict(quantize="int8"), dict(page_size=2)):
        with Engine.load(tmp_path / "model", "pp=2", msgspec.structs.replace(config, **other)) as engine:
            assert asked(engine, prompt, "one")[1] == 0
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # the lowest byte of one number, somewhere
    weights.write_bytes(content)
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        assert asked(engine, prompt, "one")[1] == 0


def test_pages_come_back_to_the_bit(tmp_path: Path) -> None:
    """What is read from disk is what was in the cache, so log-probabilities are those of a hit in memory."""
    save_model("llama", tmp_path / "model")
    config, prompt = on_disk(tmp_path / "pages"), random_ids(41, 3)
    params = msgspec.structs.replace(GREEDY, logprobs=4)
    scores = []
    for name in ("first", "again"):
        with Engine.load(tmp_path / "model", "pp=2,tp=1+2", config) as engine:
            if name == "first":
                asked(engine, prompt)
            request = Request(id=name, prompt_ids=tuple(prompt), params=params)
            outputs = list(engine.submit(request))
            assert outputs[0].cached_tokens == 40
            scores.append([one for output in outputs for one in output.logprobs])
    assert scores[0] == scores[1]


def test_another_prefixs_page_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: a page comes back with what the page before it held. Tokens are then others."""
    save_model("llama", tmp_path / "model")
    config, prompt = on_disk(tmp_path / "pages"), random_ids(40, 4)
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        truth, _ = asked(engine, prompt)
    fill, last = page_buffer.PageBuffer.fill, dict[int, bytes]()

    def misplaced(
        self: page_buffer.PageBuffer, number: int, place: int, content: bytes, heads: tuple[int, int]
    ) -> None:
        fill(self, number, place, last.get(number, content), heads)
        last[number] = content

    monkeypatch.setattr(page_buffer.PageBuffer, "fill", misplaced)
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        ids, found = asked(engine, prompt)
    assert found == 36 and ids != truth


def test_damage_and_a_full_disk_end_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model("llama", tmp_path / "model")
    config, prompt = on_disk(tmp_path / "pages"), random_ids(40, 5)
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        truth, _ = asked(engine, prompt)
    first_page = page_name(PageContent("", FIRST, array("i", prompt[: config.page_size]).tobytes())).hex()
    victim, *_ = (tmp_path / "pages").rglob(f"{first_page}.*-*")
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING), Engine.load(tmp_path / "model", "pp=2", config) as engine:
        ids, found = asked(engine, prompt)
        assert (ids, found) == (truth, 0)
        assert asked(engine, prompt)[0] == truth
    assert len([one for one in caplog.records if "is deleted" in one.message]) == 1
    with Engine.load(tmp_path / "model", "pp=2", config) as engine:
        assert asked(engine, prompt) == (truth, 36), "it was saved again"
    small = msgspec.structs.replace(on_disk(tmp_path / "small"), cache_dir_size=5000)
    with Engine.load(tmp_path / "model", "pp=2", small) as engine:
        assert asked(engine, prompt)[0] == truth
    kept = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.*-*"))
    assert 0 < kept <= 5000


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    (tmp_path / "pages").mkdir(mode=0o755)
    (tmp_path / "pages").chmod(0o755)
    with pytest.raises(ConfigError, match="0755"):
        Engine.load(tmp_path / "model", "pp=2", on_disk(tmp_path / "pages"))


def test_nothing_is_kept_of_models_with_dynamic_rope(tmp_path: Path) -> None:
    save_model("llama_dynamic", tmp_path / "model")
    with Engine.load(tmp_path / "model", "pp=2", on_disk(tmp_path / "pages")) as engine:
        assert asked(engine, random_ids(20, 1))[1] == 0
        assert "external_prefix_hits" not in engine.stats()
    assert not (tmp_path / "pages").exists()
