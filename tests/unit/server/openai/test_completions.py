"""`/v1/completions`: every shape of prompt, what is counted, what is cut, what each token was worth."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.server.kit import SAID, TOKENIZER, chunks, post, refusal, say, serve
from tllm.spec.request import SamplingParams
from tllm.text.tokenizer import Tokenizer

PATH = "/v1/completions"


def ask(engine: Any = None, /, **body: Any) -> dict[str, Any]:
    response = post(serve(engine or say()), PATH, {"model": "tiny", "prompt": "the dog", "max_tokens": 50, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_text_is_continued_to_the_models_own_end() -> None:
    reply = ask()
    [choice] = reply["choices"]
    assert choice["text"] == SAID
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    count = len(TOKENIZER.encode(SAID, add_special_tokens=False)) + 1
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": count,
        "total_tokens": 3 + count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")


def test_defaults_are_those_of_openai_and_vllm() -> None:
    engine = say()
    reply = post(serve(engine), PATH, {"prompt": "the dog"}).json()
    assert reply["model"] == "tiny"
    [request] = engine.submitted
    assert request.prompt_ids == tuple(TOKENIZER.encode("the dog"))
    assert request.params.seed is not None
    expected = SamplingParams(max_tokens=16, seed=request.params.seed, stop_token_ids=TOKENIZER.eos_ids)
    assert request.params == expected


def test_every_sampling_field_reaches_the_engine() -> None:
    engine = say()
    ask(
        engine,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"7": -100, "8": 3.5},
        seed=-3,
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=2,
        logprobs=3,
        max_completion_tokens=7,
    )
    assert engine.submitted[0].params == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        logit_bias={7: -100.0, 8: 3.5},
        seed=(1 << 63) - 3,
        stop_token_ids=(9,),
        ignore_eos=True,
        min_tokens=2,
        logprobs=3,
    )


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hello", [TOKENIZER.encode("hello")]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["hello", "the dog"], [TOKENIZER.encode("hello"), TOKENIZER.encode("the dog")]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["hello", [7]], [TOKENIZER.encode("hello"), [7]]),
    ],
)
def test_prompts_as_text_ids_and_batches(prompt: Any, ids: list[list[int]]) -> None:
    engine = say()
    reply = ask(engine, prompt=prompt)
    assert [list(request.prompt_ids) for request in engine.submitted] == ids
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_many_texts_are_encoded_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is short, and together they would hold up all other requests."""
    engine, threads, encode = say(), set[str](), Tokenizer.encode

    def noting(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    assert len(ask(engine, prompt=["word " * 20] * 300, max_tokens=1)["choices"]) == 300
    assert threads and "MainThread" not in threads


def test_n_choices_have_seeds_in_a_row_and_count_the_prompt_once() -> None:
    engine = say()
    reply = ask(engine, n=3, seed=41, prompt=["hello", "hello"])
    assert [request.params.seed for request in engine.submitted] == [41, 42, 43, 41, 42, 43]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    assert reply["usage"]["prompt_tokens"] == 4
    drawn = say()
    ask(drawn, n=2)
    first, second = (request.params.seed for request in drawn.submitted)
    assert first is not None
    assert second == (first + 1) % (1 << 63)


def test_a_batch_for_scoring_as_lm_eval_sends_it() -> None:
    prompts = [[4, 6, 9, 8], [0, 5, 2]]
    reply = ask(prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    for prompt, choice in zip(prompts, sorted(reply["choices"], key=lambda one: one["index"]), strict=True):
        worth = choice["logprobs"]
        assert {len(values) for values in worth.values()} == {len(prompt) + 1}
        assert worth["token_logprobs"][0] is None
        assert worth["top_logprobs"][0] is None
        for token_id, own, top in list(zip(prompt, worth["token_logprobs"], worth["top_logprobs"], strict=False))[1:]:
            assert own == -0.1 - token_id / 1000
            assert top[TOKENIZER.token_label(token_id)] == own
            # exactly equal, not nearly: clients tell the greedy choice by it
            assert (own == max(top.values())) == (token_id % 2 == 0)
    assert reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("top", [0, 2])
def test_values_of_the_prompt_have_vllms_shape(top: int) -> None:
    """0 asks for the prompt's own tokens. An echo's likeliest tokens stay as many as `logprobs` says."""
    engine, prompt = say(), [4, 6, 9]
    [choice] = ask(engine, prompt=prompt, prompt_logprobs=top, echo=True, logprobs=1)["choices"]
    assert engine.submitted[0].params.prompt_logprobs == max(top, 1)
    six = {"6": {"logprob": -0.1 - 6 / 1000, "rank": 1, "decoded_token": TOKENIZER.token_label(6)}}
    nine = {"9": {"logprob": -0.1 - 9 / 1000, "rank": 2, "decoded_token": TOKENIZER.token_label(9)}}
    if top:
        six["0"] = {"logprob": -0.1 - 6 / 1000 - 1, "rank": 2, "decoded_token": TOKENIZER.token_label(0)}
        nine["0"] = {"logprob": -0.1 - 9 / 1000 + 0.05, "rank": 1, "decoded_token": TOKENIZER.token_label(0)}
    assert choice["prompt_logprobs"] == [None, six, nine]
    assert [len(likeliest) for likeliest in choice["logprobs"]["top_logprobs"][1:3]] == [1, 2]
    messages = [{"role": "user", "content": "hello"}]
    chat = post(serve(say()), "/v1/chat/completions", {"messages": messages, "prompt_logprobs": top}).json()
    assert [len(place or ()) <= top + 1 for place in chat["prompt_logprobs"]] == [True] * chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None and all(chat["prompt_logprobs"][1:])


@pytest.mark.parametrize("prompt", ["the dog", TOKENIZER.encode("the dog")])
def test_echo_with_no_tokens_only_scores_the_prompt(prompt: Any) -> None:
    engine = say()
    reply = ask(engine, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    [choice] = reply["choices"]
    assert choice["text"] == "the dog"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<s>", "the", " dog"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3]
    details = reply["usage"].pop("prompt_tokens_details")
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert details == {"cached_tokens": 0}
    assert engine.running == 0


def test_offsets_point_into_the_echoed_text() -> None:
    [choice] = ask(echo=True, logprobs=2, stop="are")["choices"]
    assert choice["text"] == "the dog hello world\n\nhow "
    worth = choice["logprobs"]
    pairs = list(zip(worth["tokens"], worth["text_offset"], strict=True))
    for token, offset in pairs[1:-1]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("together", [1, 2, 50])
def test_stop_strings_across_tokens(together: int) -> None:
    engine = say()
    engine.together = together
    reply = ask(engine, stop=["d\n\nhow a", "zzz"])
    [choice] = reply["choices"]
    assert choice["text"] == " hello worl"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "d\n\nhow a")
    needed = TOKENIZER.encode(" hello world\n\nhow are", add_special_tokens=False)
    assert reply["usage"]["completion_tokens"] == len(needed)
    assert len(engine.cancelled) == (together < 50)
    [choice] = ask(stop="world", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == " hello world"


def test_text_held_for_a_stop_that_never_comes_is_given_out() -> None:
    [choice] = ask(stop="fine!")["choices"]
    assert (choice["text"], choice["finish_reason"]) == (SAID, "stop")


def test_stop_token_ids_end_without_showing() -> None:
    dog, fine = TOKENIZER.encode(" dog fine", add_special_tokens=False)[0], TOKENIZER.eos_id
    engine = say("hello")
    engine.eos_id = dog
    [choice] = ask(engine, stop_token_ids=[dog])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hello", dog)
    [choice] = ask(engine, stop_token_ids=[dog], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "hello dog"
    assert fine != dog


def test_min_tokens_keeps_stop_strings_off_that_end_before() -> None:
    """One that begins before and ends after ends the reply where it begins, as in vLLM."""
    count = len(TOKENIZER.encode(" hello", add_special_tokens=False))
    assert ask(stop="hello", min_tokens=count)["choices"][0]["text"] == SAID
    choice = ask(stop=["hello", "llo wor"], min_tokens=count)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (" he", "llo wor")


@pytest.mark.parametrize("together", [1, 3])
def test_a_stream_says_the_same(together: int) -> None:
    engine = say()
    engine.together = together
    body = {"prompt": ["the dog", "hello"], "max_tokens": 50, "n": 2, "echo": True, "logprobs": 1, "stop": "fine"}
    whole = post(serve(engine), PATH, {**body, "seed": 1}).json()
    stream = chunks(
        post(serve(engine), PATH, {**body, "seed": 1, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert len({chunk["id"] for chunk in stream}) == 1
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in stream[:-1])
    for choice in whole["choices"]:
        parts = [part for chunk in stream for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [value for part in parts for value in part["logprobs"][key]] == choice["logprobs"][key]


def test_usage_counts_what_no_choice_of_a_prompt_had_to_compute() -> None:
    """The first choice of the second prompt computes it all; the second finds what the first one left."""
    engine, prompts = say(), [[5, 6, 7, 8, 9], [15, 16, 17, 18]]
    engine.cached = lambda request: (
        [5, 6] if request.prompt_ids[0] == 5 else [] if request is engine.submitted[2] else [15, 16, 17]
    )
    body = {"prompt": prompts, "n": 2, "max_tokens": 3}
    assert post(serve(engine), PATH, body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    engine.submitted.clear()
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    stream = chunks(post(serve(engine), PATH, {**body, **streaming}))
    assert stream[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_salt_and_an_api_key_keep_prefixes_apart() -> None:
    engine, keys = say(), ("first-key-1", "second-key-2")
    opened, closed = serve(engine), serve(engine, api_keys=keys)
    for app, key, salt in (
        (opened, "", None),
        (opened, "whatever", None),
        (opened, "", "s"),
        (opened, "", "t"),
        (closed, keys[0], None),
        (closed, keys[0], None),
        (closed, keys[1], None),
        (closed, keys[0], "s"),
    ):
        body = {"prompt": "hello", "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        reply = post(app, PATH, body, headers={"authorization": f"Bearer {key}"} if key else {})
        assert reply.status_code == 200
    salts = [request.cache_salt for request in engine.submitted]
    assert salts[:2] == ["", ""] and salts[4] == salts[5]
    assert len(set(salts)) == 6
    assert not any(key in salt for key in keys for salt in salts)
    refused = refusal(post(opened, PATH, {"prompt": "hello", "cache_salt": ""}), 400)
    assert refused["param"] == "cache_salt"


def test_usage_in_every_chunk_when_asked() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = chunks(post(serve(say()), PATH, {"prompt": "hello", "stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 15
    plain = chunks(post(serve(say()), PATH, {"prompt": "hello", "stream": True}))
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    app = serve(say(), tokenizer=None, template=None)
    [choice] = post(app, PATH, {"prompt": [3, 4], "max_tokens": 4, "logprobs": 1}).json()["choices"]
    ids = TOKENIZER.encode(SAID, add_special_tokens=False)[:4]
    assert (choice["text"], choice["token_ids"]) == ("", ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    streamed = chunks(post(app, PATH, {"prompt": [3, 4], "max_tokens": 4, "stream": True}))
    assert [i for chunk in streamed for i in chunk["choices"][0]["token_ids"]] == ids
    assert refusal(post(app, PATH, {"prompt": "text"}), 400)["param"] == "prompt"
    assert refusal(post(app, PATH, {"prompt": [3], "stop": "a"}), 400)["param"] == "stop"
    refusal(post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), 400)
    refusal(post(app, "/tokenize", {"prompt": "x"}), 400)


def test_ids_on_request() -> None:
    [choice] = ask(return_token_ids=True, max_tokens=2)["choices"]
    assert choice["token_ids"] == TOKENIZER.encode(SAID, add_special_tokens=False)[:2]
    [choice] = ask(return_tokens_as_token_ids=True, logprobs=0, max_tokens=1)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{TOKENIZER.encode(SAID, add_special_tokens=False)[0]}"]


def test_partial_characters_never_show() -> None:
    stream = chunks(post(serve(say("🙂🙂")), PATH, {"prompt": "hello", "stream": True}))
    texts = [chunk["choices"][0]["text"] for chunk in stream]
    assert [text for text in texts if text] == ["🙂", "🙂"]
    [choice] = ask(say("🙂🙂"), max_tokens=6)["choices"]
    assert choice["text"].startswith("🙂")
    assert choice["text"].count("\ufffd") == 1
