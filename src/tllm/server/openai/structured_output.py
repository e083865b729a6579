"""Fields of a request that hold its reply to a form, as the engine's `Grammar`.

OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_…`, and llama.cpp's `grammar` and
`json_schema`. A request may use one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tllm.core.errors import RequestError, nearest
from tllm.server.reply.held_calls import AskedForm
from tllm.spec.request import Grammar, GrammarKind

if TYPE_CHECKING:
    from tllm.server.openai.requests import SamplingFields

ANY_OBJECT = '{"type":"object"}'
IN_STRUCTURED_OUTPUTS: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
FIELDS: Mapping[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "grammar": "grammar",
}


def asked_grammar(request: SamplingFields) -> AskedForm | None:
    """The form that a request asks for, and the field that says it. RequestError for two of them, or one unknown."""
    asked = []
    if request.response_format is not None and (grammar := _response_format(request.response_format)):
        asked.append(AskedForm(grammar, "response_format"))
    if request.structured_outputs is not None:
        asked.append(AskedForm(_structured_outputs(request.structured_outputs), "structured_outputs"))
    for name, kind in FIELDS.items():
        if (value := getattr(request, name)) is not None:
            asked.append(AskedForm(_grammar(kind, value, name), name))
    if len(asked) > 1:
        names = ", ".join(form.param for form in asked)
        raise RequestError(f"{names} each ask for a form of the reply", "use one of them", asked[1].param)
    return asked[0] if asked else None


def _response_format(given: Mapping[str, Any]) -> Grammar | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_schema", text=ANY_OBJECT)
    if kind == "json_schema":
        outer = given.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        if schema is None:
            message = "response_format of type json_schema needs json_schema.schema"
            raise RequestError(message, 'give {"json_schema": {"name": …, "schema": {…}}}', "response_format")
        return _grammar("json_schema", schema, "response_format")
    hint = nearest(str(kind)[:50], ("text", "json_object", "json_schema"))
    raise RequestError(f"response_format has no type {str(kind)[:50]!r}", hint, "response_format")


def _structured_outputs(given: Mapping[str, Any]) -> Grammar:
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    json_object = asked.pop("json_object", None)
    if json_object is not None and not asked:
        return Grammar(kind="json_schema", text=ANY_OBJECT)
    if len(asked) != 1 or json_object is not None or next(iter(asked)) not in IN_STRUCTURED_OUTPUTS:
        names = ", ".join(IN_STRUCTURED_OUTPUTS)
        message = f"structured_outputs takes one of {names}, not {', '.join(asked)[:100] or 'none'}"
        raise RequestError(message, param="structured_outputs")
    [(name, value)] = asked.items()
    return _grammar(IN_STRUCTURED_OUTPUTS[name], value, f"structured_outputs.{name}")


def _grammar(kind: GrammarKind, value: Any, param: str) -> Grammar:
    """A value as a request writes it: schemas and choices as JSON or as its text, the others as text."""
    if kind == "choice" or (kind == "json_schema" and not isinstance(value, str)):
        if kind == "choice" and not isinstance(value, list):
            raise RequestError(f"{param} is a {type(value).__name__}, it takes a list of texts", param=param)
        value = msgspec.json.encode(value).decode()
    if not isinstance(value, str):
        raise RequestError(f"{param} is a {type(value).__name__}, it takes a text", param=param)
    return Grammar(kind=kind, text=value)
