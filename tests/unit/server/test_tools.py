"""Tools, reasoning and forms of replies in chats, over an engine that says what it is told."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.server.kit import TOKENIZER, chunks, post, refusal, say, serve
from tllm.server.reply import held_calls
from tllm.server.reply.parser_choice import choose_parsers
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.a }}"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<assistant>"
    "{# <tool_call> <think> #}",
    TOKENIZER.special_tokens,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
    for name in ("f", "g")
]
SAID = (
    '<think>so</think>Ok.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call>'
)
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


def answer(text: str, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    response = post(serve(say(text), template=TEMPLATE, **settings), PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_calls_and_reasoning_come_apart_from_the_text() -> None:
    reply = answer(SAID, {})
    [choice] = reply["choices"]
    message = choice["message"]
    calls = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "Ok.", "refusal": None, "reasoning_content": "so"}
    assert [(call["type"], call["function"]) for call in calls] == [
        ("function", {"name": "f", "arguments": '{"a": 1}'}),
        ("function", {"name": "g", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert choice["finish_reason"] == "tool_calls"
    counted = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < reply["usage"]["completion_tokens"]


@pytest.mark.parametrize("together", [1, 3, 1000])
def test_a_stream_adds_up_to_the_whole(together: int) -> None:
    engine = say(SAID)
    engine.together = together
    stream = chunks(post(serve(engine, template=TEMPLATE), PATH, {**BODY, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "Ok."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("f", '{"a": 1}'), ("g", "{}")]):
        own = [part for part in parts if part["index"] == index]
        assert (own[0]["function"]["name"], own[0]["type"]) == (name, "function")
        assert all("id" not in part and "name" not in part["function"] for part in own[1:])
        assert "".join(part["function"]["arguments"] for part in own) == arguments
    assert [chunk["choices"][0]["finish_reason"] for chunk in stream if chunk["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]


def test_a_choice_of_tools_decides_what_the_model_sees_and_what_holds_it() -> None:
    def asked(**body: Any) -> tuple[str, Any]:
        engine = say("[]")
        assert post(serve(engine, template=TEMPLATE), PATH, {**BODY, **body}).status_code == 200
        [request] = engine.submitted
        return TOKENIZER.decode(request.prompt_ids), request.params.grammar

    prompt, grammar = asked()
    assert prompt == "<user>hi[f][g]<assistant>"
    assert (
        grammar.kind == "grammar" and "<tool_call>" in grammar.text and '"\\"g\\", \\"arguments\\": "' in grammar.text
    )
    assert asked(tool_choice="none") == ("<user>hi<assistant>", None)
    prompt, grammar = asked(tool_choice="required", parallel_tool_calls=False)
    assert prompt == "<user>hi[f][g]<assistant>"
    assert (grammar.free_from, grammar.free_until) == ("<think>", "</think>")
    schema = json.loads(grammar.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    named = {"type": "function", "function": {"name": "g"}}
    assert json.loads(asked(tool_choice=named)[1].text)["required"] == ["a"]


def offered(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def test_strict_asks_for_the_schema_and_else_what_cannot_be_followed_is_any_object() -> None:
    held, loose = '"a": {"type": "integer"}', '%json {"type": "object", "x-guidance"'
    odd = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "(?=x)"}}}
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 40_000, "y" * 40_000]}}}

    def grammar(*tools: Any) -> str:
        engine = say("Well.")
        response = post(serve(engine, template=TEMPLATE), PATH, {**BODY, "tools": tools})
        assert response.status_code == 200, response.text
        return str(engine.submitted[0].params.grammar.text)

    for strict in (None, True):
        assert held in grammar({**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": strict}})
    assert held not in grammar({**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}})
    for schema in (odd, large):
        text = grammar(offered(schema), TOOLS[1])
        assert loose in text and held in text, "the other tool is held all the same"


def test_a_strict_tool_whose_schema_cannot_be_followed_is_refused() -> None:
    odd = {"type": "object", "properties": {"b": {"type": "string", "pattern": "(?=x)"}}}
    body = {**BODY, "tools": [offered(odd, strict=True)]}
    error = refusal(post(serve(say(""), template=TEMPLATE), PATH, body), 400)
    assert error["param"] == "tools" and "the tool f is strict" in error["message"]
    text = {"type": "object", "properties": {"b": {"type": "string", "pattern": "x+"}}}
    coder = {**BODY, "tools": [offered(text, strict=True)]}
    assert post(serve(say("x"), template=TEMPLATE), PATH, coder).status_code == 200
    error = refusal(post(serve(say("x"), template=TEMPLATE, tool_call_parser="qwen3_coder"), PATH, coder), 400)
    assert "pattern of the text b" in error["message"]
    for wrong in ({"required": 5}, {"required": [{}]}, {"$defs": [1]}):
        app = serve(say("x"), template=TEMPLATE, tool_call_parser="qwen3_coder")
        body = {**BODY, "tools": [offered(wrong, strict=True)], "tool_choice": "required" if "$defs" in wrong else None}
        assert refusal(post(app, PATH, body), 400)["param"] == "tools"
    harmony = serve(say("x"), template=TEMPLATE, tool_call_parser="openai")
    assert "cannot be held" in refusal(post(harmony, PATH, coder), 400)["message"]


def test_each_turn_of_a_chat_makes_its_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checked = say("Well."), list[str]()
    monkeypatch.setattr(held_calls, "check_grammar", lambda grammar, param: checked.append(grammar.text))
    app = serve(engine, template=TEMPLATE)
    for turn in ("a", "b", "c"):
        assert post(app, PATH, {**BODY, "messages": [{"role": "user", "content": turn}]}).status_code == 200
    assert len({request.params.grammar for request in engine.submitted}) == 1
    assert len(checked) == 3, "each of two tools, and both together"


def test_held_replies_are_read_as_calls() -> None:
    required = answer('<think>x</think>[{"name": "g", "parameters": {"a": 2}}]', {"tool_choice": "required"})
    [call] = required["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "g", "arguments": '{"a": 2}'}
    assert required["choices"][0]["message"]["reasoning_content"] == "x"
    named = answer('{"a": 3}', {"tool_choice": {"type": "function", "function": {"name": "f"}}})
    [call] = named["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 3}'}
    assert named["choices"][0]["message"]["content"] is None
    assert named["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_only_where_no_parallel_ones_are_wanted() -> None:
    assert len(answer(SAID, {"parallel_tool_calls": False})["choices"][0]["message"]["tool_calls"]) == 1


def test_parsers_can_be_named_and_switched_off() -> None:
    plain = answer(SAID, {"tool_choice": "none"}, tool_call_parser="none", reasoning_parser="none")
    assert plain["choices"][0]["message"]["content"] == SAID
    refusal(post(serve(say(SAID), template=TEMPLATE, tool_call_parser="none"), PATH, BODY), 400)


def test_a_reply_cut_at_max_tokens_has_an_unfinished_call() -> None:
    reply = answer(SAID, {"max_tokens": len(TOKENIZER.encode(SAID, add_special_tokens=False)) - 30})
    assert reply["choices"][0]["finish_reason"] == "length"


def test_results_of_tools_reach_the_template() -> None:
    engine = say("fine")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert post(serve(engine, template=TEMPLATE), PATH, {**BODY, "messages": turns}).status_code == 200
    assert TOKENIZER.decode(engine.submitted[0].prompt_ids) == "<user>hi<assistant>7<tool>sunny[f][g]<assistant>"


def test_a_call_whose_arguments_no_text_can_hold_is_refused() -> None:
    """A model's reply may be cut between the two halves of a character; it was the server that failed."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    body = {"messages": [*BODY["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    refused = refusal(post(serve(say(), template=TEMPLATE), PATH, body), 400)
    assert refused["param"] == "messages" and "a tool call's arguments are not JSON" in refused["message"]


def test_the_last_token_of_a_form_is_shown() -> None:
    """It ends the reply without an end token, and would be hidden as a stop token."""
    engine = say("{}")
    ids = TOKENIZER.encode("{}", add_special_tokens=False)
    engine.eos_id = ids.pop()
    engine.script = lambda request: ids
    body = {"messages": BODY["messages"], "response_format": {"type": "json_object"}}
    reply = post(serve(engine, template=TEMPLATE), PATH, body).json()
    assert reply["choices"][0]["message"]["content"] == "{}"
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_grammars_are_loaded_only_where_they_are_used() -> None:
    program = "import sys, tllm.cli.main, tllm.server.app, tllm.engine.engine; assert 'llguidance' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_tokenizer_travels_whole() -> None:
    again = Tokenizer.from_bytes(TOKENIZER.to_bytes())
    assert again.encode("héllo <s> 🙂") == TOKENIZER.encode("héllo <s> 🙂")
    assert again.eos_ids == TOKENIZER.eos_ids
    assert [again.token_bytes(i) for i in range(TOKENIZER.size)] == [
        TOKENIZER.token_bytes(i) for i in range(TOKENIZER.size)
    ]
    assert choose_parsers("auto", "auto", TEMPLATE.all_sources).tools == "hermes"


@pytest.mark.parametrize(
    ("path", "tool", "hint"),
    [
        (PATH, TOOLS[0], 'give tool_choice "required" or a function, or start'),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}}, 'give tool_choice of type "any" or "tool"'),
        ("/api/chat", TOOLS[0], "start the server with --tool-call-parser NAME"),
    ],
)
def test_where_no_calls_are_read_each_interface_is_told_what_it_has(path: str, tool: object, hint: str) -> None:
    """ollama has no tool_choice, and Anthropic's is another."""
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    error = post(serve(say("x")), path, body).json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert "shows no format of calls" in said and hint in said
    assert path != "/api/chat" or "tool_choice" not in said
