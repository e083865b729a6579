"""What holds a reply of gpt-oss, whose parts say what they are: calls, and the form of what is said to the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm.server.reply.lark_rules import ANY, LarkRules, SpecialTokens, literal
from tllm.server.reply.reasoning import HARMONY_ENDS
from tllm.text.grammar import json_part

HARMONY_IN_HEADERS = ("<|message|>", "<|start|>", "<|channel|>", "<|constrain|>")
_NO_EQUALS = "(?s-u:[\\x00-<>-\\xfe])"


def harmony_grammar(
    tokens: SpecialTokens, arguments: Mapping[str, Mapping[str, Any]], parallel: bool, form: str = ""
) -> str:
    """The Lark grammar of a reply whose first header the prompt has begun. A message whose header has `to=` is a call.

    Without a form, what other messages say is free. With one, reasoning in its channel is, the channel `final` has the
    form, and in its place there may be calls; nothing else is said to the user, as it would stand beside the form.
    "" where the tokenizer has not the special tokens.
    """
    message, start, channel, constrain = (tokens.id_of(mark) for mark in HARMONY_IN_HEADERS)
    if None in (message, start, channel, constrain):
        return ""
    rules, inside = LarkRules(tokens), f"(<[{channel}]> | <[{constrain}]>)"  # a token belongs to one lexeme alone
    ends = [token_id for mark in HARMONY_ENDS if (token_id := tokens.id_of(mark)) not in (None, start)]
    rules.rule("WORDS", f"/{_NO_EQUALS}*/")
    rules.rule("end", f"<[{','.join(map(str, ends))}]>" if ends else '""')
    header = f"(WORDS {inside})*"
    if form:  # else a channel that is none of both would have to become a call
        header = f'("assistant"? <[{channel}]>)?'
        rules.lazy("recipient", "/((analysis|commentary)? |assistant )?to=/")
    else:
        rules.lazy("recipient", f"/{_NO_EQUALS}*to=/")
    called = (
        rules.rule("call", _call(rules, arguments, header, f"({inside} WORDS)* <[{message}]>")) if arguments else ""
    )
    free = f"<[{message}]> {rules.pieces(*HARMONY_ENDS)} {ANY}"
    if not form:
        rules.rule("header", f"{header} WORDS")
        rules.rule("said", f"header {free}")
        rules.rule("before", "call | said" if parallel else "said")
        return rules.text(f"(before end? <[{start}]>)* ((call | said) end? | header)")
    end = tokens.id_of("<|end|>")
    rules.rule("form", form)
    rules.rule("thought", f'<[{channel}]> "analysis" {free}' + ("" if end is None else f" <[{end}]>?"))
    rules.rule("final", f"<[{channel}]> /final ?/ (<[{constrain}]> WORDS)? <[{message}]> form end?")
    if called:
        called = f" | {called} (end? <[{start}]> {called})* end?" if parallel else f" | {called} end?"
    rules.rule("later", f'"assistant" (thought <[{start}]> later | final){called}')
    return rules.text(f"thought <[{start}]> later | final{called}")


def _call(rules: LarkRules, arguments: Mapping[str, Mapping[str, Any]], header: str, rest_of_header: str) -> str:
    """A message to one of the functions."""
    rules.rule("AFTER_NAME", f"/( {_NO_EQUALS}*)?/")
    rules.rule("after_name", f"AFTER_NAME {rest_of_header}")
    calls = (f"{literal(f'functions.{name}')} after_name {json_part(held)}" for name, held in arguments.items())
    return f"{header} recipient ({' | '.join(calls)})"
