"""Encodes a row of a file, in any of the forms that rows have, into token ids and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tllm.core.errors import ConfigError, RequestError, counted
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.chat_labels import ChatEncoder
from tllm.training.data.row_forms import instruction_row, is_instruction
from tllm.training.data.seeds import key_for

Ids = NDArray[np.int32]
OverLong = Literal["split", "truncate", "refuse"]
"""A document longer than a row: in several pieces, cut to one, or an error."""

IGNORED = -100
"""The target of a position at which nothing is learned, as torch's cross-entropy knows it."""
FORMS = (
    'a row is {"input_ids": […]}, {"text": …}, {"prompt": …, "completion": …} (texts, or lists of messages) or '
    '{"messages": […]}; ShareGPT\'s {"conversations": […]} and Alpaca\'s {"instruction": …, "output": …} are read too'
)
KINDS = {type(None): "null", int: "a number", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}
"""What JSON has beside texts."""
GIVE_TOKENIZER = 'give a model folder with a tokenizer.json, or rows of {"input_ids": […]}'


Values = Mapping[str, NDArray[Any]]
"""Arrays of numbers by name, the first dimension of each being documents, or tokens."""

NO_VALUES: Values = MappingProxyType({})


class Document(NamedTuple):
    """`targets[i]` is the id to predict from `ids[: i + 1]`: the next one, or `IGNORED`. Both are as long.

    What one row of the data makes stays together. `parts`: the tokens of each of several documents that do not see each
    other (the two replies of a pair), put end to end; `()` for one. `values` are numbers of each part, which objectives
    read. `weight`: what it adds to the denominator of a step's loss; None for the number of targets.
    """

    ids: Ids
    targets: Ids
    parts: tuple[int, ...] = ()
    values: Values = NO_VALUES
    weight: float | None = None


class Encoder:
    """Encodes rows. `end`: put the tokenizer's eos token after each text and completion.

    A prompt and its completion are encoded apart, as the prompt is alone when the model is asked. `input_ids` and
    `messages` are taken as they are. Faults are `ConfigError`, without the row's place.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None = None, end: bool = True) -> None:
        self._tokenizer = tokenizer
        self._conversations = ChatEncoder(template, tokenizer) if template and tokenizer else None
        self._eos = [tokenizer.eos_id] if end and tokenizer and tokenizer.eos_id is not None else []
        written = tokenizer.inner.to_str() if tokenizer else ""
        ends = tokenizer.eos_ids if tokenizer else ()
        self.key = f"{key_for(written, template.source if template else '', str(self._eos), str(ends)):016x}"
        """Changes with whatever changes the ids of a row."""

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """`whole=False` is a part of a stream of text, which neither begins nor ends."""
        try:
            if "input_ids" in row:
                return self._given(row)
            if "messages" in row:
                return self._conversation(row["messages"], row.get("tools"))
            if "prompt" in row and "completion" in row:
                return self._completion(row)
            if "text" in row:
                return self._text(_text_of(row, "text"), whole)
            if is_instruction(row):
                return self._completion(instruction_row(row, as_messages=self._conversations is not None))
        except RequestError as error:
            raise ConfigError(error.message, error.hint) from error
        raise ConfigError(f"a row with the keys {sorted(row)} is of no known form", _missing(row) or FORMS)

    def _given(self, row: dict[str, Any]) -> Document:
        ids = _numbers(row, "input_ids")
        if not ids:
            raise ConfigError("input_ids is empty", "leave the row out")
        labels = _numbers(row, "labels") if row.get("labels") is not None else ids
        if len(labels) != len(ids):
            raise ConfigError(f"{len(ids)} input_ids and {counted(len(labels), 'label')}", "give one label for each id")
        return _document(ids, labels)

    def _text(self, text: str, whole: bool) -> Document:
        tokenizer = self._needed()
        ids = tokenizer.encode(text, add_special_tokens=whole)
        ids = ended(ids, self._eos) if whole else ids
        return _document(ids, ids)

    def _completion(self, row: dict[str, Any]) -> Document:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            return self._conversation([*row["prompt"], *row["completion"]], row.get("tools"), len(row["prompt"]))
        tokenizer = self._needed()
        prompt = tokenizer.encode(_text_of(row, "prompt"))
        completion = ended(tokenizer.encode(_text_of(row, "completion"), add_special_tokens=False), self._eos)
        return _document(prompt + completion, [IGNORED] * len(prompt) + completion)

    def _conversation(self, messages: Any, tools: Any, first: int = 0) -> Document:
        """Of the messages before number `first` nothing is learned."""
        self._needed()
        if self._conversations is None:
            raise ConfigError("rows of messages need a chat template and the model has none", "give one in the job")
        for value in (messages, [] if tools is None else tools):
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ConfigError("messages and tools must be lists of objects", FORMS)
        ids, said = self._conversations.encode(messages, tools, first)
        if not any(said):
            raise ConfigError("the conversation has no turn of the assistant to learn from", "leave the row out")
        return _document(ids, [id_ if learned else IGNORED for id_, learned in zip(ids, said, strict=True)])

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("the row is text and the model has no tokenizer", GIVE_TOKENIZER)
        return self._tokenizer


def check_known(document: Document, vocab_size: int) -> Document:
    """The document as it is; ConfigError where an id or a target is none of so many."""
    for numbers in (document.ids, document.targets[document.targets != IGNORED]):
        least, most = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        if least < 0 or most >= vocab_size:
            raise ConfigError(
                f"the row holds {least if least < 0 else most} and the vocabulary is [0, {vocab_size})",
                f"encode it with this model's tokenizer; a label of {IGNORED} marks what is not learned",
            )
    return document


def fit(document: Document, seq_len: int, over_long: OverLong) -> Document:
    """A document that is longer than a row, as the job says; "split" leaves it whole for the ledger to cut."""
    length = len(document.ids)
    if length <= seq_len or (over_long == "split" and not document.parts):
        return document
    if document.parts:
        raise ConfigError(
            f"the row has {length} tokens in {len(document.parts)} parts that stay together and seq_len is {seq_len}",
            "raise seq_len, or leave the row out",
        )
    if over_long == "refuse":
        raise ConfigError(f"the row has {length} tokens and seq_len is {seq_len}", "raise seq_len, or truncate")
    targets = document.targets[:seq_len].copy()
    targets[-1] = IGNORED  # the next token is cut off with the rest
    return Document(document.ids[:seq_len].copy(), targets)


def ended(ids: list[int], end: list[int]) -> list[int]:
    """With the end of a text, unless it is there already."""
    return ids if ids[-1:] == end else ids + end


def _document(ids: Sequence[int], labels: Sequence[int]) -> Document:
    """`labels` stand on the ids themselves, as files have them; the targets are one place earlier."""
    targets = [*labels[1:], IGNORED] if ids else []
    return Document(np.asarray(ids, dtype=np.int32), np.asarray(targets, dtype=np.int32))


def _missing(row: Mapping[str, Any]) -> str:
    """What to do with a row whose reply has another name."""
    if "prompt" not in row:
        return ""
    pair = {"chosen", "rejected"} & row.keys()
    if pair:
        return 'chosen and rejected are of the tasks "dpo", "orpo", "simpo" and "reward": give task'
    return 'call what the model is to say completion: {"prompt": …, "completion": …}'


def _text_of(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {KINDS.get(type(value), type(value).__name__)}, not a text", FORMS)
    return value


def _numbers(row: dict[str, Any], key: str) -> list[int]:
    value = row[key]
    if not isinstance(value, list) or not all(type(item) is int and -(2**31) <= item < 2**31 for item in value):
        raise ConfigError(f"{key} is not a list of whole numbers below 2**31", FORMS)
    return value
