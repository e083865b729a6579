"""Calls of tools and reasoning, read from text: what comes of it never depends on where the text was cut."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import ConfigError
from tllm.server.reply.events import MergedReply, ReplyEvent, ReplyFinish, arguments_of, merged
from tllm.server.reply.parser_choice import ReplyParser, ReplyParsers, choose_parsers

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "a": {"type": "integer"}, "b": {"type": "boolean"}},
    },
    "g": {},
}
HARD = {"a": '</tool_call> "{[\\ é🙂', "b": [1, {"c": None}], "": {}}
HARD_TEXT = json.dumps(HARD)

CASES: dict[str, tuple[ReplyParsers, str, str, str, list[tuple[str, str]]]] = {
    # name: parsers, prompt's end, the reply; and of it reasoning+text and calls
    "hermes, twice, text around": (
        ReplyParsers("hermes"),
        "",
        f'One.\n\n<tool_call>\n{{"name": "f", "arguments": {HARD_TEXT}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>\n Two.',
        "|One.Two.",
        [("f", HARD_TEXT), ("g", "{}")],
    ),
    "hermes, no arguments": (
        ReplyParsers("hermes"),
        "",
        '<tool_call>{"name": "g"}</tool_call>',
        "|",
        [("g", "{}")],
    ),
    "hermes, what is no call": (
        ReplyParsers("hermes"),
        "",
        'a <tool_call> b < tool_call> <tool_call>{"nom": 1}</tool_call>',
        '|a <tool_call> b < tool_call> <tool_call>{"nom": 1}</tool_call>',
        [],
    ),
    "hermes, broken off in the arguments": (
        ReplyParsers("hermes"),
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        "|",
        [("f", '{"a": "x')],
    ),
    "hermes, broken off in the name": (
        ReplyParsers("hermes"),
        "",
        '<tool_call>{"name": "f',
        '|<tool_call>{"name": "f',
        [],
    ),
    "llama3, two": (
        ReplyParsers("llama3_json"),
        "",
        f'{{"name": "f", "parameters": {HARD_TEXT}}}; {{"name": "g", "parameters": {{}}}}',
        "|",
        [("f", HARD_TEXT), ("g", "{}")],
    ),
    "llama3, tag": (
        ReplyParsers("llama3_json"),
        "",
        '<|python_tag|>{"name": "g", "parameters": {}}',
        "|",
        [("g", "{}")],
    ),
    "llama3, text": (ReplyParsers("llama3_json"), "", ' Hello {"name": 1}', '| Hello {"name": 1}', []),
    "llama3, JSON that is no call": (ReplyParsers("llama3_json"), "", '{"a": [1, 2]}\n', '|{"a": [1, 2]}\n', []),
    "mistral, a list": (
        ReplyParsers("mistral"),
        "",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {HARD_TEXT}}}, {{"name": "g", "arguments": {{}}}}]',
        "|",
        [("f", HARD_TEXT), ("g", "{}")],
    ),
    "mistral, what is no call": (
        ReplyParsers("mistral"),
        "",
        '[TOOL_CALLS] [ {"a": 1} , 2] and [TOOL_CALLS][] and [TOOL_CALLS][{"name": "g", "arguments": {}}, 3]',
        '|[TOOL_CALLS] [ {"a": 1} , 2] and [TOOL_CALLS][] and3]',
        [("g", "{}")],
    ),
    "mistral, each with a mark": (
        ReplyParsers("mistral", "mistral"),
        "",
        f"[THINK]Hm.[/THINK]Ok [TOOL_CALLS]f[ARGS]{HARD_TEXT}[TOOL_CALLS]g{{}}",
        "Hm.|Ok",
        [("f", HARD_TEXT), ("g", "{}")],
    ),
    "qwen3_coder": (
        ReplyParsers("qwen3_coder"),
        "",
        "Ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n12\nx < y\n</parameter>\n"
        "<parameter=b>\nTrue\n</parameter>\n<parameter=other>\nnone of them\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "|Ok",
        [("f", '{"a": 1, "s": "12\\nx < y", "b": true, "other": "none of them"}'), ("g", "{}")],
    ),
    "qwen3_coder, broken off": (
        ReplyParsers("qwen3_coder"),
        "",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n12",
        "|",
        [("f", '{"a": 1')],
    ),
    "qwen3_coder, broken off before a parameter": (
        ReplyParsers("qwen3_coder"),
        "",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<param",
        "|",
        [("f", '{"a": 1')],
    ),
    "qwen3_coder, broken off in its end": (
        ReplyParsers("qwen3_coder"),
        "",
        "<tool_call>\n<function=g>\n</function>\n</tool_",
        "|",
        [("g", "{}")],
    ),
    "glm45, broken off before a parameter": (
        ReplyParsers("glm45"),
        "",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg",
        "|",
        [("f", '{"a": 1')],
    ),
    "hermes, broken off in its end": (
        ReplyParsers("hermes"),
        "",
        '<tool_call>{"name": "g", "arguments": {}}\n</tool',
        "|",
        [("g", "{}")],
    ),
    "glm45": (
        ReplyParsers("glm45", "glm45"),
        "",
        "<think>why</think>\nOk\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>a</arg_key>"
        "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "why|Ok",
        [("f", '{"s": "12", "a": [1]}'), ("g", "{}")],
    ),
    "harmony": (
        ReplyParsers("openai", "openai_gptoss"),
        "",
        "<|channel|>analysis<|message|>I think <b>.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{HARD_TEXT}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        "I think <b>.|Wait.",
        [("f", HARD_TEXT), ("g", "{}")],
    ),
    "harmony, final": (
        ReplyParsers("openai", "openai_gptoss"),
        "",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>4 < 5",
        "Hm|4 < 5",
        [],
    ),
    "harmony, cut in a header": (
        ReplyParsers("openai", "openai_gptoss"),
        "",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>fin",
        "Hm|",
        [],
    ),
    "harmony, cut in a header after no end": (
        ReplyParsers("openai", "openai_gptoss"),
        "",
        "<|channel|>analysis<|message|>Hm<|start|>assistant",
        "Hm|",
        [],
    ),
    "harmony without a header": (ReplyParsers("openai", "openai_gptoss"), "", "Well, 4 < 5", "|Well, 4 < 5", []),
    "reasoning, then text": (
        ReplyParsers("hermes", "qwen3"),
        "<|im_start|>assistant\n",
        "<think>\nIs <b> so?\n</think>\n\nYes.\n",
        "Is <b> so?|Yes.\n",
        [],
    ),
    "reasoning that the prompt began": (
        ReplyParsers("", "deepseek_r1"),
        "<think>\n",
        "so </think> it </think> is",
        "so|it </think> is",
        [],
    ),
    "reasoning that the prompt ended": (
        ReplyParsers("", "qwen3"),
        "<think>\n\n</think>\n\n",
        "<think>x",
        "|<think>x",
        [],
    ),
    "reasoning broken off": (ReplyParsers("", "qwen3"), "", "<think>why </thi", "why </thi|", []),
    "no reasoning": (ReplyParsers("", "qwen3"), "", "\n <thinking>", "|\n <thinking>", []),
    "reasoning, then a call": (
        ReplyParsers("hermes", "qwen3"),
        "",
        '<think>x <tool_call> y</think>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "x <tool_call> y|",
        [("g", "{}")],
    ),
}


def reply(parsers: ReplyParsers, prompt: str, pieces: list[str], reason: str = "stop") -> MergedReply:
    parser: ReplyParser = parsers.parser(prompt, None, SCHEMAS)
    events: list[ReplyEvent] = [event for piece in pieces for event in parser.push(piece)]
    return without_ids(merged([*events, *parser.finish(reason, None)]))


def without_ids(whole: MergedReply) -> MergedReply:
    ids = [call.id for call in whole.calls]
    assert len(set(ids)) == len(ids)
    for call in whole.calls:
        assert call.id.startswith("call_")
        call.id = ""
    return whole


@pytest.mark.parametrize("name", CASES)
def test_replies_are_read_as_they_were_meant(name: str) -> None:
    parsers, prompt, text, said, calls = CASES[name]
    whole = reply(parsers, prompt, [text])
    assert f"{whole.reasoning}|{whole.text}" == said
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    assert whole.finish == ReplyFinish("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", CASES)
def test_every_cut_in_two_and_single_characters_give_the_same(name: str) -> None:
    parsers, prompt, text, _, _ = CASES[name]
    whole = reply(parsers, prompt, [text])
    for at in range(len(text) + 1):
        assert reply(parsers, prompt, [text[:at], text[at:]]) == whole
    assert reply(parsers, prompt, list(text)) == whole


@pytest.mark.parametrize("name", CASES)
def test_every_reply_that_breaks_off_is_the_same_however_it_came(name: str) -> None:
    parsers, prompt, text, _, _ = CASES[name]
    for stop in range(len(text)):
        whole = reply(parsers, prompt, [text[:stop]], "length")
        assert reply(parsers, prompt, list(text[:stop]), "length") == whole
        assert whole.finish == ReplyFinish("length")


@given(
    name=st.sampled_from(sorted(CASES)),
    noise=st.lists(st.sampled_from(['{"name": "f"', "<tool_call>", "</think>", "[", "}", '"', ",", "\\", " ", "x"])),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    at=st.integers(0, 200),
)
def test_any_text_in_any_pieces(name: str, noise: list[str], cuts: list[int], at: int) -> None:
    parsers, prompt, text, _, _ = CASES[name]
    text = text[:at] + "".join(noise) + text[at:]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert reply(parsers, prompt, pieces) == reply(parsers, prompt, [text])


def test_arguments_come_while_they_are_written() -> None:
    parser = ReplyParsers("hermes").parser("", None, SCHEMAS)
    assert merged(parser.push('<tool_call>{"name": "f", "arguments": {"a": "lo')).calls[0].arguments == '{"a": "lo'


def test_only_the_first_call_is_given_where_no_parallel_ones_are_wanted() -> None:
    parser = ReplyParsers("hermes").parser("", None, SCHEMAS)
    parser.max_calls = 1
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert len(merged([*parser.push(text), *parser.finish("stop", None)]).calls) == 1


def test_a_reply_without_tools_has_no_calls() -> None:
    parser = ReplyParsers("hermes").parser("", None, {})
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert merged([*parser.push(text), *parser.finish("stop", None)]).text == text


def test_gpt_oss_calls_nothing_where_no_tools_are_offered() -> None:
    """As with `tool_choice` "none" after turns with calls: a client that offers nothing could not run them."""
    parser = ReplyParsers("openai", "openai_gptoss").parser("", None, {})
    text = (
        "<|channel|>analysis<|message|>Again.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    whole = merged([*parser.push(text), *parser.finish("stop", None)])
    assert (whole.reasoning, whole.text, whole.calls) == ("Again.", '{"a": 1}', [])
    assert whole.finish == ReplyFinish("stop")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|im_start|> <tool_call>", "hermes", ""),
        ("<think> <tool_call> <function=", "qwen3_coder", "qwen3"),
        ("<tool_call> <arg_key> <think></think>", "glm45", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("Environment: ipython", "llama3_json", ""),
        ("<|start|>assistant<|channel|>analysis", "openai", "openai_gptoss"),
        ("{{ messages }}", "", ""),
    ],
)
def test_the_template_tells_the_format(template: str, tools: str, reasoning: str) -> None:
    assert choose_parsers("auto", "auto", template) == ReplyParsers(tools, reasoning)
    assert choose_parsers("none", "none", template) == ReplyParsers("", "")
    assert choose_parsers("hermes", "qwen3", template) == ReplyParsers("hermes", "qwen3")


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="hermez") as raised:
        choose_parsers("hermez", "auto", "")
    assert "hermes" in raised.value.hint


def test_what_a_grammar_leaves_free_follows_from_the_prompt() -> None:
    parsers = ReplyParsers("hermes", "qwen3")
    assert parsers.free_part("<|assistant|>") == ("<think>", "</think>")
    assert parsers.free_part("<|assistant|><think>\n") == ("", "</think>")
    assert parsers.free_part("<|assistant|><think>\n\n</think>\n\n") == ("", "")
    assert ReplyParsers("hermes").free_part("<think>") == ("", "")


@pytest.mark.parametrize(
    ("parser", "begin", "end"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n", "\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ],
)
def test_a_file_of_200_kb_is_a_parameter_like_another(parser: str, begin: str, end: str) -> None:
    """One of more than 64 KB was given out as text, and the call had no arguments. It is looked through once: else so
    many tokens would take minutes."""
    content = "x = [1, 2] if a < b else {}\n" * 8000
    reply = ReplyParsers(parser).parser("", schemas=SCHEMAS)
    text, events = begin + content + end, list[ReplyEvent]()
    began = time.thread_time()
    for at in range(0, len(text), 4):
        events += reply.push(text[at : at + 4])
    events += reply.finish("stop", None)
    assert time.thread_time() - began < 10, "it takes a third of a second"
    found = merged(events)
    assert found.text == "" and [call.name for call in found.calls] == ["f"]
    assert json.loads(found.calls[0].arguments) == {"s": content.removesuffix("\n") if parser == "glm45" else content}
    assert found.finish is not None and found.finish.reason == "tool_calls"


def test_arguments_that_are_no_json_are_none_at_all() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("") == arguments_of('{"a": ') == arguments_of("[" * 100_000) == {}
