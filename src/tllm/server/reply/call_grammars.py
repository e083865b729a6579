"""What holds calls of tools while the model decides: free text until it begins a call, in its family's own form.

From the mark that begins a call on, the name is that of a tool and the arguments fit its schema. After a call the
reply is free again; where no parallel calls are wanted, it ends. Where the text is to have a form as well, a reply is
either calls alone or text of that form. How each family writes calls stands in `tool_formats`, which reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tllm.server.reply.harmony_grammar import harmony_grammar
from tllm.server.reply.lark_rules import ANY, GAP, SPACE, LarkRules, SpecialTokens, literal
from tllm.server.reply.parameter_grammar import GLM45_TAGS, QWEN3_CODER_TAGS, ParameterTags, parameters_of
from tllm.text.grammar import json_part

Arguments = Mapping[str, Mapping[str, Any]]
"""The JSON schema that holds the arguments of each tool, by its name."""

Body = Callable[[LarkRules, Arguments, bool, str], str]
"""Adds the rules of a reply after its reasoning and gives what it is. The third argument: whether it may call twice;
the last: the form of a reply that calls nothing, "" for any text."""

HARMONY, PYTHON_TAG, CALLS = "openai", "<|python_tag|>", "[TOOL_CALLS]"


def call_grammar(
    tool_format: str,
    tokens: SpecialTokens,
    arguments: Arguments,
    parallel: bool,
    reasoning: tuple[str, str],
    form: str = "",
) -> str:
    """The Lark grammar of a reply in this format, after a `reasoning` (`free_from`, `free_until`) that may come first.

    `form` is that of a reply without calls, as a part of a grammar. "" where calls, or parts of a reply, cannot be told
    from text: gpt-oss's, by a tokenizer that has not its special tokens.
    """
    if tool_format == HARMONY:
        return harmony_grammar(tokens, arguments, parallel, form)
    begin, end = reasoning
    rules = LarkRules(tokens, begin or (PYTHON_TAG if tool_format == "llama3_json" else ""))
    rest = rules.rule("rest", BODIES[tool_format](rules, arguments, parallel, form and rules.rule("form", form)))
    if not end:
        return rules.text(rest)
    if form:
        rest = rules.rule("rest_after_thought", f"{GAP} {rest}")
    thought = f"{rules.pieces(end)} ({rules.until('thought', [end])} {rest} | {ANY})"
    if not begin:
        return rules.text(thought)
    return rules.text(f"{rules.beginning('opened', begin)} {thought} | rest")


def _hermes(rules: LarkRules, arguments: Arguments, parallel: bool, form: str) -> str:
    call = f"{GAP} {_objects(rules, arguments, 'arguments')} {GAP} {rules.mark('</tool_call>')}"
    return _among_text(rules, {"<tool_call>": call}, parallel, form)


def _llama3_json(rules: LarkRules, arguments: Arguments, parallel: bool, form: str) -> str:
    """A reply that begins with JSON is a call once its `"name":` is there; other JSON is text.

    A form may be JSON too and have a name: then only the tool's name and the key after it tell a call.
    """
    if form:
        call = rules.rule("call", " | ".join(json_part(_call_schema(name, held)) for name, held in arguments.items()))
        more = f'({GAP} ";" {GAP} {call})*' if parallel else ""
        return f"({rules.until('tagged', [PYTHON_TAG], GAP)} {GAP} {call} | {call}) {more} | {form}"
    begin = ("", "\\{", '("type"', ":", '"function"', ",)?", '"name"', ":")
    begun = rules.lazy("begun", f"/{f'{SPACE}*'.join(begin)}/")
    one = _objects(rules, arguments, "parameters")
    rest = rules.rule("rest_of_call", " | ".join(_members(arguments, "parameters")))
    more = f'({GAP} ";" {GAP} {one})*' if parallel else ""
    tagged = rules.beginning("tagged", PYTHON_TAG)
    return f'({begun} " "? {rest} | {tagged} {GAP} {one}) {more} | {rules.first_pieces()} {ANY}'


def _mistral(rules: LarkRules, arguments: Arguments, parallel: bool, form: str) -> str:
    one = _objects(rules, arguments, "arguments")
    more = f'(", " {one})*' if parallel else ""
    call_id = f"({rules.mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
    named = [f"{literal(name)} {call_id} {rules.mark('[ARGS]')}? {json_part(held)}" for name, held in arguments.items()]
    return _among_text(rules, {CALLS: f'{GAP} ("[" {one} {more} "]" | {" | ".join(named)})'}, parallel, form)


def _qwen3_coder(rules: LarkRules, arguments: Arguments, parallel: bool, form: str) -> str:
    function = rules.rule("function", _tagged_calls(rules, QWEN3_CODER_TAGS, arguments))
    whole = f"{GAP} {literal('<function=')} {function} {GAP} {rules.mark('</tool_call>')}"
    return _among_text(rules, {"<tool_call>": whole, "<function=": function}, parallel, form)


def _glm45(rules: LarkRules, arguments: Arguments, parallel: bool, form: str) -> str:
    call = f"{GAP} ({_tagged_calls(rules, GLM45_TAGS, arguments)})"
    return _among_text(rules, {"<tool_call>": call}, parallel, form)


def _tagged_calls(rules: LarkRules, tags: ParameterTags, arguments: Arguments) -> str:
    """The name of one of the tools and its parameters, to the end of the call."""
    return " | ".join(
        f"{literal(name + tags.end_of_name)} {GAP} {parameters_of(rules, tags, f'p{at}', held)} "
        f"{rules.mark(tags.end_of_call)}"
        for at, (name, held) in enumerate(arguments.items())
    )


def _call_schema(name: str, held: Mapping[str, Any]) -> dict[str, Any]:
    """A call as Llama 3 writes it. Definitions that the arguments refer to from their root go to the root of this."""
    definitions = {key: held[key] for key in ("$defs", "definitions") if key in held}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": held},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **definitions,
    }


def _among_text(rules: LarkRules, calls: Mapping[str, str], parallel: bool, form: str) -> str:
    """Calls, each by the mark that begins it, between which there is free text; or one call, which ends the reply.

    With a form: calls with nothing between them, or text of that form.
    """
    if form:
        begun = (f"{rules.until(f'begun_{at}', [mark], GAP)} {call}" for at, (mark, call) in enumerate(calls.items()))
        return f"{rules.rule('call', ' | '.join(begun))}{'+' if parallel else ''} | {form}"
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
        f"{literal(json.dumps(name) + f', {json.dumps(key)}: ')} {json_part(held)} {end}"
        for name, held in arguments.items()
    ]


BODIES: Mapping[str, Body] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
}
"""How replies in each format are held after their reasoning."""
