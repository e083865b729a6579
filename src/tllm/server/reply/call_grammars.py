"""What holds calls of tools while the model decides: free text until it begins a call, in its family's own form.

From the mark that begins a call on, the name is that of a tool and the arguments fit its schema. After a call the
reply is free again; where no parallel calls are wanted, it ends. What each form is stands in `tool_formats`, which
reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tllm.server.reply.lark_rules import ANY, GAP, SPACE, LarkRules, SpecialTokens, json_of, literal
from tllm.server.reply.parameter_grammar import GLM45_TAGS, QWEN3_CODER_TAGS, ParameterTags, parameters_of
from tllm.server.reply.reasoning import HARMONY_ENDS

Arguments = Mapping[str, Mapping[str, Any]]
"""The JSON schema that holds the arguments of each tool, by its name."""

Body = Callable[[LarkRules, Arguments, bool], str]
"""Adds the rules of a reply after its reasoning and gives what it is; the last argument: whether it may call twice."""

HARMONY, PYTHON_TAG, CALLS = "openai", "<|python_tag|>", "[TOOL_CALLS]"
HARMONY_IN_HEADERS = ("<|message|>", "<|start|>", "<|channel|>", "<|constrain|>")


def call_grammar(
    tool_format: str, tokens: SpecialTokens, arguments: Arguments, parallel: bool, reasoning: tuple[str, str]
) -> str:
    """The Lark grammar of a reply in this format, after a `reasoning` (`free_from`, `free_until`) that may come first.

    "" where calls cannot be told from text: gpt-oss's, by a tokenizer that has not its special tokens.
    """
    if tool_format == HARMONY:
        return _harmony(tokens, arguments, parallel)
    begin, end = reasoning
    rules = LarkRules(tokens, begin or (PYTHON_TAG if tool_format == "llama3_json" else ""))
    rest = rules.rule("rest", BODIES[tool_format](rules, arguments, parallel))
    if not end:
        return rules.text(rest)
    thought = f"{rules.pieces(end)} ({rules.until('thought', [end])} {rest} | {ANY})"
    if not begin:
        return rules.text(thought)
    return rules.text(f"{rules.beginning('opened', begin)} {thought} | {rest}")


def _hermes(rules: LarkRules, arguments: Arguments, parallel: bool) -> str:
    call = f"{GAP} {_objects(rules, arguments, 'arguments')} {GAP} {rules.mark('</tool_call>')}"
    return _among_text(rules, {"<tool_call>": call}, parallel)


def _llama3_json(rules: LarkRules, arguments: Arguments, parallel: bool) -> str:
    """A reply that begins with JSON is a call once its `"name":` is there; other JSON is text."""
    begin = ("", "\\{", '("type"', ":", '"function"', ",)?", '"name"', ":")
    begun = rules.lazy("begun", f"/{f'{SPACE}*'.join(begin)}/")
    one = _objects(rules, arguments, "parameters")
    rest = rules.rule("rest_of_call", " | ".join(_members(arguments, "parameters")))
    more = f'({GAP} ";" {GAP} {one})*' if parallel else ""
    tagged = rules.beginning("tagged", PYTHON_TAG)
    return f'({begun} " "? {rest} | {tagged} {GAP} {one}) {more} | {rules.first_pieces()} {ANY}'


def _mistral(rules: LarkRules, arguments: Arguments, parallel: bool) -> str:
    one = _objects(rules, arguments, "arguments")
    more = f'(", " {one})*' if parallel else ""
    call_id = f"({rules.mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
    named = [f"{literal(name)} {call_id} {rules.mark('[ARGS]')}? {json_of(held)}" for name, held in arguments.items()]
    return _among_text(rules, {CALLS: f'{GAP} ("[" {one} {more} "]" | {" | ".join(named)})'}, parallel)


def _qwen3_coder(rules: LarkRules, arguments: Arguments, parallel: bool) -> str:
    function = rules.rule("function", _tagged_calls(rules, QWEN3_CODER_TAGS, arguments))
    whole = f"{GAP} {literal('<function=')} {function} {GAP} {rules.mark('</tool_call>')}"
    return _among_text(rules, {"<tool_call>": whole, "<function=": function}, parallel)


def _glm45(rules: LarkRules, arguments: Arguments, parallel: bool) -> str:
    return _among_text(rules, {"<tool_call>": f"{GAP} ({_tagged_calls(rules, GLM45_TAGS, arguments)})"}, parallel)


def _tagged_calls(rules: LarkRules, tags: ParameterTags, arguments: Arguments) -> str:
    """The name of one of the tools and its parameters, to the end of the call."""
    return " | ".join(
        f"{literal(name + tags.end_of_name)} {GAP} {parameters_of(rules, tags, f'p{at}', held)} "
        f"{rules.mark(tags.end_of_call)}"
        for at, (name, held) in enumerate(arguments.items())
    )


def _among_text(rules: LarkRules, calls: Mapping[str, str], parallel: bool) -> str:
    """Calls, each by the mark that begins it, between which there is free text; or one call, which ends the reply."""
    begun = (f"{rules.until(f'begun_{at}', [mark])} {call}" for at, (mark, call) in enumerate(calls.items()))
    call, first = rules.rule("call", " | ".join(begun)), rules.first_pieces(*calls)
    if parallel:
        return f"{first} ({call} ({rules.pieces(*calls)} {call})* {rules.pieces(*calls)})? {ANY}"
    return f"{first} ({call} | {ANY})"


def _objects(rules: LarkRules, arguments: Arguments, key: str) -> str:
    """`{"name": …, "arguments": {…}}` of any of the tools."""
    return rules.rule("object", '"{\\"name\\": " (' + " | ".join(_members(arguments, key)) + ")")


def _members(arguments: Arguments, key: str) -> list[str]:
    """For each tool, what follows `{"name": `."""
    end = literal("}")
    return [
        f"{literal(json.dumps(name) + f', {json.dumps(key)}: ')} {json_of(held)} {end}"
        for name, held in arguments.items()
    ]


def _harmony(tokens: SpecialTokens, arguments: Arguments, parallel: bool) -> str:
    """gpt-oss: a message whose header has `to=` is a call; what other messages say is free."""
    message, start, channel, constrain = (tokens.id_of(mark) for mark in HARMONY_IN_HEADERS)
    if None in (message, start, channel, constrain):
        return ""
    rules, inside = LarkRules(tokens), f"<[{channel},{constrain}]>"
    ends = [token_id for mark in HARMONY_ENDS if (token_id := tokens.id_of(mark)) not in (None, start)]
    no_equals = "(?s-u:[\\x00-<>-\\xfe])"
    rules.rule("WORDS", f"/{no_equals}*/")
    rules.rule("AFTER_NAME", f"/( {no_equals}*)?/")
    rules.lazy("recipient", f"/{no_equals}*to=/")
    rules.rule("after_name", f"AFTER_NAME ({inside} WORDS)* <[{message}]>")
    calls = (f"{literal(f'functions.{name}')} after_name {json_of(held)}" for name, held in arguments.items())
    rules.rule("header", f"(WORDS {inside})* WORDS")
    rules.rule("call", f"(WORDS {inside})* recipient ({' | '.join(calls)})")
    rules.rule("said", f"header <[{message}]> {rules.pieces(*HARMONY_ENDS)} {ANY}")
    rules.rule("end", f"<[{','.join(map(str, ends))}]>" if ends else '""')
    rules.rule("before", "call | said" if parallel else "said")
    return rules.text(f"(before end? <[{start}]>)* ((call | said) end? | header)")


BODIES: Mapping[str, Body] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
}
"""How replies in each format are held after their reasoning."""
