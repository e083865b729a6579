"""Students of a teacher with twice their weights: beside one that reads alone, and beside one that is judged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from benchmarks.report.curves import Points
from benchmarks.training.experiments.runs import Found, opened_save, run, seeded
from benchmarks.training.experiments.runs import sampled as sampled_from
from tests.support.training.post_training.letter_languages import (
    FEW,
    PROMPT,
    REPLY,
    STUDENT,
    TEACHER,
    Language,
    ids_of,
    is_of,
    language_job,
    of_one_letter,
    of_two_letters,
    opened,
    text_loss,
    write_shape,
    write_texts,
)
from tests.support.training.post_training.policy_task import CHARACTERS
from tllm.training.job.distillation_keys import DistillationKeys

END_ID = 0
"""The token that ends a text; the others are the characters in their order, from 1 on."""

READ, EVERY = 80, 10
"""Steps in which a student reads few texts, and between two places of its curve."""


def taught(seed: int, folder: Path) -> Found:
    """Students of few texts, from the same weights: of the texts alone, and of what the teacher says of them."""
    language = of_one_letter(seed)
    many, few, held_out = (
        write_texts(folder / f"{count}.jsonl", language, count, seed + count) for count in (8_000, FEW, 401)
    )
    large, small = (write_shape(folder / f"width-{width}", width) for width in (TEACHER, STUDENT))
    run(language_job(large, folder / "teacher", many, 120, seed=seed))
    keys = DistillationKeys(str(folder / "teacher" / "final"), top_k=0)
    ids_BT = ids_of(small, held_out)
    more: dict[str, Any] = dict(seed=seed, save_steps=EVERY, save_total_limit=READ // EVERY)
    students: dict[str, dict[str, Any]] = {"text alone": {}, "taught": dict(task="distill", distill=keys)}
    curves = dict[str, Points]()
    for name, how in students.items():
        run(language_job(small, folder / name, few, READ, **how, **more))
        saves = range(EVERY, READ + 1, EVERY)
        curves[name] = [(float(step), text_loss(opened_save(folder / name, step), ids_BT)) for step in saves]
    teacher = text_loss(opened(folder / "teacher" / "final"), ids_BT)
    return Found({"teacher": teacher, "alone": curves["text alone"][-1][1], "taught": curves["taught"][-1][1]}, curves)


class Arm(NamedTuple):
    """How one of the students learns: `lmbda` and `beta` of its job, and whether each step has new completions of the
    few prompts, drawn from the language, where the others read those of the few texts again and again."""

    lmbda: float
    beta: float
    is_new: bool = False


ON, OFF, OFF_FORWARD = "on-policy, reverse KL", "off-policy, reverse KL", "off-policy, forward KL"
OFF_NEW = "off-policy, reverse KL, new completions"
ARMS = {ON: Arm(1.0, 1.0), OFF: Arm(0.0, 1.0), OFF_FORWARD: Arm(0.0, 0.0), OFF_NEW: Arm(0.0, 1.0, True)}

STEPS, BATCH, SAVED, ASKED = 120, 32, 30, 1_000


def corrected(seed: int, folder: Path) -> Found:
    """Students that go on from the same weights, with the same prompts and teacher: it speaks of what they write
    themselves, or of the texts from which the prompts are."""
    language = of_two_letters(seed)
    many, few, asked = (
        write_texts(folder / f"{count}.jsonl", language, count, seed + count) for count in (20_000, FEW, ASKED)
    )
    large, small = (write_shape(folder / f"width-{width}", width) for width in (TEACHER, STUDENT))
    size: dict[str, Any] = dict(global_batch_size=64, microbatch_size=64)
    run(language_job(large, folder / "teacher", many, 250, seed=seed, learning_rate=1e-2, **size))
    run(language_job(small, folder / "start", few, 60, seed=seed, learning_rate=5e-3))
    judge = Judge(opened(folder / "teacher" / "final"), ids_of(small, asked), language, seed)
    figures, curves = {"legal of the teacher": judge.of(judge.teacher).legal}, dict[str, Points]()
    start = judge.of(opened(folder / "start" / "final"))
    figures |= {"own, start": start.own, "legal, start": start.legal, "data, start": start.data}
    prompts = [json.loads(line)["prompt"] for line in few.read_text().splitlines()]
    new = write_texts(folder / "new.jsonl", language, STEPS * BATCH, seed + 1, prompts)
    for place, (name, arm) in enumerate(ARMS.items()):
        keys = DistillationKeys(
            str(folder / "teacher" / "final"),
            top_k=0,
            lmbda=arm.lmbda,
            beta=arm.beta,
            max_completion_length=REPLY,
            max_num_seqs=32,
        )
        more: dict[str, Any] = dict(
            learning_rate=5e-3, global_batch_size=BATCH, save_steps=SAVED, save_total_limit=STEPS
        )
        out, rows = folder / f"arm-{place}", new if arm.is_new else few
        more |= dict(seed=seed, task="distill", distill=keys)
        steps = run(language_job(folder / "start" / "final", out, rows, STEPS, **more))
        tokens, points, last = 0, [(0.0, start.own)], start
        for step in steps:
            tokens += step.tokens
            if step.step % SAVED == 0:
                last = judge.of(opened_save(out, step.step))
                points.append((float(tokens), last.own))
        curves[name] = points
        figures |= {f"own, {name}": last.own, f"legal, {name}": last.legal, f"data, {name}": last.data}
        figures[f"tokens, {name}"] = tokens
    return Found(figures, curves)


class Judged(NamedTuple):
    """Of one student: KL(student || teacher) in nats a token, exact over all tokens, on what it writes itself and on
    texts that nobody learned; and which share of what it writes is of the language, to the last letter."""

    own: float
    data: float
    legal: float


@dataclass(frozen=True)
class Judge:
    """Judges students by the same prompts, [texts, PROMPT + REPLY] with what the language wrote after them."""

    teacher: transformers.PreTrainedModel
    texts_BT: Tensor
    language: Language
    seed: int

    def of(self, student: transformers.PreTrainedModel) -> Judged:
        prompts_BT = self.texts_BT[:, :PROMPT]
        with seeded(self.seed):
            replies_BT = sampled_from(student, prompts_BT, REPLY, END_ID)
        own_BT = torch.cat([prompts_BT, replies_BT], 1)
        texts = ["".join(CHARACTERS[i - 1] for i in row if i != END_ID) for row in own_BT.tolist()]
        legal = sum(is_of(self.language, text) for text in texts) / len(texts)
        return Judged(self._divergence(student, own_BT), self._divergence(student, self.texts_BT), legal)

    @torch.no_grad()
    def _divergence(self, student: transformers.PreTrainedModel, ids_BT: Tensor) -> float:
        """The mean over the replies' tokens, the first end of each among them."""
        student_BTV, teacher_BTV = (
            model(ids_BT[:, :-1]).logits[:, PROMPT - 1 :].log_softmax(-1) for model in (student, self.teacher)
        )
        divergence_BT = (student_BTV.exp() * (student_BTV - teacher_BTV)).sum(-1)
        ended_BT = (ids_BT[:, PROMPT - 1 : -1] == END_ID).cumsum(1) > 0
        return float(divergence_BT[~ended_BT].mean())
