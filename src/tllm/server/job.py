"""One request in work: its choices run side by side and become one reply or a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from tllm.ground.errors import TllmError
from tllm.server.choice import Advance, Choice
from tllm.server.replies import Reply, Usage, usage
from tllm.server.router import Router
from tllm.server.shapes import Shape


@dataclass(frozen=True)
class Job:
    """What is asked for, ready to run. Whoever stops reading cancels what still runs."""

    router: Router
    shape: Shape
    choices: Sequence[Choice]
    prompt_tokens: int
    id: str
    created: int
    model: str
    fingerprint: str = ""
    final_usage: bool = False
    running_usage: bool = False
    every_token: bool = False  # a chunk for each step, even one without text: its ids or values are wanted

    async def reply(self) -> Reply:
        """Run to the end."""
        whole = {choice.index: Advance(choice.index) for choice in self.choices}
        async with aclosing(self._steps()) as steps:
            async for step in steps:
                _add(whole[step.index], step)
        made = self._reply(self.shape.whole_object, [whole[index] for index in sorted(whole)], chunk=False)
        made.usage = self._usage()
        return made

    async def chunks(self) -> AsyncGenerator[Reply, None]:
        """Run and give out what there is, as it comes."""
        blank: Usage | UnsetType | None = None if self.final_usage or self.running_usage else UNSET
        async with aclosing(self._steps()) as steps:
            async for step in steps:
                if not (step.text or step.finish_reason or (self.every_token and step.token_ids)):
                    continue
                chunk = self._reply(self.shape.chunk_object, [step], chunk=True)
                chunk.usage = self._usage() if self.running_usage else blank
                yield chunk
        if self.final_usage:
            last = self._reply(self.shape.chunk_object, [], chunk=True)
            last.usage = self._usage()
            yield last

    async def _steps(self) -> AsyncGenerator[Advance, None]:
        with self.router.places(len(self.choices)):
            source = self.router.play(self.choices[0]) if len(self.choices) == 1 else self._side_by_side()
            async with aclosing(source) as steps:
                async for step in steps:
                    yield step

    async def _side_by_side(self) -> AsyncGenerator[Advance, None]:
        """All choices at once, in the order their tokens arrive; the first error ends all."""
        arrived: asyncio.Queue[Advance | TllmError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(choice, arrived)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                step = await arrived.get()
                if isinstance(step, TllmError):
                    raise step
                if step is None:
                    left -= 1
                else:
                    yield step
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task

    async def _follow(self, choice: Choice, arrived: asyncio.Queue[Advance | TllmError | None]) -> None:
        try:
            async with aclosing(self.router.play(choice)) as steps:
                async for step in steps:
                    arrived.put_nowait(step)
        except TllmError as error:
            arrived.put_nowait(error)
        finally:
            arrived.put_nowait(None)

    def _reply(self, name: str, steps: Sequence[Advance], chunk: bool) -> Reply:
        show = self.shape.part if chunk else self.shape.whole
        return Reply(
            id=self.id,
            object=name,
            created=self.created,
            model=self.model,
            choices=[show(step) for step in steps],
            system_fingerprint=self.fingerprint or UNSET,
        )

    def _usage(self) -> Usage:
        return usage(self.prompt_tokens, sum(choice.completion_tokens for choice in self.choices))


def _add(whole: Advance, step: Advance) -> None:
    whole.text += step.text
    whole.token_ids += step.token_ids
    whole.scored += step.scored
    whole.finish_reason = step.finish_reason or whole.finish_reason
    whole.stop_reason = step.stop_reason if step.stop_reason is not None else whole.stop_reason
