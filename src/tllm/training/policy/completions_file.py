"""Completions for people to read, as files in a run's folder: those of each step, and those of each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.evaluation.step_lines import StepLines

COMPLETIONS, EVAL_COMPLETIONS = "completions.jsonl", "eval_completions.jsonl"


class CompletionsFile(StepLines):
    """A line for each completion, of a step several."""

    def __init__(self, folder: Path, done: int, name: str = COMPLETIONS) -> None:
        super().__init__(folder / name, done)

    def write(self, records: Sequence[CompletionRecord]) -> None:
        self.add(records)
