"""Rows of preferences as documents whose parts stay together: a pair's two replies, or one reply and a mismatched one.

Each part is the prompt and a reply. A number of each part says which reply it is (`role`); 0 is padding, from which
nothing is learned.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tllm.core.errors import ConfigError, RequestError, counted
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.chat_labels import ChatEncoder
from tllm.training.data.dataset import Dataset
from tllm.training.data.encoder import GIVE_TOKENIZER, IGNORED, Document, ended

ROLE = "role"
"""The number of each part that says which reply it is."""

CHOSEN, REJECTED, MISMATCHED = 1, 2, 3
"""Roles of a part: a reply that is wanted, one that is not, and another row's reply to this row's prompt."""

PAIR_FORMS = (
    'a row is {"prompt": …, "chosen": …, "rejected": …}, or without the prompt if both begin with it; as texts or as '
    "lists of messages"
)
UNPAIRED_FORMS = 'a row is {"prompt": …, "completion": …, "label": true or false}, as texts or as lists of messages'
OTHER = "\x00another row's completion"
"""The key under which `UnpairedDataset` adds it; no file of JSON is likely to have one of that name."""

Messages = list[dict[str, Any]]


class Reply(NamedTuple):
    """Tokens of a prompt and its reply; `said[i]`: token i belongs to the reply and is the model's."""

    ids: list[int]
    said: list[bool]

    @property
    def targets(self) -> list[int]:
        return [*(id_ if said else IGNORED for id_, said in zip(self.ids[1:], self.said[1:], strict=True)), IGNORED]


class ReplyEncoder:
    """Encodes a prompt with a reply: both texts, encoded apart, or both messages."""

    def __init__(self, tokenizer: Tokenizer | None, conversations: ChatEncoder | None, end: Sequence[int]) -> None:
        self._tokenizer, self._conversations, self._end = tokenizer, conversations, list(end)

    def encode(self, prompt: str | Messages, reply: str | Messages, tools: Messages | None, name: str) -> Reply:
        """ConfigError where the reply holds nothing that the model says; `name` is what the row calls it."""
        if self._tokenizer is None:
            raise ConfigError("the row is text and the model has no tokenizer", GIVE_TOKENIZER)
        if isinstance(prompt, str) and isinstance(reply, str):
            before = self._tokenizer.encode(prompt)
            after = ended(self._tokenizer.encode(reply, add_special_tokens=False), self._end)
            found = Reply(before + after, [False] * len(before) + [True] * len(after))
        else:
            assert isinstance(prompt, list) and isinstance(reply, list)
            found = self._conversation([*prompt, *reply], tools, len(prompt))
        if not any(found.said[1:]) or found.said[0]:
            raise ConfigError(
                f"{name} has no token after a prompt that the model could have said", "leave the row out, or add_eos"
            )
        return found

    def encode_whole(self, text: str | Messages, tools: Messages | None) -> list[int]:
        """The ids of a text with its end, or of a conversation as the template shows it."""
        if self._tokenizer is None:
            raise ConfigError("the row is text and the model has no tokenizer", GIVE_TOKENIZER)
        if isinstance(text, str):
            return ended(self._tokenizer.encode(text), self._end)
        return self._conversation(text, tools, len(text)).ids

    def _conversation(self, messages: Messages, tools: Messages | None, first: int) -> Reply:
        if self._conversations is None:
            raise ConfigError("rows of messages need a chat template and the model has none", "give one in the job")
        try:
            return Reply(*self._conversations.encode(messages, tools, first=first))
        except RequestError as error:
            raise ConfigError(error.message, error.hint) from error


class PairEncoder:
    """Rows of two replies to one prompt: `Document`s of two parts, the chosen one first, each of weight 1."""

    def __init__(self, replies: ReplyEncoder, key: str) -> None:
        self._replies = replies
        self.key = f"{key}:pairs"

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """Faults are `ConfigError`, without the row's place."""
        prompt, chosen, rejected = pair_of(row)
        tools = _tools(row)
        found = [
            self._replies.encode(prompt, chosen, tools, "chosen"),
            self._replies.encode(prompt, rejected, tools, "rejected"),
        ]
        _check_unlike(found[0].ids, found[1].ids)
        lengths = [sum(reply.said) for reply in found]
        values = {
            ROLE: np.array([CHOSEN, REJECTED], dtype=np.int32),
            "reply_tokens": np.array(lengths, dtype=np.int32),
            "tail": np.array([_tail(reply, min(lengths)) for reply in found], dtype=np.int32),
        }
        return _joined(found, values)


class ScoredPairEncoder:
    """Rows of two replies that a reward model scores: `Document`s of two whole conversations, no token predicted.

    A text and its prompt are encoded as one, as `/score` does. `margin` of a row says by how much the chosen one is
    better; 0 where it has none.
    """

    def __init__(self, replies: ReplyEncoder, key: str) -> None:
        self._replies = replies
        self.key = f"{key}:scored"

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """Faults are `ConfigError`, without the row's place."""
        sides = [_part(row, name, PAIR_FORMS) for name in ("chosen", "rejected")]
        _check_alike({"chosen": sides[0], "rejected": sides[1]}, PAIR_FORMS)
        if row.get("prompt") is not None and isinstance(row["prompt"], str) == isinstance(sides[0], str):
            prompt = _part(row, "prompt", PAIR_FORMS)
            sides = [prompt + side for side in sides]  # type: ignore[operator]
        elif row.get("prompt") is not None:
            pair_of(row)  # a text that the conversations must hold
        chosen, rejected = (self._replies.encode_whole(side, _tools(row)) for side in sides)
        for name, ids in (("chosen", chosen), ("rejected", rejected)):
            if not ids:
                raise ConfigError(f"{name} has no token whose score could be learned", "leave the row out, or add_eos")
        _check_unlike(chosen, rejected)
        margin = _number(row, "margin")
        values = {
            ROLE: np.array([CHOSEN, REJECTED], dtype=np.int32),
            "margin": np.array([margin, margin], dtype=np.float64),
        }
        return _joined([Reply(ids, [False] * len(ids)) for ids in (chosen, rejected)], values)


class UnpairedEncoder:
    """Rows of one reply and whether it is wanted: `Document`s of it and another row's (`UnpairedDataset`)."""

    def __init__(self, replies: ReplyEncoder, key: str, mismatched: bool = True) -> None:
        self._replies, self._mismatched = replies, mismatched
        self.key = f"{key}:{'mismatched' if mismatched else 'unpaired'}"

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """Faults are `ConfigError`, without the row's place."""
        prompt, completion = _part(row, "prompt", UNPAIRED_FORMS), _part(row, "completion", UNPAIRED_FORMS)
        if type(row.get("label")) is not bool:
            raise ConfigError(f"label is {row.get('label')!r}, not true or false", UNPAIRED_FORMS)
        _check_alike({"prompt": prompt, "completion": completion}, UNPAIRED_FORMS)
        found = [self._replies.encode(prompt, completion, _tools(row), "completion")]
        roles = [CHOSEN if row["label"] else REJECTED]
        if self._mismatched:
            other = _part(row, OTHER, UNPAIRED_FORMS)
            _check_alike({"prompt": prompt, "the completion of the row before": other}, UNPAIRED_FORMS)
            found.append(self._replies.encode(prompt, other, _tools(row), "the completion of the row before"))
            roles.append(MISMATCHED)
        values = {
            ROLE: np.array(roles, dtype=np.int32),
            "reply_tokens": np.array([sum(reply.said) for reply in found], dtype=np.int32),
            "tail": np.array([len(reply.ids) for reply in found], dtype=np.int32),
        }
        return _joined(found, values)


class UnpairedDataset(Dataset):
    """Gives each row the completion of the row before it, the first that of the last: replies to other prompts.

    Rows are told apart by their number alone, so that every plan, order and batch compares the same.
    """

    def read(self, row: int) -> dict[str, Any]:
        return {**super().read(row), OTHER: super().read((row - 1) % len(self)).get("completion")}


def pair_of(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a row, where the prompt is given or is what both replies begin with."""
    chosen, rejected = _part(row, "chosen", PAIR_FORMS), _part(row, "rejected", PAIR_FORMS)
    _check_alike({"chosen": chosen, "rejected": rejected}, PAIR_FORMS)
    prompt = row.get("prompt")
    if prompt is not None and not (isinstance(prompt, str) and isinstance(chosen, list)):
        prompt = _part(row, "prompt", PAIR_FORMS)
        _check_alike({"prompt": prompt, "chosen": chosen}, PAIR_FORMS)
        return prompt, chosen, rejected
    shared = next(
        (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1  # a space belongs to the word after it, as tokenizers have it
    if not shared:
        raise ConfigError(
            "chosen and rejected begin differently and no prompt is given", "give the prompt, or begin both with it"
        )
    if isinstance(prompt, str) and not any(prompt in _said(one) for one in chosen[:shared] if isinstance(one, dict)):
        raise ConfigError(
            f"the prompt {prompt[:40]!r} is in none of the {shared} messages that chosen and rejected begin with",
            "leave the prompt out, or give it as messages",
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _said(message: str | Mapping[str, Any]) -> str:
    return message if isinstance(message, str) else str(message.get("content"))


def _part(row: Mapping[str, Any], name: str, forms: str) -> str | Messages:
    """A text, or a list of messages with one at least."""
    value = row.get(name)
    if value is None and name in row:
        raise ConfigError(f"{name} is null", forms)
    if value is None:
        raise ConfigError(f"a row with the keys {sorted(key for key in row if key != OTHER)} has no {name}", forms)
    if isinstance(value, str) or (
        isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    ):
        return value
    raise ConfigError(f"{name} is neither a text nor a list of messages", forms)


def _check_alike(parts: Mapping[str, object], forms: str) -> None:
    if len({type(part) for part in parts.values()}) > 1:
        kinds = " and ".join(
            f"{name} is {'a text' if isinstance(part, str) else 'messages'}" for name, part in parts.items()
        )
        raise ConfigError(kinds, forms)


def _tools(row: Mapping[str, Any]) -> Messages | None:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError("tools must be a list of objects", PAIR_FORMS)
    return tools


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} is {value!r}, not a number", PAIR_FORMS)
    return float(value)


def _tail(reply: Reply, shared: int) -> int:
    """The place whose target is the first token of the reply beyond `shared` of them; the length if there is none."""
    places = [at for at, target in enumerate(reply.targets) if target != IGNORED]
    return places[shared] if shared < len(places) else len(reply.ids)


def _check_unlike(chosen: Sequence[int], rejected: Sequence[int]) -> None:
    if chosen == rejected:
        raise ConfigError(
            f"chosen and rejected are the same {counted(len(chosen), 'token')}, so neither can be preferred",
            "leave the row out",
        )


def _joined(replies: Sequence[Reply], values: dict[str, Any]) -> Document:
    ids = [id_ for reply in replies for id_ in reply.ids]
    targets = [target for reply in replies for target in reply.targets]
    parts = tuple(len(reply.ids) for reply in replies)
    return Document(np.asarray(ids, np.int32), np.asarray(targets, np.int32), parts, values, weight=1.0)
