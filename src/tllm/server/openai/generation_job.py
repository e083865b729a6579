"""`GenerationJob`: one request in work. Its choices run side by side and become one reply or a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from tllm.core.errors import TllmError
from tllm.server.admission.account import Account
from tllm.server.http.errors import too_late
from tllm.server.openai.choice import ChoiceProgress, ReplyChoice, charge_choices
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.reply_format import ApiReply, ReplyFormat, Usage, usage
from tllm.server.reply.reply_ids import ReplyIds
from tllm.spec.request import Output


@dataclass
class GenerationJob:
    """What is asked for, ready to run by `reply` or by `chunks`. Whoever stops reading cancels what still runs.

    Where there are `outputs`, somebody else runs the choices: these are read from there, in the order in which they
    come, and whoever stops reading cancels nothing.
    """

    router: RequestRouter
    account: Account  # which pays for it
    reply_format: ReplyFormat
    choices: Sequence[ReplyChoice]
    prompt_tokens: int
    num_prompts: int  # the choices are those of the first prompt, then of the second, …
    ids: ReplyIds
    model: str
    fingerprint: str = ""
    include_usage: bool = False  # a stream ends with a chunk that holds the usage
    continuous_usage: bool = False  # every chunk holds it
    every_token: bool = False  # a chunk for each step, even one without text: its ids or values are wanted
    outputs: AsyncGenerator[Output, None] | None = None

    @property
    def id(self) -> str:
        """What clients call the reply."""
        return f"{self.reply_format.id_prefix}-{self.ids.stem}"

    async def reply(self) -> ApiReply:
        """Run to the end."""
        whole = {choice.index: ChoiceProgress(choice.index) for choice in self.choices}
        async with aclosing(self.steps(is_whole=True)) as steps:
            async for progress in steps:
                _add(whole[progress.index], progress)
        choices = [self.reply_format.choice(whole[index]) for index in sorted(whole)]
        reply = self._reply(self.reply_format.object_name, choices)
        reply.usage = self.usage()
        if self.reply_format.reads_events:  # a chat has one prompt
            reply.prompt_logprobs = self.reply_format.fields.of_prompt(whole[0])
        return reply

    async def chunks(self) -> AsyncGenerator[ApiReply, None]:
        """Run and give out what there is, as it comes."""
        no_usage: Usage | UnsetType | None = None if self.include_usage or self.continuous_usage else UNSET
        async with aclosing(self.steps()) as steps:
            async for progress in steps:
                has_news = progress.events or (progress.text and not self.reply_format.reads_events)
                if not (has_news or progress.finish_reason or (self.every_token and progress.token_ids)):
                    continue
                chunk = self._reply(self.reply_format.chunk_object_name, [self.reply_format.chunk_choice(progress)])
                chunk.usage = self.usage() if self.continuous_usage else no_usage
                yield chunk
        if self.include_usage:
            last = self._reply(self.reply_format.chunk_object_name, [])
            last.usage = self.usage()
            yield last

    async def steps(self, is_whole: bool = False) -> AsyncGenerator[ChoiceProgress, None]:
        """What all choices make, as it comes. Room for them is taken first, unless somebody else runs them. A reply
        that `is_whole` is written at its end, and costs nothing if it is lost before.

        HttpError after `request_seconds`.
        """
        if self.outputs is not None:
            with self.router.reading():
                async with aclosing(self.router.read(self.choices, self.outputs)) as read:
                    async for progress in read:
                        yield progress
            return
        max_tokens = sum(choice.request.params.max_tokens for choice in self.choices)
        with self.router.admit(len(self.choices), self.account, self.prompt_tokens, max_tokens) as charge:

            def look(output: Output) -> None:
                if output.computed_tokens:
                    charge.compute(output.request_id, output.computed_tokens)

            is_one = len(self.choices) == 1
            source = self.router.run(self.choices[0], look) if is_one else self._side_by_side(look)
            async with aclosing(_in_time(source, self.router.request_seconds)) as steps:
                async for progress in steps:
                    charge_choices(charge, self.choices, self._cached_tokens())
                    charge.is_written = not is_whole
                    yield progress

    async def _side_by_side(self, look: Callable[[Output], None]) -> AsyncGenerator[ChoiceProgress, None]:
        """All choices at once, in the order their tokens arrive; the first error ends all."""
        arrived: asyncio.Queue[ChoiceProgress | TllmError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(choice, arrived, look)) for choice in self.choices]
        try:
            running = len(tasks)
            while running:
                progress = await arrived.get()
                if isinstance(progress, TllmError):
                    raise progress
                if progress is None:
                    running -= 1
                else:
                    yield progress
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task

    async def _follow(
        self,
        choice: ReplyChoice,
        arrived: asyncio.Queue[ChoiceProgress | TllmError | None],
        look: Callable[[Output], None],
    ) -> None:
        """Put what one choice makes into the queue, then None; its error instead, where it has one."""
        try:
            async with aclosing(self.router.run(choice, look)) as steps:
                async for progress in steps:
                    arrived.put_nowait(progress)
        except TllmError as error:
            arrived.put_nowait(error)
        finally:
            arrived.put_nowait(None)

    def _reply(self, object_name: str, choices: list[msgspec.Struct]) -> ApiReply:
        return ApiReply(
            id=self.id,
            object=object_name,
            created=self.ids.created,
            model=self.model,
            choices=choices,
            system_fingerprint=self.fingerprint or UNSET,
        )

    def usage(self) -> Usage:
        """Tokens so far."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return usage(self.prompt_tokens, completion, self._cached_tokens(), reasoning)

    def _cached_tokens(self) -> int:
        # A prompt's later choices find what its first one computes, so the least is what nobody computed.
        each = len(self.choices) // self.num_prompts
        firsts = range(0, len(self.choices), each)
        return sum(min(choice.cached_tokens for choice in self.choices[at : at + each]) for at in firsts)


async def _in_time(
    source: AsyncGenerator[ChoiceProgress, None], seconds: float
) -> AsyncGenerator[ChoiceProgress, None]:
    """The same, until it takes longer than this (0: for ever); then an `HttpError`."""
    until = asyncio.get_running_loop().time() + seconds if seconds else None
    async with aclosing(source):
        while True:
            try:
                async with asyncio.timeout_at(until):
                    progress = await anext(source, None)
            except TimeoutError as error:
                raise too_late(seconds) from error
            if progress is None:
                return
            yield progress


def _add(whole: ChoiceProgress, progress: ChoiceProgress) -> None:
    whole.text += progress.text
    whole.events += progress.events
    whole.token_ids += progress.token_ids
    whole.scored += progress.scored
    whole.prompt_logprobs = progress.prompt_logprobs or whole.prompt_logprobs
    whole.finish_reason = progress.finish_reason or whole.finish_reason
    whole.stop_reason = progress.stop_reason if progress.stop_reason is not None else whole.stop_reason
