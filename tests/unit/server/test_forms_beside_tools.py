"""Tools and a form of the reply in one request: calls or text in the form, in each interface, over an engine that says
what it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, chunks, post, refusal, say, serve
from tllm.server.app import App
from tllm.server.reply.harmony_grammar import HARMONY_IN_HEADERS
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<assistant>{# <tool_call> <think> #}",
    TOKENIZER.special_tokens,
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
SCHEMA = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "response_format": FORM}
TEXT = json.dumps({"said": '<tool_call>{"name": "g", "arguments": {}}</tool_call>'})
CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
CALLED = [("f", '{"a": 1}'), ("g", "{}")]


def over(engine: FakeEngine, **settings: Any) -> App:
    return serve(engine, template=TEMPLATE, **settings)


def asked(engine: FakeEngine, path: str = PATH, **body: Any) -> Any:
    response = post(over(engine), path, body)
    assert response.status_code == 200, response.text
    return response.json()


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


@pytest.mark.parametrize("thought", ["", "<think>Call <tool_call>?</think>\n"])
@pytest.mark.parametrize(("said", "text", "calls"), [(CALLS, None, CALLED), (TEXT, TEXT, [])])
def test_a_reply_is_calls_or_text_in_the_form(
    thought: str, said: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    engine = say(thought + said)
    [choice] = asked(engine, **BODY)["choices"]
    assert (choice["message"]["content"], calls_of(choice["message"])) == (text, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and '"said"' in grammar.text and "<tool_call>" in grammar.text
    assert TOKENIZER.decode(engine.submitted[-1].prompt_ids) == "<user>hi[f][g]<assistant>"


@pytest.mark.parametrize("together", [1, 3, 1000])
@pytest.mark.parametrize(("said", "text", "calls"), [(CALLS, "", CALLED), (TEXT, TEXT, [])])
def test_a_stream_adds_up_to_the_whole(together: int, said: str, text: str, calls: list[tuple[str, str]]) -> None:
    engine = say("<think>so</think>" + said)
    engine.together = together
    stream = chunks(post(over(engine), PATH, {**BODY, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    found = dict[int, list[str]]()
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        found.setdefault(part["index"], []).append(part["function"].get("name", "") + part["function"]["arguments"])
    assert ["".join(parts) for parts in found.values()] == [name + arguments for name, arguments in calls]


def test_a_choice_of_tools_says_which_of_both() -> None:
    engine = say('[{"name": "g", "parameters": {"a": 2}}]')
    message = asked(engine, **BODY, tool_choice="required")["choices"][0]["message"]
    assert (message["content"], calls_of(message)) == (None, [("g", '{"a": 2}')])
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema" and "said" not in grammar.text
    engine = say('{"a": 3}')
    named = {"type": "function", "function": {"name": "f"}}
    assert calls_of(asked(engine, **BODY, tool_choice=named)["choices"][0]["message"]) == [("f", '{"a": 3}')]
    engine = say(TEXT)
    message = asked(engine, **BODY, tool_choice="none")["choices"][0]["message"]
    assert (message["content"], calls_of(message)) == (TEXT, [])
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.text) == SCHEMA


def test_any_form_goes_with_tools_and_is_checked_first() -> None:
    for form in ({"response_format": {"type": "json_object"}}, {"guided_regex": "[a-z]+"}, {"guided_choice": ["a"]}):
        engine = say("a")
        asked(engine, **{**BODY, "response_format": None, **form})
        grammar = engine.submitted[-1].params.grammar
        assert grammar is not None and grammar.kind == "grammar"
    bad = {**BODY, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}
    for choice in ("auto", "required", "none"):
        assert refusal(post(over(say()), PATH, {**bad, "tool_choice": choice}), 400)["param"] == "response_format"
    begins_alike = {**BODY, "response_format": None, "guided_regex": "<.*"}
    assert "begins a call of this model" in refusal(post(over(say()), PATH, begins_alike), 400)["message"]


def test_a_form_without_parallel_calls() -> None:
    engine = say(CALLS)
    message = asked(engine, **BODY, parallel_tool_calls=False)["choices"][0]["message"]
    assert calls_of(message) == CALLED[:1]


def test_responses_have_both() -> None:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("f", "g")]
    body = {"input": "hi", "tools": tools, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    made = asked(say(CALLS), "/v1/responses", **body)
    assert [(item["type"], item.get("name")) for item in made["output"]] == [
        ("function_call", "f"),
        ("function_call", "g"),
    ]
    [item] = asked(say(TEXT), "/v1/responses", **body)["output"]
    assert item["content"][0]["text"] == TEXT


def test_messages_have_both() -> None:
    body = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": BODY["messages"],
        "tools": [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    made = asked(say(CALLS), "/v1/messages", **body)
    assert [(block["type"], block["name"]) for block in made["content"]] == [("tool_use", "f"), ("tool_use", "g")]
    assert made["stop_reason"] == "tool_use"
    assert asked(say(TEXT), "/v1/messages", **body)["content"] == [{"type": "text", "text": TEXT}]


def test_ollamas_chats_have_both() -> None:
    body = {"model": "tiny", "messages": BODY["messages"], "tools": TOOLS, "format": SCHEMA, "stream": False}
    made = asked(say(CALLS), "/api/chat", **body)["message"]
    assert [(call["function"]["name"]) for call in made["tool_calls"]] == ["f", "g"]
    made = asked(say(TEXT), "/api/chat", **body)["message"]
    assert (made["content"], made.get("tool_calls")) == (TEXT, None)


def harmony() -> Tokenizer:
    """The same with gpt-oss's special tokens."""
    inner = tokenizers.Tokenizer.from_str(TOKENIZER.inner.to_str())
    inner.add_special_tokens([*HARMONY_IN_HEADERS, "<|end|>"])
    return Tokenizer(inner, TOKENIZER.special_tokens)


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_of_harmony_is_that_of_its_final_channel(tools: list[Any] | None, stream: bool) -> None:
    tokenizer = harmony()
    said = f"<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}"
    engine = FakeEngine.saying(tokenizer, said)
    app = serve(engine, tokenizer, TEMPLATE, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    response = post(app, PATH, {**BODY, "tools": tools, "stream": stream})
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(response)]
        assert "".join(delta.get("content") or "" for delta in deltas) == TEXT
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    else:
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (TEXT, "so")
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and grammar.kind == "grammar" and '"analysis"' in grammar.text
    assert ("functions.f" in grammar.text) == (tools is not None)


HARMONY_TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    TOKENIZER.special_tokens,
)
PREFILLED = [*BODY["messages"], {"role": "assistant", "content": '{"said": "'}]
MESSAGES_FORM = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 200}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"response_format": FORM, "continue_final_message": True, "add_generation_prompt": False}),
        ("/v1/messages", {"model": "tiny", **MESSAGES_FORM}),
    ],
)
def test_a_form_of_harmony_holds_what_goes_on_with_a_message(path: str, body: dict[str, Any], tools: bool) -> None:
    """The prompt ends inside the final channel, where no other begins."""
    tokenizer = harmony()
    offered = [{"name": "f", "input_schema": PARAMETERS}] if path == "/v1/messages" else TOOLS
    engine = FakeEngine.saying(tokenizer, TEXT)
    app = serve(engine, tokenizer, HARMONY_TEMPLATE, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    response = post(app, path, {**body, "messages": PREFILLED, **({"tools": offered} if tools else {})})
    assert response.status_code == 200, response.text
    made = response.json()
    text = made["content"][0]["text"] if path == "/v1/messages" else made["choices"][0]["message"]["content"]
    assert text == TEXT
    [request] = engine.submitted
    assert tokenizer.decode(request.prompt_ids, skip_special_tokens=False).endswith('final<|message|>{"said": "')
    assert request.params.grammar is not None and request.params.grammar.kind == "json_schema"
    assert json.loads(request.params.grammar.text) == SCHEMA


def test_a_form_of_harmony_without_its_tokens_holds_all_of_the_reply() -> None:
    """They are text to this tokenizer, so that nothing tells where the final channel begins."""
    engine = say(TEXT)
    app = over(engine, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    message = post(app, PATH, {**BODY, "tools": None}).json()["choices"][0]["message"]
    assert message["content"] == TEXT
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert refusal(post(app, PATH, BODY), 400)["param"] == "response_format"
