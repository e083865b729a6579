"""`OnPolicyRows`: rank 0's part in on-policy distillation (GKD, 2306.13649), where a teacher judges what the student
writes.

In each step either the student writes all completions, or all are those of the data. Which of the two is drawn from the
job's seed and the step, so that it is the same under every plan and in a resumed run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.data.packing import PackedRow
from tllm.training.data.prompt_batches import PromptBatches, PromptRow
from tllm.training.data.seeds import key_for
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.policy.completion_rewards import length_metrics
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion, PromptGroup, completion_seed
from tllm.training.teachers.teacher_pool import TeacherPool
from tllm.training.teachers.teacher_threads import AskedRow

log = logging.getLogger("tllm.train")


def is_on_policy(keys: DistillationKeys, seed: int, step: int) -> bool:
    """Whether the student writes the completions of step `step`, the first being 0."""
    return key_for("lmbda", seed, step) < keys.lmbda * 2**64


class OnPolicyRows:
    """`SampledRows` whose tokens a teacher judges, those of the student's completions or of the data's.

    A teacher is asked for rows of the data while steps before are computed, and for the student's when all are there.
    """

    def __init__(self, job: Job, prompts: PromptBatches, stop_ids: Sequence[int], teachers: TeacherPool) -> None:
        assert job.distill is not None, "checked when the run began"
        self.stop_ids = stop_ids
        self._keys, self._job, self._prompts, self._teachers = job.distill, job, prompts, teachers
        self._sampled: dict[int, list[PromptRow]] = {}
        self._asked: dict[int, list[tuple[PackedRow, AskedRow | None]]] = {}

    def prepare(self, done: int) -> None:
        """Go on after `done` steps."""
        self._asked.clear()
        self._sampled.clear()

    def groups(self, step: int) -> list[PromptGroup]:
        """The prompts that the student answers in step `step`; none where it learns from the data's completions."""
        seed = self._job.seed
        if not is_on_policy(self._keys, seed, step):
            self._ask_of_data(step)
            return []
        self._sampled[step] = rows = self._prompts.prompts(step)
        return [PromptGroup(row.ids, (completion_seed(seed, step, place, 0),)) for place, row in enumerate(rows)]

    def learned(self, step: int, completions: Sequence[Completion]) -> tuple[list[PackedRow], dict[str, float]]:
        """The rows of the step with what a teacher says of each token, and metrics."""
        sampled = self._sampled.pop(step, [])
        assert len(completions) == len(sampled), "as many as were asked for"
        is_own = bool(sampled)
        if is_own:
            self._ask(step, [self._row(*both) for both in zip(sampled, completions, strict=True)])
        with contextlib.suppress(ConfigError):  # a row that cannot be read is told in its own step
            self._ask_of_data(step + 1)
        rows = [self._teachers.taught(row, asked, step, self._tell) for row, asked in self._asked.pop(step)]
        return rows, {"on_policy": float(is_own), **(length_metrics(completions) if is_own else {})}

    def position(self, step: int) -> bytes:
        """Where in the data `step` begins, as snapshots keep it."""
        return msgspec.msgpack.encode(self._prompts.state(step))

    def close(self) -> None:
        """End the teachers' threads."""
        self._teachers.close()
        self._prompts.close()

    def _row(self, prompt: PromptRow, completion: Completion) -> PackedRow:
        is_hidden = completion.is_truncated and self._keys.mask_truncated_completions
        return completion_row(prompt.ids, completion, is_learned=not is_hidden)

    def _ask_of_data(self, step: int) -> None:
        """Ask for the rows of a step, if they are all there already."""
        is_new = step < self._job.max_steps and step not in self._asked
        if is_new and not is_on_policy(self._keys, self._job.seed, step):
            self._ask(step, self._prompts.rows(step))

    def _ask(self, step: int, rows: Sequence[PackedRow]) -> None:
        self._asked[step] = [(row, self._teachers.ask(row)) for row in rows]

    def _tell(self, reason: str) -> None:
        log.warning("waiting for %s", reason)
