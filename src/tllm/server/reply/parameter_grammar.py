"""Parameters between tags, as Qwen3-Coder and GLM write them, held to the schema of a tool's arguments.

A text stands there as it is, and ends at its tag; all else is JSON. So a text can be held to a list of texts, but not
to a length or a pattern: `why_not_in_tags` says what of a schema cannot be held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tllm.server.reply.lark_rules import GAP, LarkRules, literal
from tllm.text.grammar import json_part

_OF_OBJECTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance", "$schema", "$id")
)
_REMARKS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_OF_TEXTS = frozenset(("type", "enum", "const"))


class ParameterTags(NamedTuple):
    """Texts of a format that writes each parameter between tags. `around` stands before and after a value."""

    end_of_name: str
    key: str
    end_of_key: str
    value: str
    end_of_value: str
    end_of_call: str
    around: str


QWEN3_CODER_TAGS = ParameterTags(">", "<parameter=", ">", "", "</parameter>", "</function>", "\n")
GLM45_TAGS = ParameterTags("", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "")


def parameters_of(rules: LarkRules, tags: ParameterTags, name: str, schema: Mapping[str, Any]) -> str:
    """What a call's parameters are: those of the schema in its order, or any where it has none. `name` is for rules."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if not properties:
        if schema.get("additionalProperties") is False:
            return ""
        key = rules.rule("KEY", "/(?-u:[!-;=?-~\\x80-\\xfe])(?-u:[ -;=?-~\\x80-\\xfe]){0,63}/")
        return f"({_tagged(rules, tags, key)} {_any_text(rules, tags)} {GAP})*"
    found = []
    for at, (key, held) in enumerate(properties.items()):
        one = rules.rule(
            f"{name}_{at}", f"{_tagged(rules, tags, literal(key))} {_value(rules, tags, held, schema)} {GAP}"
        )
        found.append(one if key in required else f"{one}?")
    return " ".join(found)


def why_not_in_tags(schema: Mapping[str, Any]) -> str:
    """What of a schema of arguments cannot be held between tags; "" where all can."""
    more = schema.keys() - _OF_OBJECTS - _REMARKS
    if more:
        return f"{min(more)} beside properties"
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        return "properties that are no object"
    required = schema.get("required") or ()
    if not isinstance(required, list | tuple) or not all(isinstance(key, str) for key in required):
        return "what is required is no list of names"
    if set(required) - properties.keys():
        return "a required property that is not described"
    if isinstance(schema.get("additionalProperties"), Mapping):
        return "additionalProperties with a schema"
    return next((why for key, held in properties.items() if (why := _why_not(key, held))), "")


def _why_not(key: str, schema: Any) -> str:
    if key != key.strip() or not key or set(key) & set("<>\r\n"):
        return f"a property called {key[:80]!r}"
    if not isinstance(schema, Mapping):
        return ""
    more = schema.keys() - _OF_TEXTS - _REMARKS
    if schema.get("type") != "string":
        return ""
    if more:
        return f"{min(more)} of the text {key[:80]}"
    known = _texts(schema)
    if known is not None and not all(isinstance(one, str) and one == one.strip() and "<" not in one for one in known):
        return f"a value of {key[:80]} that is no text between tags"
    return ""


def _tagged(rules: LarkRules, tags: ParameterTags, key: str) -> str:
    """A parameter up to its value."""
    value = f" {GAP} {rules.mark(tags.value)}" if tags.value else ""
    return f"{rules.mark(tags.key)} {key} {rules.mark(tags.end_of_key)}{value}"


def _value(rules: LarkRules, tags: ParameterTags, schema: Any, root: Mapping[str, Any]) -> str:
    """A value and its end. What has no type is a text too: whatever it says fits."""
    around, end = literal(tags.around) if tags.around else "", rules.mark(tags.end_of_value)
    if not isinstance(schema, Mapping) or not schema.keys() - _REMARKS:
        return _any_text(rules, tags)
    known = _texts(schema) if schema.get("type") == "string" else None
    if known is not None:
        return f"{around} ({' | '.join(map(literal, known))}) {around} {end}"
    if schema.get("type") == "string":
        return _any_text(rules, tags)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root and key not in schema}
    return f"{around} {json_part({**schema, **shared})} {around} {end}"


def _any_text(rules: LarkRules, tags: ParameterTags) -> str:
    return rules.until("value", [tags.end_of_value])


def _texts(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only texts that a schema allows; None where it allows any."""
    if "const" in schema:
        return [schema["const"]]
    given = schema.get("enum")
    return given if isinstance(given, list) else None
