"""`/v1/chat/completions`: the model's own template, both ways of answering."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.server.kit import SAID, TEMPLATE, TOKENIZER, chunks, post, refusal, say, serve
from tllm.text.chat_template import ChatTemplate

PATH = "/v1/chat/completions"


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


USER = {"role": "user", "content": "hi"}


def test_a_conversation_is_rendered_and_answered() -> None:
    engine = say()
    reply = post(serve(engine), PATH, {"model": "tiny", "messages": [USER]}).json()
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert reply["object"] == "chat.completion"
    [request] = engine.submitted
    assert TOKENIZER.decode(request.prompt_ids) == "<s><|user|>user: hi</s><｜assistant｜>"
    assert request.prompt_ids.count(TOKENIZER.bos_id) == 1
    assert request.params.max_tokens == engine.max_model_len - len(request.prompt_ids)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        (["one", "two"], "one\ntwo"),
        (None, ""),
    ],
)
def test_content_as_text_and_as_parts(content: Any, shown: str) -> None:
    engine = say()
    body = {"messages": [{"role": "assistant", "content": content}], "max_completion_tokens": 5, "max_tokens": 9}
    assert post(serve(engine), PATH, body).status_code == 200
    assert f"assistant: {shown}</s>" in TOKENIZER.decode(engine.submitted[0].prompt_ids)
    assert engine.submitted[0].params.max_tokens == 5


def test_developers_speak_as_the_system_does_where_the_template_knows_none() -> None:
    for source, role in ((TEMPLATE.source, "system"), (TEMPLATE.source + "{# 'developer' #}", "developer")):
        engine = say()
        app = serve(engine, template=ChatTemplate(source, TOKENIZER.special_tokens))
        assert post(app, PATH, {"messages": [{"role": "developer", "content": "be brief"}, USER]}).status_code == 200
        assert f"<|user|>{role}: be brief" in TOKENIZER.decode(engine.submitted[0].prompt_ids)


@pytest.mark.parametrize("long", [{"tools": True}, {"documents": [{"text": "x" * 30_000}]}, {}], ids=str)
def test_what_takes_long_to_render_is_rendered_aside(long: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, render = set[str](), ChatTemplate.render

    def noting(*args: Any, **values: Any) -> str:
        threads.add(threading.current_thread().name)
        return render(*args, **values)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    if "tools" in long:
        long = {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 30_000}}]}
    body = {"messages": [USER], "tool_choice": "required" if "tools" in long else None, **long}
    assert post(serve(say("[]")), PATH, body).status_code == 200
    assert ("MainThread" in threads) == (not long)


def test_a_stream_begins_with_role_and_text_at_once() -> None:
    body = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    stream = chunks(post(serve(say()), PATH, body))
    for index in (0, 1):
        parts = [part for chunk in stream for part in chunk["choices"] if part["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": " hello"}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert "".join(part["delta"].get("content", "") for part in parts) == SAID
        assert [part["finish_reason"] for part in parts][-1] == "stop"
        assert all(part["finish_reason"] is None for part in parts[:-1])
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["total_tokens"] > 0
    assert {chunk["object"] for chunk in stream} == {"chat.completion.chunk"}


def test_an_empty_answer_is_still_a_message() -> None:
    [chunk] = chunks(post(serve(say("")), PATH, {"messages": [USER], "stream": True}))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_in_the_chat_shape() -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    [choice] = post(serve(say("🙂")), PATH, body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]) == "🙂".encode()[:3]
    for one in content:
        assert len(one["top_logprobs"]) == 2
        assert one["token"] in [top["token"] for top in one["top_logprobs"]]
    stream = chunks(post(serve(say("🙂")), PATH, {**body, "stream": True}))
    assert [one for chunk in stream for one in chunk["choices"][0]["logprobs"]["content"]] == content
    [plain] = post(serve(say("hello")), PATH, {"messages": [USER], "logprobs": True}).json()["choices"]
    assert plain["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_last_message_can_be_continued() -> None:
    engine = say()
    body = {"messages": [USER, {"role": "assistant", "content": "The answer"}], "continue_final_message": True}
    assert post(serve(engine), PATH, body).status_code == 200
    assert TOKENIZER.decode(engine.submitted[0].prompt_ids).endswith("assistant: The answer")
    body["add_generation_prompt"] = True
    assert refusal(post(serve(engine), PATH, body), 400)["param"] == "continue_final_message"


def test_a_model_without_a_template_says_what_works() -> None:
    error = refusal(post(serve(say(), template=None), PATH, {"messages": [USER]}), 400)
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f g")], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f"), tool("f")], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(129)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f", {"type": "objekt"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "perhaps"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 10**10}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    engine = say()
    error = refusal(post(serve(engine), PATH, {"messages": [USER], **change}), 400)
    assert error["param"] == param
    assert not engine.submitted


def test_fields_that_change_nothing_are_taken() -> None:
    body = {
        "messages": [{**USER, "name": "me", "unknown": 1}],
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "user": "u",
        "store": False,
        "stop": None,
        "seed": None,
        "logprobs": None,
        "stream": None,
        "chat_template_kwargs": {"self": 1, "enable_thinking": False},
        "reasoning_effort": "low",
        "something_new": [1, 2],
    }
    assert post(serve(say()), PATH, body).status_code == 200


def test_past_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert post(serve(say()), PATH, {"messages": messages}).status_code == 200
    call["function"]["arguments"] = "{"  # type: ignore[index]
    refusal(post(serve(say()), PATH, {"messages": messages}), 400)
