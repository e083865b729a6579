"""`HeldOutCompletions`: completions of a few held-out prompts after each evaluation, for people to read.

The prompts are the same each time and decoding is greedy, so that only the model changes between evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tllm.core.errors import ConfigError, counted
from tllm.text.companions import TOKENIZER
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches
from tllm.training.data.encoder import IGNORED, Document
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, Rollouts
from tllm.training.policy.sample_together import dealt, sample_together
from tllm.training.step.rank_groups import RankConfig


class HeldOutPrompt(NamedTuple):
    """Tokens to go on from, and those that the row has there."""

    ids: tuple[int, ...]
    reference: tuple[int, ...]


class HeldOutCompletions:
    """Every rank makes the same calls. `folder` is where rank 0 finds the tokenizer; None on other ranks."""

    def __init__(self, config: RankConfig, rollouts: Rollouts, folder: Path | None) -> None:
        self._config, self._rollouts = config, rollouts
        self._sampling = CompletionSampling(config.job.eval_max_new_tokens, temperature=0.0)
        self._tokenizer = None if folder is None else tokenizer_in(folder)
        self._prompts: list[HeldOutPrompt] = []

    def prepare(self, batches: Batches | None) -> None:
        """On rank 0: choose the first rows whose prompts leave room. ConfigError where they are too few."""
        if batches is None:
            return
        job = self._config.job
        room = job.seq_len - job.eval_max_new_tokens
        fitting = prompts_of(batches, room)
        self._prompts = [prompt for prompt, _ in zip(fitting, range(job.eval_num_prompts), strict=False)]
        if len(self._prompts) < job.eval_num_prompts:
            raise ConfigError(
                f"eval_num_prompts is {job.eval_num_prompts} and of the {counted(batches.row_count, 'row')} "
                "of eval_files "
                f"{len(self._prompts)} have a prompt of at most {room} tokens, which seq_len less eval_max_new_tokens "
                "leaves",
                "ask for fewer prompts or fewer tokens, raise seq_len, or give more rows",
            )

    def evaluate(self, step: int) -> Evaluated:
        """With the weights that the model has now; the completions are rank 0's."""
        order = None
        if self._tokenizer is not None:
            groups = [PromptGroup(prompt.ids, (0,)) for prompt in self._prompts]
            order = dealt(groups, self._tokenizer.eos_ids, self._config.plan)
        asked, completions = sample_together(self._config, self._rollouts, self._sampling, order)
        if self._tokenizer is None or asked.fault is not None:
            return Evaluated(fault=asked.fault)
        pairs = zip(self._prompts, completions, strict=True)
        return Evaluated(completions=tuple(self._record(step, *pair) for pair in pairs))

    def _record(self, step: int, prompt: HeldOutPrompt, completion: Completion) -> CompletionRecord:
        """The prompt as the model is given it, with the tokens that a chat template puts in."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "rank 0 alone writes"
        return CompletionRecord(
            step=step,
            prompt=tokenizer.decode(prompt.ids, skip_special_tokens=False),
            completion=tokenizer.decode(completion.ids, skip_special_tokens=True),
            reference=tokenizer.decode(prompt.reference, skip_special_tokens=True),
            truncated=completion.is_truncated,
        )


def prompts_of(batches: Batches, room: int) -> Iterator[HeldOutPrompt]:
    """Of the rows in their order, those that leave something to be said after at most `room` tokens."""
    for row in range(batches.row_count):
        found = prompt_of(batches.document(row), room)
        if found is not None:
            yield found


def prompt_of(document: Document, room: int) -> HeldOutPrompt | None:
    """What stands before the first reply of a row's first part, and that reply.

    Of a text that is learned from its first token on, the first half, or as much as there is room for. None where
    nothing is to be said, or the prompt is too long.
    """
    length = document.parts[0] if document.parts else len(document.ids)
    said = np.flatnonzero(document.targets[:length] != IGNORED)
    if not len(said):
        return None
    first = int(said[0]) if said[0] else min(max(length // 2, 1), room) - 1
    if not 0 <= first < room:
        return None
    ends = np.flatnonzero(document.targets[first:length] == IGNORED)
    stop = first + int(ends[0]) if len(ends) else length
    ids, targets = document.ids.tolist(), document.targets.tolist()
    return HeldOutPrompt(tuple(ids[: first + 1]), tuple(targets[first:stop]))


def tokenizer_in(folder: Path) -> Tokenizer:
    """ConfigError where there is none."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise ConfigError(
            f"{folder} has no {TOKENIZER} and eval_num_prompts asks for completions to be read",
            "give the model's folder a tokenizer, or leave eval_num_prompts out",
        )
    return tokenizer
