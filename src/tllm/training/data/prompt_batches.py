"""The prompts of each step, for runs that sample completions. A row has a prompt, and may have a reply."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.core.errors import ConfigError, RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches, DataConfig
from tllm.training.data.choose_encoder import RowEncoder
from tllm.training.data.encoder import IGNORED, Document, Ids, OverLong, check_known
from tllm.training.data.packing import PackedRow
from tllm.training.data.row_forms import is_instruction, with_prompt
from tllm.training.data.seeds import key_for

FORM = (
    'a row is {"prompt": "…"}, {"prompt": [{"role": "user", "content": "…"}]} or {"instruction": "…", "input": "…"}, '
    "with columns for the rewards beside it"
)


Id = TypeVar("Id", np.int32, np.int64)


class PromptRow(NamedTuple):
    """A prompt as the model is given it, and the row that it stands in."""

    ids: tuple[int, ...]
    columns: dict[str, Any]


class PromptEncoder:
    """Encodes the prompts of rows, each of at most `longest` tokens. Faults are `ConfigError`, without a place.

    `tools`: what the model may call in every completion; prompts are then messages, and the template shows the tools.
    `vocab_size`: how many tokens the model has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        longest: int,
        tools: Sequence[Mapping[str, Any]] = (),
        vocab_size: int = sys.maxsize,
    ) -> None:
        self._tokenizer, self._template, self._tools = tokenizer, template, tools
        self._longest, self._vocab_size = longest, vocab_size
        shown = (msgspec.json.encode(tools).decode(),) if tools else ()
        source = template.source if template else ""
        self.key = f"{key_for('prompt', tokenizer.inner.to_str(), source, *shown):016x}"

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with a `prompt`: its own, or what its instruction asks."""
        return with_prompt(row, as_messages=self._template is not None)

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """A prompt's ids, of which nothing is learned."""
        try:
            ids = self._ids(self.columns(row))
        except RequestError as error:
            raise ConfigError(error.message, error.hint) from error
        return self.document(np.asarray(ids, dtype=np.int32))

    def document(self, ids: Ids) -> Document:
        """The same of a prompt's ids; ConfigError where it is empty or too long, or the model has not its tokens."""
        if not len(ids):
            raise ConfigError("the prompt is empty", "leave the row out")
        if len(ids) > self._longest:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, and seq_len less max_completion_length leaves {self._longest}",
                "raise seq_len, or leave the row out",
            )
        return check_known(Document(ids, np.full(len(ids), IGNORED, dtype=np.int32)), self._vocab_size)

    def _ids(self, row: dict[str, Any]) -> list[int]:
        prompt = row.get("prompt")
        if self._tools and isinstance(prompt, str):
            raise ConfigError(
                "the prompt is a text and the job has tools, which the chat template shows",
                'write it as messages: {"prompt": [{"role": "user", "content": "…"}]}',
            )
        if self._tools and row.get("tools"):
            raise ConfigError(
                "the row has tools of its own and the job has others, which are called", "leave out one of them"
            )
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            raise ConfigError(f"a row with the keys {sorted(row)} has no prompt", FORM)
        if self._template is None:
            raise ConfigError("the prompt is of messages and the model has no chat template", "write it as text")
        tools = self._tools or row.get("tools")
        text = self._template.render(prompt, tools=tools, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)


class RepliedPromptEncoder:
    """Encodes rows to which a student may write the last reply itself: prompts, prompts with completions, messages,
    instructions with their outputs.

    With `keeps_replies` a row is encoded with its reply, and must have one; else it is cut to what stands before it.
    """

    def __init__(self, prompts: PromptEncoder, rows: RowEncoder, keeps_replies: bool) -> None:
        self._prompts, self._rows, self._keeps_replies = prompts, rows, keeps_replies
        self.key = f"{key_for('reply', prompts.key, rows.key, int(keeps_replies)):016x}"

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """As of prompts alone."""
        return self._prompts.columns(row)

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """The ids, of which the replies are learned. Faults are `ConfigError`, without a place."""
        is_replied = "completion" in row or is_instruction(row)
        if "messages" not in row and not (self._keeps_replies and is_replied):
            if self._keeps_replies and "prompt" in row:
                raise ConfigError(
                    f"a row with the keys {sorted(row)} has no reply, and steps of data learn from one",
                    "write its completion beside it, or give lmbda = 1: then the student writes all replies",
                )
            return self._prompts.encode(row, whole)
        document = self._rows.encode(row, whole)
        prompt = self._prompts.document(before_the_reply(document.ids, document.targets))
        return document if self._keeps_replies else prompt


def before_the_reply(ids: NDArray[Id], targets: NDArray[Id]) -> NDArray[Id]:
    """The ids before the last reply, which is the last run of places with a target; all of them where there is none."""
    (places,) = np.nonzero(targets != IGNORED)
    if not len(places):
        return ids
    gaps = np.flatnonzero(np.diff(places) > 1)
    first = places[gaps[-1] + 1] if len(gaps) else places[0]
    return ids[: first + 1]


class PromptRowEncoder(RowEncoder, Protocol):
    """Encodes rows that have a prompt; `columns` gives a row with it as its `prompt`."""

    def columns(self, row: dict[str, Any]) -> dict[str, Any]: ...


class PromptBatches:
    """The prompts of a job, in one global order. New ones come every `steps_each` steps, counted from 0."""

    def __init__(self, config: DataConfig, encoder: PromptRowEncoder, steps_each: int = 1) -> None:
        over_long: OverLong = "truncate" if config.over_long == "truncate" else "refuse"
        each_alone = replace(config, packing=False, over_long=over_long)
        self._batches, self._encoder = Batches(each_alone, encoder=encoder), encoder
        self._steps_each = steps_each

    def prompts(self, step: int) -> list[PromptRow]:
        """Those whose completions step `step` and the next `steps_each - 1` learn from."""
        return [
            PromptRow(tuple(before_the_reply(row.input_ids, row.labels).tolist()), self._columns(row))
            for row in self.rows(step)
        ]

    def _columns(self, row: PackedRow) -> dict[str, Any]:
        return self._encoder.columns(self._batches.row(row.pieces[0].row))

    def continued(self, row: PromptRow, text: str) -> PromptRow:
        """A prompt of messages with this text at the end of the last; ConfigError where it is too long then."""
        if not text:
            return row
        *before, last = row.columns["prompt"]
        said = last.get("content") or ""
        content = said + text if isinstance(said, str) else [*said, {"type": "text", "text": text}]
        columns = {**row.columns, "prompt": [*before, {**last, "content": content}]}
        return PromptRow(tuple(self._encoder.encode(columns).ids.tolist()), columns)

    def rows(self, step: int) -> list[PackedRow]:
        """The same rows as they are, with their replies where the encoder keeps them."""
        assert step % self._steps_each == 0, "the steps between learn from the same"
        return self._batches.step(step // self._steps_each)

    def state(self, step: int) -> dict[str, Any]:
        """The state from which `step` comes next, as JSON holds it."""
        return {"prompts": self._batches.state(step // self._steps_each), "steps_each": self._steps_each}

    def restore(self, state: dict[str, Any]) -> int:
        """Go on from a state; returns the step that comes next."""
        # What was sampled ahead (`ahead`) is sampled anew where no step is any more.
        if state.keys() - {"ahead"} != {"prompts", "steps_each"} or state["steps_each"] != self._steps_each:
            raise ConfigError(
                f"num_iterations is {self._steps_each} now, and the run began with "
                f"{state.get('steps_each', 'another task')}",
                "which prompt comes next hangs on it: set it back, or give another output_dir for a new run",
            )
        return self._batches.restore(state["prompts"]) * self._steps_each

    def close(self) -> None:
        self._batches.close()
