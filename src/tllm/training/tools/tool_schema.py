"""A Python function as the JSON schema that chat templates show a model, from its type hints and its docstring.

The schema is the one that `transformers.utils.get_json_schema` makes, which TRL's tools go through: the docstring is
Google's style, with a line for each argument below `Args:`, and one that ends with `(choices: ["a", "b"])` names the
values that are meant.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tllm.core.errors import ConfigError

Schema = dict[str, Any]

PLAIN_TYPES: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "integer",
        float: "number",
        str: "string",
        bool: "boolean",
        type(None): "null",
        list: "array",
        tuple: "array",
        dict: "object",
    }
)
SECTION = re.compile(r"\s*(Args|Returns|Raises):\s*\Z")
ARGUMENT = re.compile(r"(?P<indent>\s*)(?P<name>\w+)(\s*\([^)]*\))?:\s*(?P<text>.*)\Z")
CHOICES = re.compile(r"\(choices:\s*(?P<values>.*?)\)\s*\Z", re.IGNORECASE)
HINT = "a model reads type hints and the docstring: give each argument both, in Google's style"


def tool_schema(function: Callable[..., Any], name: str) -> Schema:
    """What a chat template is given of a function that the model calls by this name; ConfigError, in one line, for one
    that says too little."""
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"the tool {name} has no docstring", HINT)
    sections = _sections(text.strip())
    described, parameters = _arguments(sections.get("Args", ())), inspect.signature(function).parameters
    hints = _hints(function, name)
    properties: dict[str, Schema] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"the tool {name} takes {parameter}, which a model cannot name", "give each argument a name of its own"
            )
        if parameter.name not in hints:
            raise ConfigError(f"the argument {parameter.name} of the tool {name} has no type hint", HINT)
        if parameter.name not in described:
            raise ConfigError(f"the docstring of the tool {name} does not describe the argument {parameter.name}", HINT)
        properties[parameter.name] = _property(f"{parameter.name} of the tool {name}", hints, parameter.name, described)
    required = [one.name for one in parameters.values() if one.default is one.empty]
    schema: Schema = {
        "name": name,
        "description": "\n".join(sections[""]).strip(),
        "parameters": {"type": "object", "properties": properties, **({"required": required} if required else {})},
    }
    returned = _returned(hints, sections.get("Returns", ()))
    return {"type": "function", "function": schema | ({} if returned is None else {"return": returned})}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"the type hints of the tool {name} cannot be read: {error}", HINT) from error


def _property(what: str, hints: Mapping[str, Any], name: str, described: Mapping[str, str]) -> Schema:
    """The schema of an argument, with what the docstring says of it."""
    try:
        schema, text = _of_hint(hints[name]), described[name]
    except ValueError as error:
        raise ConfigError(f"the argument {what} has a type hint that JSON cannot hold: {error}", HINT) from error
    choices = CHOICES.search(text)
    if choices is not None:
        try:
            values = json.loads(choices["values"])
        except ValueError as error:
            raise ConfigError(
                f"the choices of the argument {what} are no JSON: {choices['values']}", 'write (choices: ["a", "b"])'
            ) from error
        schema["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _returned(hints: Mapping[str, Any], lines: Sequence[str]) -> Schema | None:
    """What the function returns; None where no hint says it, or one that JSON cannot hold: no model writes it."""
    if "return" not in hints:
        return None
    try:
        schema = _of_hint(hints["return"])
    except ValueError:
        return None
    return schema | ({"description": "\n".join(lines).strip()} if lines else {})


def _of_hint(hint: Any) -> Schema:
    """The JSON schema of a type hint; ValueError for one that has none."""
    if hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _of_union(arguments)
    if origin is Literal:
        return _of_values(arguments)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return _of_values([member.value for member in hint])
    if origin is None and hint in PLAIN_TYPES:
        return {"type": PLAIN_TYPES[hint]}
    if origin is list:
        return {"type": "array", "items": _of_hint(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_of_hint(one) for one in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_hint(arguments[1])}
    raise ValueError(str(hint).replace("typing.", ""))


def _of_union(arguments: Sequence[Any]) -> Schema:
    """One of several types; with None among them it is `nullable`."""
    found = [_of_hint(one) for one in arguments if one is not type(None)]
    if len(found) == 1:
        schema = found[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in found):
        names = sorted({one["type"] for one in found})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": found}
    return schema | ({"nullable": True} if type(None) in arguments else {})


def _of_values(values: Sequence[Any]) -> Schema:
    if not values or any(type(value) not in (int, float, str, bool, type(None)) for value in values):
        raise ValueError(f"of the values {list(values)} not all are numbers, texts, true, false or null")
    kinds = list(dict.fromkeys(PLAIN_TYPES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring by the section that they stand in; "" is what comes before all sections."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading is not None:
            name = heading[1]
            found[name] = []
        else:
            found[name].append(line if name == "Args" else line.strip())
    return found


def _arguments(lines: Sequence[str]) -> dict[str, str]:
    """What each argument is, in one line. Lines that stand deeper than an argument's go on with it."""
    found: dict[str, list[str]] = {}
    name, depth = "", 0
    for line in lines:
        argument = ARGUMENT.match(line)
        if argument is not None and (not name or len(argument["indent"]) <= depth):
            name, depth = argument["name"], len(argument["indent"])
            found[name] = [argument["text"].strip()]
        elif name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}
