"""Replies that are calls or have a form: held to one of both, however tokens cut the text, and read as such."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from tests.unit.server.reply.test_call_grammars import (
    ARGUMENTS,
    CODER,
    FA,
    FORMATS,
    GLM,
    GOOD,
    READ_OF_TAGS,
    F,
    compiler,
    cut,
    drawn,
    refused_at,
    tokenizer,
)
from tllm.core.errors import RequestError
from tllm.server.reply.call_grammars import HARMONY
from tllm.server.reply.events import MergedReply, merged
from tllm.server.reply.held_calls import AskedForm, HeldCalls, HeldTool
from tllm.server.reply.parser_choice import ReplyParser, ReplyParsers
from tllm.spec.request import Grammar
from tllm.text.grammar import MAX_GRAMMAR_BYTES, GrammarMatcher

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
PERSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
TEXT = json.dumps({"name": "f", "tags": ["<tool_call>", "TOOL_CALLS]fa{}", "</think> é🙂"]}, ensure_ascii=False)
MARKS = ("<think>", "</think>")
THOUGHT = "<think>I could <tool_call> or not</think>\n"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
BEFORE = {HARMONY: f'{ANALYSIS}I could to=functions.f {{"a"<|end|><|start|>assistant'}
FORMED = {name: f"{FINAL}{TEXT}" if name == HARMONY else TEXT for name in FORMATS}

CALLED: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {GOOD}}}\n</tool_call>\n'
        '<tool_call>{"name": "fa", "arguments": {}}</tool_call>',
        [F, FA],
    ),
    ("llama3_json", f'{{"name": "f", "parameters": {GOOD}}}; {{"name": "fa", "parameters": {{}}}}', [F, FA]),
    ("llama3_json", '<|python_tag|>{"name": "fa", "parameters": {}}', [FA]),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {GOOD}}}, {{"name": "fa", "arguments": {{}}}}]', [F, FA]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{GOOD}[TOOL_CALLS]fa{{}}", [F, FA]),
    (
        "qwen3_coder",
        f"\n<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n<function=fa>\n</function>\n</tool_call>",
        [("f", READ_OF_TAGS), FA],
    ),
    ("qwen3_coder", "<function=fa></function>", [FA]),
    ("glm45", f"<tool_call>{GLM}</tool_call>\n<tool_call>fa</tool_call>", [("f", READ_OF_TAGS), FA]),
    (
        HARMONY,
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{GOOD}<|end|>"
        "<|start|>assistant to=functions.fa<|channel|>commentary json<|message|>{}",
        [F, FA],
    ),
]

REFUSED = [
    # what may come, and what may not come after it
    *((name, "" if name != HARMONY else FINAL, "So") for name in FORMATS),
    *((name, FORMED[name][:-1], "x") for name in FORMATS),
    *((name, FORMED[name], "<") for name in FORMATS),
    ("hermes", '<tool_call>{"name": "fa", "arguments": {}}</tool_call>', " so"),
    ("hermes", '<tool_call>{"name": "f', 'b"'),
    ("llama3_json", '{"name": "fa", "parameters": {', '"'),
    ("llama3_json", '{"name": "fa", "parameters": {}}', " so"),
    ("llama3_json", '{"name": "fb", "', "parameters"),
    ("mistral", "[TOOL_CALLS]", "g"),
    ("qwen3_coder", "<function=", "g"),
    ("glm45", "<tool_call>fa</tool_call>", "."),
    (HARMONY, "<|channel|>", "comments"),
    (HARMONY, f"{ANALYSIS}so<|end|><|start|>assistant<|channel|>", "x"),
    (HARMONY, "<|channel|>commentary to=", "python"),
]


def held(
    tool_format: str,
    form: Grammar = PERSON,
    parallel: bool = True,
    reasoning: tuple[str, str] = ("", ""),
    tools: dict[str, dict[str, Any]] = ARGUMENTS,
) -> GrammarMatcher:
    """A matcher of what the server makes for these."""
    offered = [HeldTool(name, schema, True) for name, schema in tools.items()]
    calls = HeldCalls(tokenizer(tool_format), tool_format)
    grammar = asyncio.run(calls.grammar(offered, parallel, reasoning, AskedForm(form, "response_format")))
    assert grammar is not None
    return compiler(tool_format).matcher(grammar)


def reader(tool_format: str, reasoning: str = "") -> ReplyParser:
    parsers = ReplyParsers(tool_format, reasoning)
    return parsers.parser("", parsers.form_reader(True), ARGUMENTS)


def read(tool_format: str, pieces: list[str], reasoning: str = "") -> MergedReply:
    parser = reader(tool_format, reasoning)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish("stop", None)])


def may_end(matcher: GrammarMatcher, tool_format: str) -> bool:
    return matcher.is_ended or bool(matcher.allowed() >> tokenizer(tool_format).eos_ids[0] & 1)


def summary(reply: MergedReply) -> tuple[str, str, list[tuple[str, str]], str]:
    assert reply.finish is not None
    calls = [(call.name, call.arguments) for call in reply.calls]
    return reply.reasoning, reply.text, calls, reply.finish.reason


@pytest.mark.parametrize(("tool_format", "text", "calls"), [*CALLED, *((n, t, []) for n, t in FORMED.items())])
@pytest.mark.parametrize("reasons", [False, True])
def test_calls_and_forms_come_through_however_they_are_cut(
    tool_format: str, text: str, calls: list[tuple[str, str]], reasons: bool
) -> None:
    has_marks = reasons and tool_format != HARMONY
    free, name = (MARKS, "qwen3") if has_marks else (("", ""), "")
    whole = (BEFORE.get(tool_format, THOUGHT) if reasons else "") + text
    for dice in (None, *map(random.Random, range(8))):
        matcher = held(tool_format, reasoning=free)
        assert refused_at(matcher, cut(tool_format, whole, dice)) is None
        assert may_end(matcher, tool_format)
    reasoning, said, called, reason = summary(read(tool_format, [whole], name))
    assert (said, called) == ("" if calls else TEXT, calls)
    assert reason == ("tool_calls" if calls else "stop")
    assert bool(reasoning) == reasons


@pytest.mark.parametrize(("tool_format", "text"), [*((n, t) for n, t, _ in CALLED), *FORMED.items()])
def test_what_is_read_never_depends_on_where_it_was_cut(tool_format: str, text: str) -> None:
    """In two at every place, in single characters, and broken off at every place."""
    whole = BEFORE.get(tool_format, THOUGHT) + text
    name = "" if tool_format == HARMONY else "qwen3"
    wanted = summary(read(tool_format, [whole], name))
    assert summary(read(tool_format, list(whole), name)) == wanted
    for at in range(len(whole)):
        assert summary(read(tool_format, [whole[:at], whole[at:]], name)) == wanted
        begun = whole[:at]
        assert summary(read(tool_format, list(begun), name)) == summary(read(tool_format, [begun], name))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_form_is_streamed_as_it_comes(tool_format: str) -> None:
    """But for what may begin a call, and in harmony a mark."""
    parser, text = reader(tool_format), FORMED[tool_format]
    held_back = {"llama3_json": len('{"name": "f", "'), HARMONY: len(FINAL)}.get(tool_format, 0)
    came = ""
    for at, character in enumerate(text):
        came += merged(parser.push(character)).text
        if at >= held_back and (tool_format != HARMONY or character != "<"):
            assert came == text[: at + 1].removeprefix(FINAL)
        else:
            assert not came or character == "<"


@pytest.mark.parametrize(("tool_format", "good", "bad"), REFUSED)
def test_what_does_not_fit_is_refused_at_its_first_byte(tool_format: str, good: str, bad: str) -> None:
    first = len(good.encode())
    at = refused_at(held(tool_format), cut(tool_format, good + bad, None))
    assert at is not None and first <= at < first + len(bad.encode())


@pytest.mark.parametrize(("tool_format", "text"), [(n, t) for n, t, calls in CALLED if len(calls) > 1])
def test_one_call_ends_a_reply_that_may_not_have_more(tool_format: str, text: str) -> None:
    stop = refused_at(held(tool_format, parallel=False), cut(tool_format, text, None))
    assert stop is not None
    reply = read(tool_format, [text.encode()[:stop].decode()])
    assert [call.name for call in reply.calls] == ["f"] and json.loads(reply.calls[0].arguments)["a"] == 7


@pytest.mark.parametrize("tool_format", FORMATS)
def test_whatever_tokens_are_drawn_a_reply_is_calls_that_fit_or_has_the_form(tool_format: str) -> None:
    kinds, whole = set[bool](), 0
    begins = {"calls": next(text for name, text, _ in CALLED if name == tool_format)[:16], "form": FORMED[tool_format]}
    for seed, (kind, begin) in itertools.product(range(5), begins.items()):
        dice, matcher, made = random.Random(seed), held(tool_format), tokenizer(tool_format)
        begin = begin if kind == "calls" else begin[: begin.index("{") + 2]
        ids = list[int]()
        for token_id, _ in cut(tool_format, begin, None):
            assert matcher.consume(token_id)
            ids.append(token_id)
        while len(ids) < 300 and not may_end(matcher, tool_format):
            ids.append(drawn(matcher.allowed(), made, dice))
            assert matcher.consume(ids[-1])
        reply = read(tool_format, [b"".join(made.token_bytes(one) for one in ids).decode(errors="replace")])
        assert not (reply.calls and reply.text)
        if may_end(matcher, tool_format):
            whole += 1
            kinds.add(bool(reply.calls))
            for call in reply.calls:
                jsonschema.validate(json.loads(call.arguments), ARGUMENTS[call.name])
            if not reply.calls:
                jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert kinds == {False, True} and whole >= 5


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    ("form", "fits", "not_this"),
    [
        (Grammar(kind="json_schema", text='{"type":"object"}'), '{"x": [1, {}]}', '"'),
        (Grammar(kind="regex", text=r"[a-z]+/\d{2}"), "ab/12", "ab/1a"),
        (Grammar(kind="choice", text='["yes", "no \\"so\\""]'), 'no "so"', "maybe"),
        (Grammar(kind="grammar", text='start: word+\nword: "a" | "b{"\n'), "aab{", "c"),
    ],
)
def test_every_kind_of_form(tool_format: str, form: Grammar, fits: str, not_this: str) -> None:
    begin = FINAL if tool_format == HARMONY else ""
    for dice in (None, random.Random(1)):
        matcher = held(tool_format, form)
        assert refused_at(matcher, cut(tool_format, begin + fits, dice)) is None and may_end(matcher, tool_format)
    assert read(tool_format, [begin + fits]).text == fits
    assert refused_at(held(tool_format, form), cut(tool_format, begin + not_this, None)) is not None
    _, call, calls = next(one for one in CALLED if one[0] == tool_format)
    matcher = held(tool_format, form)
    assert refused_at(matcher, cut(tool_format, call, None)) is None and may_end(matcher, tool_format)
    assert summary(read(tool_format, [call]))[2] == calls


def test_json_that_llama_could_write_as_a_call_is_held_as_one() -> None:
    """Any object is a form that a call has too; one without a member `parameters` is none."""
    any_object = Grammar(kind="json_schema", text='{"type":"object"}')
    bad = '{"name": "fa", "parameters": {"x'
    assert refused_at(held("llama3_json", any_object), cut("llama3_json", bad, None)) is not None
    fine = '{"name": "fa", "x": {"parameters": 1}}'
    matcher = held("llama3_json", any_object)
    assert refused_at(matcher, cut("llama3_json", fine, None)) is None and may_end(matcher, "llama3_json")
    assert summary(read("llama3_json", [fine]))[1:3] == (fine, [])


@pytest.mark.parametrize(
    ("tool_format", "form"),
    [
        ("hermes", Grammar(kind="regex", text="<[a-z_]*>?.*")),
        ("mistral", Grammar(kind="choice", text='["[TOOL_CALLS]", "no"]')),
        (
            "llama3_json",
            Grammar(
                kind="json_schema",
                text='{"type": "object", "properties": {"name": {}, "parameters": {}}, "required": ["name"]}',
            ),
        ),
        *(
            ("llama3_json", Grammar(kind="json_schema", text=text))
            for text in (
                '{"anyOf": [{"type": "object", "required": ["parameters"]}, {"type": "object"}]}',
                '{"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"name": {}, "parameters": {}}}}}',
                '{"type": "object", "properties": {"x": {"type": "object", "properties": {"parameters": {}}}}}',
            )
        ),
        ("hermes", Grammar(kind="regex", text=" <tool_call>x")),
        ("hermes", Grammar(kind="regex", text="\\s*<tool_call>x")),
        ("hermes", Grammar(kind="regex", text="\u3000{3}\n<tool_call>x")),
        ("qwen3_coder", Grammar(kind="choice", text='["no", "\\n\\t<function="]')),
        ("glm45", Grammar(kind="grammar", text='start: "<tool_call>"\n%ignore /[ \\n]+/\n')),
    ],
)
def test_a_form_that_may_begin_as_a_call_is_refused(tool_format: str, form: Grammar) -> None:
    with pytest.raises(RequestError, match=r"response_format may begin with .* call") as caught:
        held(tool_format, form)
    assert caught.value.param == "response_format"


def test_members_may_be_called_as_words_of_a_schema_are() -> None:
    """Of any value, as a schema may be true or false; then the form stands beside calls of Llama 3."""
    text = '{"type": "object", "properties": {"required": true, "properties": true}}'
    matcher, said = held("llama3_json", Grammar(kind="json_schema", text=text)), '{"required": 1, "properties": {}}'
    assert refused_at(matcher, cut("llama3_json", said, None)) is None and may_end(matcher, "llama3_json")


def test_a_form_may_begin_with_white_space() -> None:
    form, text = Grammar(kind="regex", text="\\s*[a-z]+<tool_call>"), "\n ab<tool_call>"
    assert refused_at(held("hermes", form), cut("hermes", text, None)) is None
    assert read("hermes", [text]).text == text


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize(
    "form",
    [
        Grammar(kind="json_schema", text='{"allOf": [{"type": "object"}, {"type": "string"}]}'),
        Grammar(kind="choice", text=json.dumps(["a" * (MAX_GRAMMAR_BYTES - 100)])),
    ],
)
def test_a_form_that_cannot_be_is_not_the_fault_of_the_tools(
    form: Grammar, strict: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    calls = HeldCalls(tokenizer("hermes"), "hermes")
    tools = [HeldTool(name, schema, strict) for name, schema in ARGUMENTS.items()]
    with pytest.raises(RequestError, match="response_format cannot be followed beside the tools") as caught:
        asyncio.run(calls.grammar(tools, True, ("", ""), AskedForm(form, "response_format")))
    assert caught.value.param == "response_format" and not caplog.records
    assert "start:" not in caught.value.message and "%json" not in caught.value.message, "no line of the grammar"


def test_harmony_holds_the_final_channel_alone() -> None:
    """Also without tools; with `<|constrain|>` and without, and after any reasoning."""
    for begin in ("", BEFORE[HARMONY], 2 * BEFORE[HARMONY]):
        for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
            for end in ("", "<|return|>"):
                whole = f"{begin}{header}{TEXT}{end}"
                matcher = held(HARMONY, tools={})
                assert refused_at(matcher, cut(HARMONY, whole, random.Random(3))) is None
                assert may_end(matcher, HARMONY)
                assert summary(read(HARMONY, list(whole)))[1:3] == (TEXT, [])
    for good, bad in (("", "{"), ("<|channel|>", "commentary"), (FINAL, "x"), (f"{ANALYSIS}x", "<|return|>")):
        matcher = held(HARMONY, tools={})
        at = refused_at(matcher, cut(HARMONY, good + bad, None))
        assert at is not None and at >= len(good)


def test_harmony_without_its_special_tokens_cannot_have_both() -> None:
    calls = HeldCalls(tokenizer("hermes"), HARMONY)
    form = AskedForm(PERSON, "response_format")
    assert asyncio.run(calls.grammar([], True, ("", ""), form)) is None, "the form holds all of the reply"
    with pytest.raises(RequestError, match="no tokens that tell calls from text"):
        asyncio.run(calls.grammar([HeldTool("f", {"type": "object"})], True, ("", ""), form))
