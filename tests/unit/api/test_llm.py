"""`LLM` in one process: the engine's own tokens, in the order of the prompts, and errors in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.house.tree import ROOT
from tests.support.models.families import save_model
from tests.unit.api.interrupted_call import interrupt_when_it_waits
from tllm import LLM, SamplingParams
from tllm.api.engine_options import ELSEWHERE, EngineArgs
from tllm.core.errors import ClusterError, ConfigError, PlanError, RequestError, WeightsError
from tllm.engine.engine import Engine

TINY = ROOT / "models" / "tiny"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path_factory.mktemp("ids")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(TINY) as llm:
        yield llm


def test_several_prompts_give_the_engines_tokens_in_their_order(ids_only: Path) -> None:
    with Engine.load(ids_only) as engine:
        expected = engine.generate(PROMPTS, GREEDY)
    with LLM(ids_only, max_num_seqs=2) as llm:
        replies = llm.generate(PROMPTS, GREEDY)
    assert [list(reply.token_ids) for reply in replies] == expected
    assert [list(reply.prompt_token_ids) for reply in replies] == PROMPTS
    assert {(reply.text, reply.finish_reason, reply.logprobs) for reply in replies} == {("", "length", ())}


def test_an_interrupt_ends_the_loading_of_one_rank(ids_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, caller, before = list[tuple[int, int]](), threading.get_ident(), set(threading.enumerate())
    given_up = threading.Event()
    monkeypatch.setattr("tllm.api.open_engine.threading", SimpleNamespace(Event=lambda: given_up))

    def on_progress(what: str, done: int, total: int) -> None:
        if not told:
            interrupt_when_it_waits(caller)
            assert given_up.wait(20), "the caller asks for the end"
        told.append((done, total))

    with pytest.raises(KeyboardInterrupt):
        LLM(ids_only, on_progress=on_progress)
    done, total = told[-1]
    assert done < total
    assert set(threading.enumerate()) <= before


def test_a_text_comes_whole_in_pieces_and_over_http_alike(tiny: LLM) -> None:
    reply = tiny.generate("def main():", GREEDY)[0]
    assert reply.text and "".join(tiny.stream("def main():", GREEDY)) == reply.text
    assert tiny.generate(["def main():"], GREEDY)[0] == reply
    assert tiny.tokenizer is not None
    assert reply.prompt_token_ids == tuple(tiny.tokenizer.encode("def main():"))


def test_a_prompt_is_computed_once_unless_that_is_switched_off(ids_only: Path) -> None:
    prompt = [*range(3, 43)]
    with LLM(ids_only) as llm:
        first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    with LLM(ids_only, enable_prefix_caching=False, override_generation_config={"temperature": 0, "top_k": -1}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        replies = [llm.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [reply.num_cached_tokens for reply in replies] == [0, 0]
    assert {reply.token_ids for reply in (first, second, *replies)} == {first.token_ids}


def test_log_probabilities_and_stop_strings(tiny: LLM) -> None:
    plain = tiny.generate("import os\n", GREEDY)[0].text
    stop = plain[4:6]
    reply = tiny.generate("import os\n", SamplingParams(max_tokens=12, temperature=0, logprobs=2), stop=[stop])[0]
    assert reply.text == plain[: plain.index(stop)] and reply.finish_reason == "stop"
    assert len(reply.logprobs) == len(reply.token_ids)
    assert all(len(entry.top) == 2 for entry in reply.logprobs)


def test_a_stop_string_alone_is_one_and_not_its_characters(tiny: LLM) -> None:
    plain = tiny.generate("import os\n", GREEDY)[0].text
    stop = "\nim"
    cut = plain[: plain.index(stop)]
    assert "i" in cut, "else both end alike"
    assert tiny.generate("import os\n", GREEDY, stop=stop)[0].text == cut
    assert "".join(tiny.stream("import os\n", GREEDY, stop=stop)) == cut
    assert tiny.chat([{"role": "user", "content": "Hello"}], GREEDY, stop="xyz").text
    with pytest.raises(RequestError, match="a stop string is empty"):
        tiny.generate("import os\n", GREEDY, stop=["a", ""])


def test_a_conversation_is_the_templates_text(tiny: LLM) -> None:
    assert tiny.chat_template is not None
    messages = [{"role": "user", "content": "Hello"}]
    text = tiny.chat_template.render([dict(message) for message in messages])
    assert tiny.chat(messages, GREEDY).text == tiny.generate(text, GREEDY)[0].text


def test_a_seed_repeats_what_was_sampled(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    assert tiny.generate("class A", params) == tiny.generate("class A", params)
    drawn = {tiny.generate("class A", SamplingParams(max_tokens=12))[0].token_ids for _ in range(6)}
    assert len(drawn) > 1, "without a seed one is drawn each time"


def test_defaults_leave_room_for_the_prompt_and_what_is_asked_for_does_not() -> None:
    config = {"max_new_tokens": 64, "temperature": 1e-6}
    with LLM(TINY, max_model_len=64, override_generation_config=config) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=64, temperature=0)
        prompt = [*range(3, 63)]
        (reply,) = llm.generate([prompt])
        assert len(reply.token_ids) == 4 or reply.finish_reason == "stop"
        said = llm.chat([{"role": "user", "content": "Hello"}])
        assert len(said.prompt_token_ids) + len(said.token_ids) <= 64
        with pytest.raises(RequestError, match="124"):
            llm.generate([prompt], SamplingParams(max_tokens=64))
        with pytest.raises(RequestError, match="65"):
            llm.generate([[*range(3, 67)]])


def test_a_loop_that_is_left_cancels_its_request(tiny: LLM) -> None:
    pieces = tiny.stream("class A", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    assert next(pieces)
    pieces.close()  # type: ignore[attr-defined]  # it is a generator
    assert tiny.generate("class A", GREEDY)[0].finish_reason == "length"
    assert tiny._engine.client.stats()["running"] == 0


def test_threads_ask_at_once(tiny: LLM) -> None:
    expected = tiny.generate(PROMPTS, GREEDY)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: tiny.generate([prompt], GREEDY)[0], PROMPTS)) == expected


def test_what_cannot_be_served_is_an_error_and_harms_no_other(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="temperature -1"):
        tiny.generate(["a", "b"], SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="bare ids"):
        tiny.generate([1, 2, 3], GREEDY)  # type: ignore[list-item]
    wrong: list[Any] = [
        3,
        {"prompt": "a"},
        [{"prompt": "a"}],
        [["a"]],
        [[1.5]],
        [b"a"],
    ]  # the keys of a dict passed for texts
    for given in wrong:
        with pytest.raises(RequestError, match="prompts are texts or lists of ids, and a"):
            tiny.generate(given, GREEDY)
        with pytest.raises(RequestError, match="prompts are texts or lists of ids, and a"):
            tiny.embed(given)
    said = {"role": "user", "content": "hi"}
    talks: list[Any] = ["hi", said, ["hi"], [said, "hi"], [], None]
    for talk in talks:
        with pytest.raises(RequestError, match="messages are a list of dicts"):
            tiny.chat(talk, GREEDY)
    one_by_one: Any = iter([said])
    assert tiny.chat(one_by_one, GREEDY) == tiny.chat([said], GREEDY)
    with pytest.raises(RequestError, match="the prompt has no token") as caught:
        tiny.generate("", GREEDY)
    assert caught.value.hint == "give some text, or ids"
    assert tiny.generate([torch.tensor([7, 8])], GREEDY)[0].prompt_token_ids == (7, 8)  # type: ignore[list-item]
    assert tiny.generate("a", GREEDY)[0].finish_reason == "length"


def test_a_model_without_a_tokenizer_takes_ids_alone(ids_only: Path) -> None:
    with LLM(ids_only) as llm:
        with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
            llm.generate("text", GREEDY)
        with pytest.raises(ConfigError, match="stop needs a tokenizer"):
            llm.generate([[1, 2]], GREEDY, stop=["x"])
        with pytest.raises(ConfigError, match="cannot chat"):
            llm.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(ClusterError, match="was closed"):
        llm.generate([[1, 2]], GREEDY)
    llm.close()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pla", "did you mean 'plan'?"),
        ("xyzzy", "known: "),
        ("devise", "did you mean 'device'?"),
        ("tensor_parallel_size", 'give plan="tp=N"'),
    ],
)
def test_an_argument_that_there_is_none_of_is_not_passed_over(name: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no keyword argument '{name}'") as caught:
        LLM(tmp_path / "nowhere", **{name: 2})
    assert hint in caught.value.hint


def test_what_is_said_of_other_programs_arguments_is_of_none_of_ours() -> None:
    assert not ELSEWHERE.keys() & EngineArgs.__annotations__.keys()


def test_what_cannot_be_loaded_leaves_nothing_behind(ids_only: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(PlanError):
        LLM(ids_only, plan="pp=9")
    with pytest.raises(ConfigError, match="max_model_len 999999 is more than"):
        LLM(ids_only, max_model_len=999_999)
    with pytest.raises(ConfigError, match="max_num_seqs is 0, and must be 1"):
        LLM(ids_only, max_num_seqs=0)
    with pytest.raises(ConfigError, match="page_size is -1, and must be 1"):
        LLM(ids_only, page_size=-1)
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        LLM(tmp_path / "nowhere", device="gpu")  # told before the folder is looked for
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'q8_0'"):
        LLM(ids_only, kv_cache_dtype="q8_0")  # type: ignore[typeddict-item]  # what mypy would refuse
    with pytest.raises(ConfigError, match="quantize is 'int3'"):
        LLM(ids_only, quantize="int3")  # type: ignore[typeddict-item]  # what mypy would refuse
    with pytest.raises(ConfigError, match="the dtype 'float8' cannot be computed with"):
        LLM(ids_only, dtype="float8")
    for number in (EngineArgs(threads=-1), EngineArgs(memory=0), EngineArgs(kv_cache_memory=-5)):
        ((name, value),) = number.items()
        with pytest.raises(ConfigError, match=f"{name} is {value}, and must be 1 at least"):
            LLM(ids_only, **number)
    (tmp_path / "config.json").write_bytes((ids_only / "config.json").read_bytes())
    with pytest.raises(WeightsError, match=r"neither model\.safetensors"):
        LLM(tmp_path)
    assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile
