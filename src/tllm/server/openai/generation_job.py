"""One request in work: its choices run side by side and become one reply or a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from tllm.core.errors import TllmError
from tllm.server.openai.choice import ChoiceProgress, ReplyChoice
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.reply_format import Shape
from tllm.server.openai.responses import ApiReply, Usage, usage


@dataclass(frozen=True)
class GenerationJob:
    """What is asked for, ready to run. Whoever stops reading cancels what still runs."""

    router: RequestRouter
    shape: Shape
    choices: Sequence[ReplyChoice]
    prompt_tokens: int
    id: str
    created: int
    model: str
    fingerprint: str = ""
    final_usage: bool = False
    running_usage: bool = False
    every_token: bool = False  # a chunk for each step, even one without text: its ids or values are wanted

    async def reply(self) -> ApiReply:
        """Run to the end."""
        whole = {choice.index: ChoiceProgress(choice.index) for choice in self.choices}
        async with aclosing(self._steps()) as steps:
            async for step in steps:
                _add(whole[step.index], step)
        made = self._reply(self.shape.whole_object, [whole[index] for index in sorted(whole)], chunk=False)
        made.usage = self._usage()
        return made

    async def chunks(self) -> AsyncGenerator[ApiReply, None]:
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

    async def _steps(self) -> AsyncGenerator[ChoiceProgress, None]:
        with self.router.places(len(self.choices)):
            source = self.router.play(self.choices[0]) if len(self.choices) == 1 else self._side_by_side()
            async with aclosing(source) as steps:
                async for step in steps:
                    yield step

    async def _side_by_side(self) -> AsyncGenerator[ChoiceProgress, None]:
        """All choices at once, in the order their tokens arrive; the first error ends all."""
        arrived: asyncio.Queue[ChoiceProgress | TllmError | None] = asyncio.Queue()
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

    async def _follow(self, choice: ReplyChoice, arrived: asyncio.Queue[ChoiceProgress | TllmError | None]) -> None:
        try:
            async with aclosing(self.router.play(choice)) as steps:
                async for step in steps:
                    arrived.put_nowait(step)
        except TllmError as error:
            arrived.put_nowait(error)
        finally:
            arrived.put_nowait(None)

    def _reply(self, name: str, steps: Sequence[ChoiceProgress], chunk: bool) -> ApiReply:
        show = self.shape.part if chunk else self.shape.whole
        return ApiReply(
            id=self.id,
            object=name,
            created=self.created,
            model=self.model,
            choices=[show(step) for step in steps],
            system_fingerprint=self.fingerprint or UNSET,
        )

    def _usage(self) -> Usage:
        return usage(self.prompt_tokens, sum(choice.completion_tokens for choice in self.choices))


def _add(whole: ChoiceProgress, step: ChoiceProgress) -> None:
    whole.text += step.text
    whole.token_ids += step.token_ids
    whole.scored += step.scored
    whole.finish_reason = step.finish_reason or whole.finish_reason
    whole.stop_reason = step.stop_reason if step.stop_reason is not None else whole.stop_reason
