"""The prompts of each step, whose completions the run samples itself: a row's `prompt`, as text or as messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tllm.core.errors import ConfigError, RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches, DataConfig
from tllm.training.data.encoder import IGNORED, Document
from tllm.training.data.seeds import key_for

FORM = (
    'a row is {"prompt": "…"} or {"prompt": [{"role": "user", "content": "…"}]}, with columns for the rewards beside it'
)


class PromptRow(NamedTuple):
    """A prompt as the model is given it, and the row that it stands in."""

    ids: tuple[int, ...]
    columns: dict[str, Any]


class PromptEncoder:
    """Encodes the prompts of rows, each of at most `longest` tokens. Faults are `ConfigError`, without a place."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, longest: int) -> None:
        self._tokenizer, self._template, self._longest = tokenizer, template, longest
        self.key = f"{key_for('prompt', tokenizer.inner.to_str(), template.source if template else ''):016x}"

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        """A prompt's ids, of which nothing is learned."""
        try:
            ids = self._ids(row)
        except RequestError as error:
            raise ConfigError(error.message, error.hint) from error
        if not ids:
            raise ConfigError("the prompt is empty", "leave the row out")
        if len(ids) > self._longest:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, and seq_len less max_completion_length leaves {self._longest}",
                "raise seq_len, or leave the row out",
            )
        return Document(np.asarray(ids, dtype=np.int32), np.full(len(ids), IGNORED, dtype=np.int32))

    def _ids(self, row: dict[str, Any]) -> list[int]:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            raise ConfigError(f"a row with the keys {sorted(row)} has no prompt", FORM)
        if self._template is None:
            raise ConfigError("the prompt is of messages and the model has no chat template", "write it as text")
        text = self._template.render(prompt, tools=row.get("tools"), add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)


class PromptBatches:
    """The prompts of a job, in one global order. New ones come every `steps_each` steps, counted from 0."""

    def __init__(self, config: DataConfig, encoder: PromptEncoder, steps_each: int = 1) -> None:
        each_alone = replace(config, packing=False, over_long="refuse")
        self._batches = Batches(each_alone, encoder=encoder)
        self._steps_each = steps_each

    def prompts(self, step: int) -> list[PromptRow]:
        """Those whose completions step `step` and the next `steps_each - 1` learn from."""
        assert step % self._steps_each == 0, "the steps between learn from the same"
        rows = self._batches.step(step // self._steps_each)
        return [PromptRow(tuple(row.input_ids.tolist()), self._batches.row(row.pieces[0].row)) for row in rows]

    def state(self, step: int) -> dict[str, Any]:
        """The state from which `step` comes next, as JSON holds it."""
        return {"prompts": self._batches.state(step // self._steps_each), "steps_each": self._steps_each}

    def restore(self, state: dict[str, Any]) -> int:
        """Go on from a state; returns the step that comes next."""
        if state.keys() != {"prompts", "steps_each"} or state["steps_each"] != self._steps_each:
            raise ConfigError(
                f"num_iterations is {self._steps_each} now, and the run began with "
                f"{state.get('steps_each', 'another task')}",
                "which prompt comes next hangs on it: set it back, or begin a new run from the weights of this one",
            )
        return self._batches.restore(state["prompts"]) * self._steps_each

    def close(self) -> None:
        self._batches.close()
