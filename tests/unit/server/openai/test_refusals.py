"""What comes in wrong: always a small error in one shape, and never any work for the engine."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.server.kit import client, get, post, refusal, run, say, serve
from tllm.core.errors import CapacityError, ClusterError, ConfigError, NonFiniteError, RequestError, TllmError
from tllm.server.app import build_app
from tllm.server.http.settings import RequestLimits, ServerSettings
from tllm.server.openai.requests import ChatRequest, CompletionRequest

PATH = "/v1/completions"
GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": list(range(5)) * 60}, "prompt"),
        ({"prompt": "word " * 300_000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 256}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"seven": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_regex": "((("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": 'start: "a" nobody'}, "guided_grammar"),
        ({"grammar": 'root ::= "a" nobody'}, "grammar"),
        ({"json_schema": {"$ref": "http://example.org/schema"}}, "json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
def test_fields_out_of_range_are_named(change: dict[str, Any], param: str | None) -> None:
    engine = say()
    response = post(serve(engine), PATH, {**GOOD, **change})
    if change == {"prompt": ""}:  # this tokenizer begins every text with a token
        assert response.status_code == 200
        return
    assert refusal(response, 400)["param"] == param
    assert not engine.submitted


def test_a_grammar_s_number_of_too_many_digits_is_not_pythons_to_tell() -> None:
    response = post(serve(say()), PATH, {**GOOD, "grammar": 'root ::= "a"{' + "9" * 5000 + "}"})
    assert refusal(response, 400)["message"] == "grammar has a number of too many digits (repeat less often)"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"chat_template_kwargs": ' + b'{"a":' * 100_000,
        b'{"prompt": "x", "n": 1' + b"0" * 100_000 + b"}",
        b'{"prompt": "x",}',
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    for path in (PATH, "/v1/chat/completions"):
        refusal(post(serve(say()), path, body), 400)


@settings(max_examples=examples(60))
@given(
    st.dictionaries(
        st.sampled_from([*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "tokens", "unknown"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_any_json_is_answered_or_refused_but_never_fails(body: dict[str, Any]) -> None:
    app = serve(say())
    raw = json.dumps(body, allow_nan=False, default=str) if _finite(body) else "{}"
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = post(app, path, raw.encode())
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            refusal(response, response.status_code)
    assert app.router.in_hand == 0


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def test_a_body_beyond_the_limit_is_413_declared_or_not() -> None:
    app = serve(say(), limits=RequestLimits(max_body_bytes=1000))
    refusal(post(app, PATH, {"prompt": "x" * 2000}), 413)

    async def undeclared() -> Any:
        async def parts() -> Any:
            for _ in range(50):
                yield b" " * 100

        async with client(app) as http:
            return await http.post(PATH, content=parts())

    refusal(run(undeclared()), 413)
    assert post(app, PATH, {"prompt": "x" * 100, "max_tokens": 1}).status_code == 200


def test_a_body_that_never_ends_is_408() -> None:
    app = serve(say(), body_seconds=0.1)

    async def work() -> Any:
        async def parts() -> Any:
            yield b"{"
            await asyncio.sleep(30)

        async with client(app) as http:
            return await http.post(PATH, content=parts())

    assert refusal(run(work()), 408)["code"] == "body_timeout"


def test_unknown_paths_methods_and_models() -> None:
    app = serve(say(), model_aliases=("other/name",))
    refusal(get(app, "/nope"), 404)
    refusal(get(app, "/v1/models/"), 404)
    refusal(get(app, PATH), 405)
    refusal(get(app, "/health", "DELETE"), 405)
    assert refusal(post(app, PATH, {**GOOD, "model": "gpt-4"}), 404)["code"] == "model_not_found"
    assert refusal(get(app, "/v1/models/gpt-4"), 404)["param"] == "model"
    assert get(app, "/v1/models/other/name").json()["id"] == "other/name"
    assert post(app, PATH, {**GOOD, "model": "other/name"}).json()["model"] == "other/name"


def test_a_name_that_is_given_twice_is_listed_once() -> None:
    """Programs that offer the list of models to their users offered one twice."""
    name = say().model_name
    listed = get(serve(say(), model_aliases=("other", name, "other")), "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [name, "other"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/completion", "did you mean /v1/completions?"),
        ("/v1/nonesuch", "no such thing"),
    ],
)
def test_a_path_that_a_client_joined_wrongly_is_told_the_right_one(path: str, meant: str) -> None:
    assert meant in refusal(post(serve(say()), path, GOOD), 404)["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/files", "keeps no files"),
        ("/v1/batches", "send requests side by side"),
        ("/v1/batches/batch_1/cancel", "send requests side by side"),
        ("/v1/audio/speech", "text alone"),
        ("/v1/threads/thread_1/runs", "/v1/responses"),
        ("/v1/fine_tuning/jobs", "`tllm train` does"),
    ],
)
def test_what_is_not_offered_is_named(path: str, why: str, method: str) -> None:
    assert why in refusal(get(serve(say()), path, method), 404)["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/msgbatch_1/results"])
def test_batches_of_messages_are_no_messages(path: str, method: str) -> None:
    reply = get(serve(say()), path, method)
    assert (reply.status_code, reply.json()["type"]) == (404, "error")
    assert "send requests side by side" in reply.json()["error"]["message"]


def test_a_method_that_a_path_has_not_is_told_which_it_has() -> None:
    assert "this path takes POST" in refusal(get(serve(say()), PATH), 405)["message"]


def test_a_refused_value_is_named_in_words() -> None:
    """Official clients show the message alone."""
    assert refusal(post(serve(say()), PATH, {**GOOD, "n": 0}), 400)["message"].startswith("n: ")


def test_all_names_that_are_served_are_told() -> None:
    app = serve(say(), model_aliases=tuple(f"name-{number}" for number in range(9)))
    message = refusal(post(app, PATH, {**GOOD, "model": "gpt-4"}), 404)["message"]
    assert "this server has 'tiny', 'name-0'" in message and message.endswith(" and 5 more")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("id 999 is beyond the vocabulary of 300", param="prompt"), 400, None),
        (CapacityError("the prompt needs 9 pages, there are 4", "serve with more memory"), 400, "capacity"),
        (ClusterError("node b went away"), 503, "node_lost"),
        (TllmError("it broke"), 500, "engine_error"),
        (NonFiniteError("the model comes to no finite numbers"), 500, "engine_error"),
    ],
)
def test_an_engines_refusal_has_a_status_even_for_a_stream(
    error: TllmError, status: int, code: str | None, stream: bool
) -> None:
    engine = say()
    engine.error, engine.fail_after = error, 0
    reply = refusal(post(serve(engine), PATH, {**GOOD, "stream": stream, "n": 2}), status)
    assert error.message in reply["message"]
    assert reply["code"] == code


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 0, "echo": True}, {"max_tokens": 1}])
def test_a_prompt_that_fills_the_context_leaves_no_room_for_a_token(asked: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": [5] * 256, **asked}
    message = refusal(post(serve(say()), PATH, body), 400)["message"]
    assert "the prompt is too long: 256 tokens > 255, as one is to follow" in message


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (PATH, {"prompt": [5] * 300}),
        (PATH, {"prompt": [5] * 256}),
        (PATH, {"prompt": "word " * 300_000}),
        (PATH, {"prompt": [5] * 9, "max_tokens": 250}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 300}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 300}], "max_tokens": 4}),
        ("/v1/responses", {"input": "word " * 300}),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 300}]}),
        ("/v1/embeddings", {"input": "word " * 300}),
    ],
)
def test_programs_know_a_context_that_is_too_short_by_its_words(path: str, asked: dict[str, Any]) -> None:
    """LiteLLM asks another model then, and agents shorten the conversation: by OpenAI's words or Anthropic's."""
    reply = post(serve(say()), path, {"model": "tiny", **asked})
    assert reply.status_code == 400
    assert "this model's maximum context length is 256 tokens" in reply.text
    assert ("the prompt is too long: " in reply.text) is (asked.get("max_tokens") != 250)


def test_too_many_prompts_are_refused_before_there_is_work_on_them() -> None:
    """A body of 100 KB, with 16 choices of each prompt, had kept everybody waiting for 43 s until it was refused."""
    body = {**GOOD, "prompt": ["a"] * 20_000, "n": 16}
    began = time.thread_time()
    message = refusal(post(serve(say(), max_sequences=320_000 - 1), PATH, body), 400)["message"]
    assert time.thread_time() - began < 10, "it takes a hundredth of a second"
    assert message.startswith("the request asks for 320000 sequences, at most 319999 are taken at once")


def test_parts_that_are_bare_texts_have_a_limit_too() -> None:
    """8 MiB have room for 2 million of them, which kept everybody waiting for 4 s; objects were limited before."""
    parts = {"messages": [{"role": "user", "content": ["a"] * 100_000}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        message = refusal(post(serve(say()), path, parts), 400)["message"]
        assert message.startswith("messages has 100000 parts of contents, at most 65536 are taken")


def test_too_much_in_hand_is_429_and_a_drain_is_503() -> None:
    app = serve(say(), max_sequences=3)
    assert refusal(post(app, PATH, {**GOOD, "n": 4}), 400)["code"] == "too_many_sequences"

    async def crowd() -> list[Any]:
        engine = app.router.client
        engine.hold_after = 1  # type: ignore[attr-defined]
        async with client(app) as http:
            held = [asyncio.create_task(http.post(PATH, json={**GOOD, "n": 2})) for _ in range(1)]
            while app.router.in_hand < 2:
                await asyncio.sleep(0.001)
            refused = await http.post(PATH, json={**GOOD, "n": 2, "stream": True})
            engine.go_on.set()  # type: ignore[attr-defined]
            return [refused, *[await one for one in held]]

    refused, served = run(crowd())
    assert refusal(refused, 429)["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert served.status_code == 200
    assert app.router.in_hand == 0
    app.router.draining = True
    response = post(app, PATH, GOOD)
    assert refusal(response, 503)["code"] == "draining"
    assert response.headers["retry-after"]
    assert refusal(get(app, "/health/ready"), 503)["code"] == "draining"
    assert get(app, "/health").status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "example.org"},
        {"api_keys": ("short",)},
        {"api_keys": ("with space in it",)},
        {"limits": RequestLimits(max_body_bytes=0)},
        {"limits": RequestLimits(max_logit_bias=1025)},
        {"max_connections": 0},
        {"stall_seconds": float("nan")},
    ],
)
def test_settings_out_of_range_are_config_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_app(say(), settings=ServerSettings(**wrong))
    assert caught.value.hint


def test_a_key_or_loopback_opens_the_door() -> None:
    for fine in ({"host": "0.0.0.0", "api_keys": ("secret-key",)}, {"host": "::1"}, {"host": "127.0.0.5"}):
        ServerSettings(**fine).check()  # type: ignore[arg-type]
