"""What each step was: one JSON line in `metrics.jsonl`, and scalars for TensorBoard if asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.evaluation.step_lines import StepLines, step_of
from tllm.training.policy.completions_file import EVAL_COMPLETIONS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


FILE = "metrics.jsonl"
TENSORBOARD, NOTHING = "tensorboard", "none"
"""What `report_to` may name; "none" is what transformers has for nothing."""
NOT_OF_TRAINING = (
    *("step", "metrics", "role_seconds", "predicted_seconds"),
    *("eval_loss", "eval_metrics", "eval_perplexity", "eval_seconds", "early_stopping"),
)
TAIL_BYTES = 64 * 1024


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step, the first being 1. `mfu` is the part of this machine's measured matrix peak that was reached, `bubble`
    the part of the time that ranks waited for the pipeline, `memory` the most bytes on any rank, `bytes_sent` by all.
    `aux_loss` is the experts' load-balance loss, without its coefficient; `metrics` are what the task's objective tells
    beside the loss, by TRL's names. After an evaluation `eval_loss` and `eval_metrics` are those of rows held out, and
    `eval_perplexity` is exp(eval_loss) where the loss is a mean of -log p over tokens; it took `eval_seconds`, which
    are not of the step's. `early_stopping` says why evaluations end the run after this step. `role_seconds` are those
    parts of `seconds` that rank 0 spent on roles beside the policy: "sampling", "rewards" or "teacher", "reference".
    `predicted_seconds` are what the planner that chose the plan predicted: of the whole "step", of those roles and of
    the "policy", with rows as long as they may be, and of an "evaluation"; of no "step" where programs elsewhere sample
    or teach, as nobody measured them.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    bubble: float | None = None
    memory: int | None = None
    bytes_sent: int = 0
    aux_loss: float | None = None
    metrics: dict[str, float] | None = None
    eval_loss: float | None = None
    eval_metrics: dict[str, float] | None = None
    eval_perplexity: float | None = None
    eval_seconds: float | None = None
    early_stopping: str | None = None
    role_seconds: dict[str, float] | None = None
    predicted_seconds: dict[str, float] | None = None


class Sink(Protocol):
    """Takes each step's record, and after an evaluation some completions of rows held out."""

    def write(self, record: StepRecord, completions: Sequence[CompletionRecord] = ()) -> None: ...

    def close(self) -> None: ...


class MetricsFile(StepLines):
    """`metrics.jsonl`: a line for each step."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        super().__init__(folder / FILE, done)

    def write(self, record: StepRecord, completions: Sequence[CompletionRecord] = ()) -> None:
        """Add a line. Completions have a file of their own."""
        self.add([record])


class TensorBoard:
    """The same as scalars, by TensorBoard's own writer."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        # What was written of later steps before a restart is then not shown.
        self._writer = _summary_writer()(str(folder), purge_step=done + 1)

    def write(self, record: StepRecord, completions: Sequence[CompletionRecord] = ()) -> None:
        numbers = {name: value for name, value in fields(record).items() if name not in NOT_OF_TRAINING}
        of_roles = {f"seconds/{name}": value for name, value in (record.role_seconds or {}).items()}
        of_roles |= {f"predicted_seconds/{name}": value for name, value in (record.predicted_seconds or {}).items()}
        for name, value in {**numbers, **(record.metrics or {}), **of_roles}.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, record.step)
        told = {"loss": record.eval_loss, "perplexity": record.eval_perplexity, "seconds": record.eval_seconds}
        evaluated = {**told, **(record.eval_metrics or {})}
        for name, value in evaluated.items():
            if value is not None:
                self._writer.add_scalar(f"eval/{name}", value, record.step)
        if completions:
            self._writer.add_text("eval/completions", markdown(completions), record.step)
        if record.early_stopping is not None:
            self._writer.add_text("train/early_stopping", record.early_stopping, record.step)

    def close(self) -> None:
        self._writer.close()


class EvalCompletions(StepLines):
    """`eval_completions.jsonl`: completions of rows held out, a line each."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        super().__init__(folder / EVAL_COMPLETIONS, done)

    def write(self, record: StepRecord, completions: Sequence[CompletionRecord] = ()) -> None:
        self.add(completions)


def check_sinks(report_to: tuple[str, ...]) -> None:
    """Refuse, before anything is begun, what `sinks` could not give. ConfigError."""
    unknown = [name for name in report_to if name not in (TENSORBOARD, NOTHING)]
    if unknown:
        raise ConfigError(f"report_to names {unknown[0]!r}", f"known: {TENSORBOARD}, {NOTHING}")
    if TENSORBOARD in report_to:
        _summary_writer()


def sinks(folder: Path, report_to: tuple[str, ...] = (), done: int = 0, with_completions: bool = False) -> list[Sink]:
    """The files of a run, and what `report_to` names beside it. `done` steps were taken by the save it goes on from.

    `with_completions`: evaluations make some of rows held out.
    """
    check_sinks(report_to)
    first: list[Sink] = [MetricsFile(folder, done)]
    if with_completions:
        first.append(EvalCompletions(folder, done))
    return [*first, TensorBoard(folder / TENSORBOARD, done)] if TENSORBOARD in report_to else first


_RECORDS = msgspec.json.Decoder(StepRecord)


def read_records(path: Path) -> list[StepRecord]:
    """The lines of a file, those that are whole."""
    return [_RECORDS.decode(line) for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]


def last_step(folder: Path) -> int:
    """The last step that the file of a run tells of; 0 where there is none."""
    path = folder / FILE
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return max(map(step_of, file), default=0)


def fields(record: StepRecord) -> dict[str, Any]:
    """The record by name, in order."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def markdown(completions: Sequence[CompletionRecord]) -> str:
    """Each completion below its prompt, as blocks of code, in which no sign of a text means anything."""
    return "\n\n".join(
        f"**{name}**\n\n{_block(text)}"
        for one in completions
        for name, text in (("prompt", one.prompt), ("completion", one.completion), ("reference", one.reference))
        if text is not None
    )


def _block(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            'report_to = "tensorboard" and the package tensorboard is not installed',
            "pip install tensorboard, or leave report_to out: metrics.jsonl holds the same",
        ) from error
    return SummaryWriter
