"""ollama's interface by its own client, over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import ollama
import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, get, post, said, say, serve
from tests.unit.server.test_tools import SAID, TEMPLATE, TOOLS
from tllm.core.errors import ClusterError
from tllm.server.app import App
from tllm.server.ollama.requests import OllamaCall, OllamaChatRequest, OllamaFunction, OllamaMessage, as_chat

_T = TypeVar("_T")
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def over(engine: FakeEngine, **settings: Any) -> App:
    return serve(engine, template=TEMPLATE, **settings)


def by_client(app: App, work: Callable[[ollama.AsyncClient], Awaitable[_T]]) -> _T:
    """What the client's own methods make of the replies."""

    async def run() -> _T:
        client = ollama.AsyncClient(host="http://127.0.0.1:8000", transport=httpx.ASGITransport(app=app))
        try:
            return await work(client)
        finally:
            await client._client.aclose()

    return asyncio.run(run())


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.submitted[-1].prompt_ids, False)


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, dict(call.function.arguments)) for call in message.tool_calls or ()]


def test_a_reply_has_reasoning_text_and_calls() -> None:
    made = by_client(over(say(SAID)), lambda client: client.chat("tiny:latest", HELLO, tools=TOOLS))
    assert (made.message.thinking, made.message.content) == ("so", "Ok.")
    assert calls_of(made.message) == [("f", {"a": 1}), ("g", {})]
    assert made.done and made.done_reason == "stop" and made.model == "tiny:latest"
    assert made.eval_count and made.prompt_eval_count and made.total_duration


def test_a_model_that_is_served_is_there_for_who_pulls_it_and_no_other() -> None:
    async def pull(client: ollama.AsyncClient) -> list[Any]:
        parts = [part.status async for part in await client.pull("tiny:latest", stream=True)]
        return [(await client.pull("tiny")).status, *parts]

    assert by_client(over(say()), pull) == ["success", "success"]
    with pytest.raises(ollama.ResponseError, match="'llama3' is not served here; this server has 'tiny'"):
        by_client(over(say()), lambda client: client.pull("llama3"))


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.create("x", from_="tiny"),
        lambda client: client.copy("tiny", "x"),
        lambda client: client.push("tiny"),
        lambda client: client.delete("tiny"),
    ],
)
def test_models_are_not_changed(change: Callable[[ollama.AsyncClient], Awaitable[Any]]) -> None:
    """It was asked whether /api/chat or /api/ps was meant."""
    with pytest.raises(ollama.ResponseError, match="makes, copies, sends and deletes none"):
        by_client(over(say()), change)


@pytest.mark.parametrize("raw", [False, True])
def test_log_probabilities_come_with_their_text(raw: bool) -> None:
    """Of every token, in whole replies and in streams, where a token that shows nothing waits for the next line."""
    app = over(say("so 🙂 ok"))
    asked: dict[str, Any] = dict(model="tiny", prompt="hi", raw=raw, logprobs=True, top_logprobs=2)
    whole = by_client(app, lambda client: client.generate(**asked))

    async def stream(client: ollama.AsyncClient) -> list[Any]:
        return [part async for part in await client.generate(**asked, stream=True)]

    parts = by_client(app, stream)
    streamed = [one for part in parts for one in part.logprobs or ()]
    assert whole.logprobs == streamed
    assert "".join(one.token for one in streamed if not one.token.startswith("bytes:")) == "so  ok</s>"
    assert all(len(one.top_logprobs) == 2 and one.logprob < 0 for one in streamed)
    plain = by_client(app, lambda client: client.generate("tiny", "hi"))
    assert plain.logprobs is None and plain.response == whole.response


def test_a_stream_adds_up_to_the_reply() -> None:
    async def work(client: ollama.AsyncClient) -> list[Any]:
        return [part async for part in await client.chat("tiny", HELLO, tools=TOOLS, stream=True)]

    parts = by_client(over(say(SAID)), work)
    assert "".join(part.message.thinking or "" for part in parts) == "so"
    assert "".join(part.message.content or "" for part in parts) == "Ok."
    assert [call for part in parts for call in calls_of(part.message)] == [("f", {"a": 1}), ("g", {})]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert not parts[-1].message.tool_calls and parts[-1].eval_count


def test_a_generation_has_the_template_around_it_or_not() -> None:
    engine = say(" fine")
    made = by_client(over(engine), lambda client: client.generate("tiny", "ask", system="be brief"))
    assert made.response == " fine" and made.done_reason == "stop"
    assert prompt_of(engine) == "<system>be brief<user>ask<assistant>"
    made = by_client(over(engine), lambda client: client.generate("tiny", "ask", raw=True))
    assert made.response == " fine" and prompt_of(engine) == "<s>ask", "the begin token alone"


def test_a_stream_of_a_generation() -> None:
    async def work(client: ollama.AsyncClient) -> list[Any]:
        return [part async for part in await client.generate("tiny", "ask", raw=True, stream=True)]

    parts = by_client(over(say(" a b c")), work)
    assert "".join(part.response for part in parts) == " a b c"
    assert parts[-1].done and parts[-1].done_reason == "stop"


def test_a_conversation_with_results_of_tools_reaches_the_template() -> None:
    engine = say(" fine")
    call = {"function": {"name": "f", "arguments": {"a": 7}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seven", "tool_name": "f"},
    ]
    by_client(over(engine), lambda client: client.chat("tiny", messages, tools=TOOLS))
    assert prompt_of(engine) == "<user>hi<assistant>7<tool>seven[f][g]<assistant>"


def test_a_result_belongs_to_the_call_of_its_tool() -> None:
    """Tools end in any order, and templates that write the ids of calls, as Mistral's do, would name the wrong one."""

    def ids(*results: str | None) -> list[str | None]:
        calls = [OllamaCall(function=OllamaFunction(name=name)) for name in ("f", "g", "g")]
        messages = [OllamaMessage(role="assistant", tool_calls=calls)]
        messages += [OllamaMessage(role="tool", content="x", tool_name=name) for name in results]
        return [one.tool_call_id for one in as_chat(OllamaChatRequest(model="m", messages=messages)).messages[1:]]

    assert ids("g", "f", "g", "g") == ["call_0_1", "call_0_0", "call_0_2", None]
    assert ids(None, None, None) == ["call_0_0", "call_0_1", "call_0_2"]


def test_options_mean_what_they_say() -> None:
    engine = say(" one two three")
    options = {"temperature": 0, "top_k": 3, "repeat_penalty": 1.5, "num_predict": 9, "stop": [" two"], "num_ctx": 4096}
    made = by_client(over(engine), lambda client: client.chat("tiny", HELLO, options=options, keep_alive="5m"))
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.max_tokens) == (0.0, 3, 1.5, 9)
    assert made.message.content == " one"
    for most in (0, -1, -2):
        options = {"num_predict": most}
        by_client(over(engine), lambda client, options=options: client.chat("tiny", HELLO, options=options))
        assert engine.submitted[-1].params.max_tokens > 100
    for given in ({}, {"num_predict": -1}):
        by_client(over(engine), lambda client, given=given: client.generate("tiny", "hi", raw=True, options=given))
        assert engine.submitted[-1].params.max_tokens > 100, "a completion of OpenAI's would have 16"
    for most in (2, 100_000):  # or what the context leaves
        options = {"num_predict": most}
        engine = say(" a" * 900)
        made = by_client(over(engine), lambda client, options=options: client.chat("tiny", HELLO, options=options))
        assert made.done_reason == "length" and made.eval_count == min(most, 256 - made.prompt_eval_count)


def test_without_words_the_model_is_only_to_be_loaded() -> None:
    engine = say()
    assert by_client(over(engine), lambda client: client.generate("tiny")).done_reason == "load"
    made = by_client(over(engine), lambda client: client.chat("tiny"))
    assert made.done and made.done_reason == "load" and not made.message.content and not engine.submitted


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_form_holds_the_reply(form: Any) -> None:
    engine = say('{"a": 1}')
    by_client(over(engine), lambda client: client.chat("tiny", HELLO, format=form))
    assert engine.submitted[-1].params.grammar is not None


def test_what_programs_ask_before() -> None:
    app = over(say(), model_aliases=("other",))
    listed = by_client(app, lambda client: client.list())
    assert [model.model for model in listed.models] == ["tiny", "other"]
    shown = by_client(app, lambda client: client.show("tiny"))
    assert shown.capabilities == ["completion", "embedding", "tools", "thinking"] and shown.template == TEMPLATE.source
    assert shown.modelinfo == {"general.architecture": "tllm", "tllm.context_length": 256}
    running = by_client(app, lambda client: client.ps())
    assert running.models[0].context_length == 256
    assert tuple(map(int, get(app, "/api/version").json()["version"].split("."))) >= (0, 6, 4), "programs refuse less"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "llama", "messages": HELLO}, 404, "is not served here"),
        ("show", {"model": "llama"}, 404, "is not served here"),
        ("chat", {"messages": HELLO}, 400, "model"),
        ("chat", {"model": "tiny", "messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, "only text is supported"),
        ("chat", {"model": "tiny", "messages": HELLO, "format": "xml"}, 400, "it takes json"),
        ("generate", {"model": "tiny", "prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    ],
)
def test_what_is_not_done_is_refused(path: str, body: Any, status: int, words: str) -> None:
    assert words in said(post(over(say()), f"/api/{path}", body), status)


def test_the_client_reads_our_errors() -> None:
    with pytest.raises(ollama.ResponseError, match="is not served here"):
        by_client(over(say()), lambda client: client.chat("llama", HELLO))


def test_an_error_in_mid_stream_is_a_line() -> None:
    engine = say(" a b c d")
    engine.fail_after, engine.error = 2, ClusterError("node lab-2 went away")
    reply = post(over(engine), "/api/chat", {"model": "tiny", "messages": HELLO})
    assert reply.headers["content-type"] == "application/x-ndjson"
    *_, last = map(json.loads, reply.text.splitlines())
    assert last == {"error": "node lab-2 went away"}
    engine.fail_after = 0
    reply = post(over(engine), "/api/chat", {"model": "tiny", "messages": HELLO})
    assert reply.status_code == 503 and reply.json() == {"error": "node lab-2 went away"}
