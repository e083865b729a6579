"""Rows as other programs write them, in the forms that are ours: ShareGPT's conversations, Alpaca's instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm.core.errors import ConfigError

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    "tool": "tool",
}
"""The role of a message by its `from`."""

OWN_FORMS = ("messages", "prompt", "text", "input_ids")
"""A row that has one of these says itself what it is."""

WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""The prompts of Stanford Alpaca's `train.py`."""


def with_messages(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose `conversations` are ShareGPT's, with messages in their place: `messages`, or the `prompt` of a pair
    or of a reply. Any other row as it is. ConfigError, without a place, for who is not known."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or any(name in row for name in OWN_FORMS):
        return row
    if not all(isinstance(turn, dict) for turn in turns):
        return row
    found = {name: value for name, value in row.items() if name != "conversations"}
    replies = [name for name in ("chosen", "rejected", "completion") if name in row]
    found["prompt" if replies else "messages"] = [_message(turn) for turn in turns]
    for name in replies:
        turns = [row[name]] if isinstance(row[name], dict) else row[name]
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            found[name] = [_message(turn) for turn in turns]
    return found


def is_instruction(row: Mapping[str, Any]) -> bool:
    """Whether a row is Alpaca's: an `instruction`, its `output` and perhaps an `input`."""
    return "instruction" in row and "output" in row and not any(name in row for name in OWN_FORMS)


def instruction_row(row: Mapping[str, Any], as_messages: bool) -> dict[str, Any]:
    """Alpaca's row as a prompt and its completion. As messages the user says instruction and input, in lines of their
    own; as texts the prompt is Alpaca's. ConfigError, without a place, for what has no place in either."""
    for name in ("instruction", "input", "output"):
        if not isinstance(row.get(name) or "", str):
            raise ConfigError(f"{name} is not a text", "an instruction, its input and its output are texts")
    for name in ("history", "system"):
        if row.get(name):
            raise ConfigError(f"beside its instruction the row has a {name}", 'write it as {"messages": […]}')
    instruction, given, output = (row.get(name) or "" for name in ("instruction", "input", "output"))
    if as_messages:
        said = f"{instruction}\n{given}" if given else instruction
        prompt = [{"role": "user", "content": said}]
        return {"prompt": prompt, "completion": [{"role": "assistant", "content": output}]}
    form = WITH_INPUT if given else WITHOUT_INPUT
    return {"prompt": form.format(instruction=instruction, input=given), "completion": output}


def asks_by_instruction(row: Mapping[str, Any]) -> bool:
    """Whether what a row asks is Alpaca's `instruction`, with or without an `output`."""
    return "instruction" in row and not any(name in row for name in OWN_FORMS)


def with_prompt(row: dict[str, Any], as_messages: bool) -> dict[str, Any]:
    """Alpaca's row with what it asks as its `prompt`, beside its own columns, of which `output` is no part of it. Any
    other row as it is. ConfigError as `instruction_row`."""
    return {**row, "prompt": instruction_row(row, as_messages)["prompt"]} if asks_by_instruction(row) else row


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """ShareGPT's `from` and `value` as role and content; what has a role already stays as it is."""
    if "role" in turn:
        return dict(turn)
    who = turn.get("from")
    if not isinstance(who, str) or who not in ROLES or not isinstance(turn.get("value"), str):
        raise ConfigError(
            f"a turn of the conversation is from {who!r}, with the keys {sorted(turn)}",
            f'a turn is {{"from": …, "value": "…"}}, from {", ".join(ROLES)}; calls of tools are written as messages',
        )
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": ROLES[who], "content": turn["value"], **rest}
