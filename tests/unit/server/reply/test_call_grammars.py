"""Calls while the model decides: free until the mark that begins one, and then held, however tokens cut the text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
import tokenizers

from tests.unit.text import kits
from tllm.server.reply.call_grammars import BODIES, HARMONY, call_grammar
from tllm.server.reply.events import MergedReply, merged
from tllm.server.reply.harmony_grammar import HARMONY_IN_HEADERS
from tllm.server.reply.lark_rules import SpecialTokens
from tllm.server.reply.parameter_grammar import why_not_in_tags
from tllm.server.reply.parser_choice import THINK, THINK_MISTRAL, ReplyParsers
from tllm.server.reply.reasoning import ReasoningMarks
from tllm.spec.request import Grammar
from tllm.text.grammar import GrammarCompiler, GrammarMatcher
from tllm.text.tokenizer import Tokenizer

ARGUMENTS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "a": {"type": "integer", "minimum": 0, "maximum": 99},
            "b": {"type": "boolean"},
            "e": {"type": "string", "enum": ["up", "down"]},
            "o": {"$ref": "#/$defs/pair"},
        },
        "required": ["a", "e"],
        "additionalProperties": False,
        "$defs": {"pair": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
    },
    "fa": {"type": "object", "properties": {}, "additionalProperties": False},
}
GOOD = json.dumps({"s": '</tool_call> "{\\ é🙂', "a": 7, "b": True, "e": "up", "o": [1, 2]}, ensure_ascii=False)
READ_OF_TAGS = '{"s": "x < y\\n2", "a": 7, "e": "down", "o": [1, 2]}'
CODER = (
    "<function=f>\n<parameter=s>\nx < y\n2\n</parameter>\n<parameter=a>\n7\n</parameter>\n<parameter=e>\n"
    "down\n</parameter>\n<parameter=o>\n[1, 2]\n</parameter>\n</function>"
)
GLM = (
    "f\n<arg_key>s</arg_key>\n<arg_value>x < y\n2</arg_value>\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"
    "<arg_key>e</arg_key>\n<arg_value>down</arg_value>\n<arg_key>o</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
)
CALL = "<|channel|>commentary to=functions."

FORMATS, IN_TAGS = [*BODIES, HARMONY], ("qwen3_coder", "glm45")
BEFORE_TEXT = {HARMONY: "<|channel|>final<|message|>So"}
BEGINNINGS = {
    "hermes": ["<tool_call>", "é so <tool_call>\n"],
    "llama3_json": [' {"name":', "<|python_tag|>", '{"type": "function", "name": '],
    "mistral": ["[TOOL_CALLS]", "So[TOOL_CALLS]["],
    "qwen3_coder": ["<tool_call>", "Now <function="],
    "glm45": ["<tool_call>", "é <tool_call>"],
    HARMONY: ["<|channel|>commentary to=", "<|channel|>analysis<|message|>x<|end|><|start|>assistant to="],
}

F, FA = ("f", GOOD), ("fa", "{}")
WHOLE: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'Hm <tool_cal\n<tool_call>\n{{"name": "f", "arguments": {GOOD}}}\n</tool_call>\n and '
        '<tool_call>{"name": "fa", "arguments": {}}</tool_call> so',
        [F, FA],
    ),
    ("hermes", "Only </tool_call> text, {", []),
    ("llama3_json", f'{{"name": "f", "parameters": {GOOD}}}; {{"name": "fa", "parameters": {{}}}}', [F, FA]),
    ("llama3_json", '<|python_tag|>{"name": "fa", "parameters": {}}', [FA]),
    ("llama3_json", '{"type": "function", "name": "fa", "parameters": {}}', [FA]),
    ("llama3_json", '{"answer": [1, {"name": 2}]} {"name": "f"}', []),
    (
        "mistral",
        f'So [TOOL_CALLS][{{"name": "f", "arguments": {GOOD}}}, {{"name": "fa", "arguments": {{}}}}]',
        [F, FA],
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{GOOD}[TOOL_CALLS]fa[CALL_ID]abcdefgh1[ARGS]{{}}[TOOL_CALLS]fa{{}}", [F, FA, FA]),
    (
        "qwen3_coder",
        f"Ok\n<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n<function=fa>\n</function>\n</tool_call> "
        "<function=fa></function>",
        [("f", READ_OF_TAGS), FA, FA],
    ),
    ("glm45", f"Ok\n<tool_call>{GLM}</tool_call>\n<tool_call>fa</tool_call> x", [("f", READ_OF_TAGS), FA]),
    (
        "openai",
        "<|channel|>analysis<|message|>to=functions.x <b> [<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"Wait.<|end|><|start|>assistant{CALL}f <|constrain|>json<|message|>{GOOD}<|end|>"
        "<|start|>assistant to=functions.fa<|channel|>commentary json<|message|>{}",
        [F, FA],
    ),
    ("openai", "<|channel|>final<|message|>4 < 5", []),
]

REFUSED: list[tuple[str, str, str]] = [
    # a format, what may come, and what may not come after it
    ("hermes", "a <tool_call>", "b"),
    ("hermes", '<tool_call>{"name": "f', 'b"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "", "a": ', '"1"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "}"),
    ("hermes", '<tool_call>{"name": "fa", "arguments": {', '"x'),
    ("hermes", '<tool_call>{"name": "fa", "arguments": {}}', "<tool_call>"),
    ("llama3_json", ' {"name":', ' "g'),
    ("llama3_json", '{"name": "f", "parameters": {', '"b": true, "b'),
    ("llama3_json", "<|python_tag|>", "brave"),
    ("mistral", "x[TOOL_CALLS]", "g"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{", "}"),
    ("mistral", "[TOOL_CALLS][", "]"),
    ("qwen3_coder", "<tool_call>", "{"),
    ("qwen3_coder", "<function=", "g"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n", "100"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n9\n</parameter>\n", "</function>"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n9\n</parameter>\n<parameter=e>\n", "left"),
    ("glm45", "<tool_call>", "g"),
    ("glm45", "<tool_call>fa", "<arg_key>"),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "x"),
    ("openai", CALL, "g"),
    ("openai", "<|channel|>commentary to=", "python"),
    ("openai", CALL + "f", "b"),
    ("openai", CALL + "f <|constrain|>json<|message|>", "["),
    (
        "openai",
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.fa<|channel|>commentary<|message|>{",
        '"a',
    ),
]


@lru_cache
def tokenizer(tool_format: str) -> Tokenizer:
    """Bytes, some words, the family's marks as special tokens or as text, and tokens that lie across marks."""
    inner = tokenizers.Tokenizer.from_str(kits.byte_level().to_str())
    special = {
        "llama3_json": ["<|python_tag|>"],
        "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        "openai": [*HARMONY_IN_HEADERS, "<|end|>", "<|call|>", "<|return|>"],
    }
    inner.add_special_tokens(special.get(tool_format, []))
    across = [
        "<tool_call>",
        "</tool_call>",
        ' <tool_call>{"name"',
        '_call>{"',
        '": {"',
        '"}}',
        "}}</tool",
        "<function=f",
        ">\n<parameter=",
        "</arg_key>\n<arg",
        "</parameter>",
        "</arg_value>",
    ]
    inner.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in across])
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>"})


@lru_cache
def compiler(tool_format: str) -> GrammarCompiler:
    made = GrammarCompiler(tokenizer(tool_format).size, tokenizer(tool_format).eos_ids)
    made.load_tokenizer = lambda: tokenizer(tool_format)
    return made


def matcher(
    tool_format: str, parallel: bool = True, reasoning: tuple[str, str] = ("", ""), **arguments: Any
) -> GrammarMatcher:
    text = call_grammar(tool_format, SpecialTokens(tokenizer(tool_format)), arguments or ARGUMENTS, parallel, reasoning)
    return compiler(tool_format).matcher(Grammar(kind="grammar", text=text))


def cut(tool_format: str, text: str, dice: random.Random | None) -> Iterator[tuple[int, int]]:
    """Tokens of a text and where each begins, in bytes: drawn among those that fit, or single bytes; special ones."""
    made, data, at = tokenizer(tool_format), text.encode(), 0
    words = [(token_id, made.token_bytes(token_id)) for token_id in range(made.size)]
    while at < len(data):
        fit = [(token_id, word) for token_id, word in words if word and data.startswith(word, at)]
        whole = [one for one in fit if made.is_special(one[0])]
        short = [one for one in fit if len(one[1]) == 1]
        token_id, word = (whole or (fit if dice else short))[dice.randrange(len(whole or fit)) if dice else 0]
        yield token_id, at
        at += len(word)


def refused_at(held: GrammarMatcher, tokens: Iterator[tuple[int, int]]) -> int | None:
    """Where a matcher takes no more of a text, in bytes. It takes what it allows; of text that must follow it allows
    the usual tokens alone, and takes others too.
    """
    for token_id, at in tokens:
        may, is_forced = bool(held.allowed() >> token_id & 1), bool(held.forced())
        taken = held.consume(token_id)
        assert may == taken or (taken and is_forced)
        if not taken:
            return at
    return None


def read(tool_format: str, text: str, reasoning: str = "") -> MergedReply:
    parser = ReplyParsers(tool_format, reasoning).parser("", None, ARGUMENTS)
    return merged([*parser.push(text), *parser.finish("stop", None)])


@pytest.mark.parametrize(("tool_format", "text", "calls"), WHOLE)
def test_calls_that_fit_and_text_come_through_however_they_are_cut(
    tool_format: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for dice in (None, *map(random.Random, range(12))):
        held = matcher(tool_format)
        assert refused_at(held, cut(tool_format, text, dice)) is None
        assert held.is_ended or held.allowed() >> tokenizer(tool_format).eos_ids[0] & 1
    assert [(call.name, call.arguments) for call in read(tool_format, text).calls] == calls


@pytest.mark.parametrize(("tool_format", "good", "bad"), REFUSED)
def test_what_does_not_fit_is_refused_at_its_first_byte(tool_format: str, good: str, bad: str) -> None:
    first = len(good.encode())
    at = refused_at(matcher(tool_format), cut(tool_format, good + bad, None))
    assert at is not None and first <= at < first + len(bad.encode())
    for seed in range(12):
        tokens = list(cut(tool_format, good + bad, random.Random(seed)))
        found = refused_at(matcher(tool_format), iter(tokens))
        ends = [*(start for _, start in tokens[1:]), len((good + bad).encode())]
        assert found is not None and found <= at < ends[[start for _, start in tokens].index(found)]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_where_no_call_is_begun_every_token_may_come(tool_format: str) -> None:
    """Also half of a character, and special tokens; but no token that has a mark and what may not follow it."""
    made, held = tokenizer(tool_format), matcher(tool_format)
    wanted = {token_id for token_id in range(made.size) if compiler(tool_format).any_token >> token_id & 1}
    wanted -= {made.id_of(' <tool_call>{"name"')} if tool_format in IN_TAGS else set()
    for text in (BEFORE_TEXT.get(tool_format, "Well"), " so", " é", " {"):
        assert refused_at(held, cut(tool_format, text, None)) is None
        assert not [made.token_label(one) for one in wanted if not held.allowed() >> one & 1]
    assert len(wanted) > 390
    for word in (b"\xf0", b"a", b"\x80", b"\x80"):
        assert held.consume(next(one for one in range(made.size) if made.token_bytes(one) == word))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_one_call_ends_a_reply_that_may_not_have_more(tool_format: str) -> None:
    text = next(text for name, text, calls in WHOLE if name == tool_format and len(calls) > 1)
    held = matcher(tool_format, parallel=False)
    stop = refused_at(held, cut(tool_format, text, None))
    assert stop is not None
    read_of = read(tool_format, text.encode()[:stop].decode())
    assert [call.name for call in read_of.calls] == ["f"]
    assert json.loads(read_of.calls[0].arguments)["a"] == 7


@pytest.mark.parametrize(
    ("tool_format", "marks", "name"), [("hermes", THINK, "qwen3"), ("mistral", THINK_MISTRAL, "mistral")]
)
def test_reasoning_is_free_and_calls_after_it_are_held(tool_format: str, marks: ReasoningMarks, name: str) -> None:
    call = next(text for known, text, calls in WHOLE if known == tool_format and calls)
    begun = "<tool_call>[" if tool_format == "hermes" else "[TOOL_CALLS]?"
    for opened, free in ((" " + marks.begin, (marks.begin, marks.end)), ("", ("", marks.end))):
        whole = f"{opened}I could {begun} or not{marks.end}\n{call}"
        for dice in (None, *map(random.Random, range(8))):
            assert refused_at(matcher(tool_format, reasoning=free), cut(tool_format, whole, dice)) is None
        bad = f"{opened}so{marks.end}{begun}"
        assert refused_at(matcher(tool_format, reasoning=free), cut(tool_format, bad, None)) == len(bad) - 1
        held = matcher(tool_format, reasoning=free)
        assert refused_at(held, cut(tool_format, f"{opened}I think", None)) is None
        assert held.allowed() >> tokenizer(tool_format).eos_ids[0] & 1, "it may break off while it reasons"
    held = matcher(tool_format, reasoning=(marks.begin, marks.end))
    assert refused_at(held, cut(tool_format, f"x {begun}", None)) == len(f"x {begun}") - 1, "a reply may not reason"
    assert read(tool_format, f"{marks.begin}I could {begun}{marks.end}\n{call}", name).reasoning == f"I could {begun}"


@pytest.mark.parametrize("tool_format", FORMATS)
def test_whatever_tokens_are_drawn_calls_that_are_read_fit(tool_format: str) -> None:
    """Replies of tokens that a dice draws among those allowed, after a mark and a few tokens of text."""
    whole = 0
    for seed in range(8):
        dice, held, made = random.Random(seed), matcher(tool_format), tokenizer(tool_format)
        begin = BEGINNINGS[tool_format][seed % len(BEGINNINGS[tool_format])]
        ids = [token_id for token_id, _ in cut(tool_format, begin, dice)]
        assert all(held.consume(token_id) for token_id in ids)
        while len(ids) < 250 and not held.allowed() >> made.eos_ids[0] & 1:
            ids.append(drawn(held.allowed(), made, dice))
            assert held.consume(ids[-1])
        text = b"".join(made.token_bytes(token_id) for token_id in ids).decode(errors="replace")
        reply = read(tool_format, text)
        assert reply.calls and {call.name for call in reply.calls} <= set(ARGUMENTS), text
        if len(ids) < 250:
            whole += 1
            for call in reply.calls:
                jsonschema.validate(json.loads(call.arguments), ARGUMENTS[call.name])
    assert whole >= 4


def drawn(allowed: int, made: Tokenizer, dice: random.Random) -> int:
    """A token of these; one that ends a string or a value if the dice says so, so that replies come to an end."""
    ids = [token_id for token_id in range(made.size) if allowed >> token_id & 1]
    tags = [one for one in ids if made.token_bytes(one) in (b"</parameter>", b"</arg_value>")]
    closing = [one for one in ids if made.token_bytes(one)[:1] in (b'"', b"}", b"]", b"<", b"\n", b",", b";")]
    if tags and dice.random() < 0.2:
        return tags[0]
    return dice.choice(closing if closing and dice.random() < 0.5 else ids)


def test_what_cannot_stand_between_tags_is_said() -> None:
    for properties, why in (
        ({"s": {"type": "string", "pattern": "a+"}}, "pattern of the text s"),
        ({"a<b": {}}, "a property called 'a<b'"),
        ({"s": {"type": "string", "enum": ["a", " b"]}}, "a value of s"),
        ({"s": {"type": "string", "description": "so", "default": "x"}, "n": {"type": "number", "minimum": 1}}, ""),
    ):
        assert why in why_not_in_tags({"type": "object", "properties": properties}) or not why
        assert bool(why_not_in_tags({"type": "object", "properties": properties})) == bool(why)
    assert why_not_in_tags({"anyOf": [{}]}) == "anyOf beside properties"
    assert why_not_in_tags({"required": ["x"]}) == "a required property that is not described"
    assert why_not_in_tags({"additionalProperties": {"type": "integer"}}) == "additionalProperties with a schema"


@pytest.mark.parametrize("tool_format", IN_TAGS)
def test_a_tool_without_properties_takes_any(tool_format: str) -> None:
    text = {
        "qwen3_coder": "<function=f>\n<parameter=x y>\n[1, 2\n</parameter>\n<parameter=z>1</parameter></function>",
        "glm45": "<tool_call>f<arg_key>x y</arg_key><arg_value>[1, 2</arg_value>\n<arg_key>z</arg_key>"
        "<arg_value>1</arg_value></tool_call>",
    }[tool_format]
    assert refused_at(matcher(tool_format, f={"type": "object"}), cut(tool_format, text, None)) is None
    assert read(tool_format, text).calls[0].arguments == '{"x y": "[1, 2", "z": 1}'


def test_harmony_is_not_held_without_its_special_tokens() -> None:
    assert call_grammar(HARMONY, SpecialTokens(tokenizer("hermes")), ARGUMENTS, True, ("", "")) == ""
