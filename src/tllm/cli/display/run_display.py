"""What a run shows of itself: a line a step, on a terminal under it a bar with the time left."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tllm.cli.display.progress import cursor_of_shell
from tllm.cli.display.tables import terminal_width
from tllm.core.disk import print_line
from tllm.core.errors import counted
from tllm.spec.lora.lora_config import MAX_LORA_RANK
from tllm.training.report.console import show_bytes, show_seconds, step_line
from tllm.training.report.events import RunBegan, RunEnded, RunLostRank, RunResumed, RunSaved
from tllm.training.report.metrics import StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tllm.training.job.job import Job

WEIGHT = 0.1
"""Of the newest step in the average that the time left is worked out from."""


def product_of(job: Job) -> str:
    """What a run ends with."""
    return "the model" if job.lora is None else "the adapter"


def use_of(job: Job, final: str) -> str:
    """The command with which the product of a run, in the folder `final`, is used."""
    folder = shlex.quote(final)
    if job.lora is not None:
        rank = f" --max-lora-rank {job.lora.r}" if job.lora.r > MAX_LORA_RANK else ""
        bits = "" if job.lora.few_bits is None else f" --quantize {job.lora.quantize}"
        model = shlex.quote(job.model_name_or_path or "")
        return f"tllm serve {model}{bits} --enable-lora{rank} --lora-modules adapter={folder}"
    return f"tllm serve {folder}" if job.task == "reward" else f"tllm generate {folder} --prompt TEXT"


class RunDisplay:
    """Shows the news. `quiet` shows only the beginning and the end."""

    def __init__(self, max_steps: int, quiet: bool) -> None:
        self._max_steps, self._quiet = max_steps, quiet
        self._average: float | None = None
        self._has_begun = False
        self._unsaved: int | None = None  # the step of the last save, if that failed
        self._stack = ExitStack()
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()

    def began(self, news: RunBegan, folder: Path) -> None:
        if self._has_begun:  # and goes on: `resumed` says how
            return
        self._has_begun = True
        went_on = f", going on after step {news.step}" if news.step else ""
        count = f"{news.parameters + news.adapter_parameters:,} parameters"
        if news.adapter_parameters:
            count = f"trains {news.adapter_parameters:,} of {count}"
        print_line(f"{folder}: {count}{went_on}")
        print_line(f"matrix peak of all ranks: {news.peak / 1e9:,.0f} Gflop/s")
        if news.products:
            print_line(f"products: {news.products}")
        if news.network:
            print_line(f"network: {news.network}")
        if news.disk:
            print_line(f"disk: {news.disk}")
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not self._quiet:
            self._bar = self._open_bar(news.step)

    def stepped(self, record: StepRecord) -> None:
        seconds = record.seconds
        self._average = seconds if self._average is None else WEIGHT * seconds + (1 - WEIGHT) * self._average
        if not self._quiet:
            average = None if self._bar else self._average
            self._say(step_line(record, self._max_steps, average, terminal_width()))
        if self._bar is not None:
            bar, task = self._bar
            left = show_seconds((self._max_steps - record.step) * self._average)
            bar.update(task, completed=record.step, left=left)

    def saved(self, news: RunSaved) -> None:
        self._unsaved = news.step if news.error else None
        if news.error:
            self._say(f"the save of step {news.step} failed, the run goes on: {news.error}")
        elif not self._quiet:
            self._say(f"saved step {news.step}: {show_bytes(news.nbytes)} in {news.seconds:.1f} s")

    def told(self, text: str) -> None:
        """What somebody watching the run has to say."""
        self._say(text)

    def lost(self, news: RunLostRank) -> None:
        self._say(f"after step {news.step}: {news.reason}")

    def resumed(self, news: RunResumed) -> None:
        origin = {"memory": "what the others have in memory", "save": "the last save", "start": "the beginning"}
        again = f" ({counted(news.again, 'later one is', 'later ones are')} done again)" if news.again else ""
        after = f" after {news.seconds:.1f} s" if news.seconds else ""
        self._say(f"goes on{after} after step {news.step}{again}, from {origin[news.origin]}; plan {news.plan}")

    def ended(self, news: RunEnded, job: Job) -> None:
        self._close_bar()
        if news.reason:
            print_line(f"ended early: {news.reason}")
        if news.final:
            count = counted(news.step, "step")
            print_line(f"done after {count}; {product_of(job)} is in {news.final}{news.of_step}")
            print_line(f"to use it: {use_of(job, news.final)}")
        else:
            whence = ", whose save failed; the same command goes on from the last that is whole"
            said = whence if self._unsaved == news.step else "; the same command goes on"
            print_line(f"left after step {news.step} of {self._max_steps}{said}")

    def _say(self, line: str) -> None:
        if self._bar is None:
            print_line(line)
        else:
            print_line(line, partial(self._bar[0].console.print, highlight=False, soft_wrap=True))

    def _close_bar(self) -> None:
        """It is drawn once more; on a terminal that is gone it is not."""
        with suppress(OSError):
            self._stack.close()

    def _open_bar(self, step: int) -> tuple[Progress, TaskID]:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}  {task.fields[left]} left"))
        bar = self._stack.enter_context(Progress(*columns, transient=True))
        self._stack.enter_context(cursor_of_shell(bar.live))
        return bar, bar.add_task("training", total=self._max_steps, completed=step, left="")
