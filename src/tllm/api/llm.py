"""`LLM`: a language model for Python programs, in this process or cut over several."""

from __future__ import annotations

import asyncio
import operator
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Unpack

import msgspec

from tllm.api.engine_options import EngineArgs, check_device, check_names, engine_options
from tllm.api.engine_thread import EngineThread
from tllm.api.lora_request import LoRARequest, LoRARequests, RequestedAdapters, of_each_prompt
from tllm.api.open_engine import open_engine
from tllm.api.streamed_reply import StreamedReply
from tllm.core.errors import ConfigError, RequestError
from tllm.core.tasks import end_tasks
from tllm.server.openai.engine_client import pooled_output
from tllm.server.pooling.pooled_prompts import Asker, EmbeddedPrompt, PooledPrompts
from tllm.server.pooling.score_prompts import ScorePrompts
from tllm.spec.lora.lora_config import MAX_LORA_RANK, ServedLoras
from tllm.spec.request import Request, SamplingParams, TokenLogprobs
from tllm.text.chat_template import ChatTemplate
from tllm.text.generation_config import effective_temperature, sampling_values
from tllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""


@dataclass(frozen=True)
class Generation:
    """What a prompt was continued with.

    `finish_reason` is "stop" (an end token, or a text of `stop`) or "length" (`max_tokens`, or the context is full).
    `logprobs`, one entry for each of `token_ids`, is empty unless `SamplingParams.logprobs` asks for it. `text` is
    empty for a model folder without a tokenizer. `num_cached_tokens` of the prompt were found in the cache and not
    computed.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Embedding:
    """The embedding of a prompt. `num_cached_tokens` of it were found in the cache and not computed."""

    prompt_token_ids: tuple[int, ...]
    embedding: tuple[float, ...]
    num_cached_tokens: int = 0


class _Asked(NamedTuple):
    """A request as a call has it, before its adapter is loaded, and the texts that end its reply."""

    request: Request
    stops: tuple[str, ...]


class LLM:
    """A model of a Hugging Face folder, or by its name on the hub, ready to generate. Close it, or use it in a `with`
    block.

        with LLM("models/tiny", plan="pp=2") as llm:
            for reply in llm.generate(["def main():"], SamplingParams(max_tokens=32, temperature=0)):
                print(reply.text)

    `plan` says how the model is cut, as for `tllm serve`: one rank runs in this process, more run as a process for
    each. The tokens are the same under every plan. `EngineArgs` lists the keyword arguments. `on_progress(what, done,
    total)` is told of bytes that are loaded. Calls come from any thread; what several ask for is computed together.

    With `enable_lora` calls may ask for LoRA adapters of the model, as a `lora_request`: at most `max_loras` at once,
    of rank `max_lora_rank` at most. Each rank is a process of its own then. One is loaded when it is first asked for,
    and makes room for another when no call has it.
    """

    def __init__(
        self,
        model: Path | str,
        plan: str = "pp=1",
        *,
        on_progress: Callable[[str, int, int], None] | None = None,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = MAX_LORA_RANK,
        **args: Unpack[EngineArgs],
    ) -> None:
        """Load the model. Raises ConfigError, PlanError, CapacityError or WeightsError where that cannot be done."""
        check_names(args)
        if not enable_lora and max_loras != 1:
            raise ConfigError(f"max_loras is {max_loras} and adapters are not loaded", "give enable_lora=True too")
        if max_loras < 1 or max_lora_rank < 1:
            raise ConfigError(f"max_loras is {max_loras} and max_lora_rank {max_lora_rank}", "give 1 at least of each")
        check_device(args.get("device", "cpu"))
        self.options = engine_options(model, plan, **args)
        self.tokenizer = Tokenizer.from_folder(self.options.folder)
        self.chat_template = ChatTemplate.from_folder(self.options.folder, self.tokenizer)
        adapters = ServedLoras(max_loras, max_lora_rank, {}) if enable_lora else None
        self._engine = EngineThread(open_engine(self.options, on_progress, adapters))
        self._adapters = RequestedAdapters(self._engine.client, max_loras if enable_lora else 0)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and reply together."""
        return self._engine.client.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of calls that give none: what the model's folder recommends, as `generation_config` has it.

        Its `max_tokens` is a bound: where the context leaves less after a prompt, a call makes so many.
        """
        defaults = self.options.generation_config
        chosen = sampling_values(defaults.fill({}))
        if defaults.max_new_tokens is not None:
            chosen["max_tokens"] = defaults.max_new_tokens
        return SamplingParams(**chosen)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora_request: LoRARequests = None,
    ) -> list[Generation]:
        """Continue one prompt or several together; the replies in the order of the prompts.

        A reply ends before any text of `stop`, one or several. `lora_request` is the adapter of all, or that of each.
        Raises RequestError where one cannot be served as it is, NonFiniteError where the model comes to no numbers for
        it, what `LLM` and adapters raise where one cannot be loaded, and ClusterError where a rank is lost and nobody
        can take over; no reply is then returned.
        """
        asked = [self._request(self._encode(prompt), sampling_params, stop) for prompt in several(prompts)]
        return self._engine.run(self._finish(asked, of_each_prompt(lora_request, len(asked))))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """The text that continues one prompt, in pieces as they come. Ending the loop early cancels the request."""
        asked = self._request(self._encode(prompt), sampling_params, stop)
        return self._engine.iterate(self._pieces(asked, of_each_prompt(lora_request, 1)))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """The reply to a conversation of {"role", "content"} messages, by the chat template that the model came with.

        ConfigError where it came without one.
        """
        if self.tokenizer is None or self.chat_template is None:
            lacks = "tokenizer.json" if self.tokenizer is None else "chat template"
            raise ConfigError(f"{self.options.folder} has no {lacks}, so it cannot chat", "`generate` continues a text")
        text = self.chat_template.render(conversation(messages))
        prompt_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        params = self._params(sampling_params, prompt_ids)
        if not params.ignore_eos:
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *self.tokenizer.eos_ids))
        asked = self._request(prompt_ids, params, stop)
        (reply,) = self._engine.run(self._finish([asked], of_each_prompt(lora_request, 1)))
        return reply

    def embed(
        self,
        prompts: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[Embedding]:
        """The embeddings of one prompt or several, in their order, as `pooler_config` or the model's folder has it.

        Any model that writes can embed; nothing is sampled. With `dimensions` only the first so many numbers are kept,
        and normalised again unless `normalize` is false. `lora_request` is the adapter of all, or that of each. Raises
        as `generate` does.
        """
        ids = [self._encode(prompt) for prompt in several(prompts)]
        adapters = of_each_prompt(lora_request, len(ids))
        found = self._engine.run(self._embedded(ids, adapters, dimensions, normalize))
        return [Embedding(one, of_one.vector, of_one.num_cached_tokens) for one, of_one in zip(ids, found, strict=True)]

    def score(
        self,
        text: str,
        others: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """How well each of `others` goes with `text`: a query with documents, or a prompt with answers to it.

        By the cosine of embeddings, by the answer of a generative reranker, or by a classification head, whose plain
        number comes without `use_activation`. `instruction` tells a generative reranker what a query is for.
        `lora_request` is the adapter that scores.
        """
        pairs = [(text, other) for other in ([others] if isinstance(others, str) else others)]
        return self._engine.run(self._scored(pairs, of_each_prompt(lora_request, 1), instruction, use_activation))

    @cached_property
    def _pooled(self) -> PooledPrompts:
        pooling = self.options.pooling()
        prompts = ScorePrompts(self.tokenizer, self.chat_template, pooling.answers)
        return PooledPrompts(partial(pooled_output, self._engine.client), pooling, prompts)

    def close(self) -> None:
        """End the engine and its processes. Done twice it is as done once."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, int):
            raise RequestError("prompts are texts or lists of ids, not bare ids", "give [[1, 2, 3]] for one prompt")
        if not isinstance(prompt, str):
            return ids_of(prompt)
        if self.tokenizer is None:
            raise ConfigError(f"{self.options.folder} has no tokenizer.json", "give prompts as token ids")
        return tuple(self.tokenizer.encode(prompt))

    def _params(self, given: SamplingParams | None, prompt_ids: tuple[int, ...]) -> SamplingParams:
        """What a call gave as it is, else the defaults, with as many tokens as the context leaves at the most."""
        if given is not None:
            return given
        defaults = self.get_default_sampling_params()
        room = self.max_model_len - len(prompt_ids)  # none: the engine refuses a prompt and one token with both numbers
        return msgspec.structs.replace(defaults, max_tokens=max(1, min(defaults.max_tokens, room)))

    def _request(
        self, prompt_ids: tuple[int, ...], sampling_params: SamplingParams | None, stop: str | Sequence[str]
    ) -> _Asked:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.tokenizer is None:
            raise ConfigError(f"stop needs a tokenizer and {self.options.folder} has none", "leave stop out")
        if not all(stops):
            raise RequestError("a stop string is empty", "leave it out", "stop")
        params = self._params(sampling_params, prompt_ids)
        params = msgspec.structs.replace(
            params,
            temperature=effective_temperature(params.temperature),
            seed=secrets.randbits(48) if params.seed is None else params.seed,
        )
        return _Asked(Request(id=uuid.uuid4().hex, prompt_ids=prompt_ids, params=params), stops)

    def _reply(self, asked: _Asked, lora: str) -> StreamedReply:
        return StreamedReply(msgspec.structs.replace(asked.request, lora=lora), self.tokenizer, asked.stops)

    async def _pieces(self, asked: _Asked, adapters: Sequence[LoRARequest | None]) -> AsyncGenerator[str]:
        client, reply = self._engine.client, partial(self._reply, asked)
        async with self._adapters.loaded(adapters) as (lora,), aclosing(reply(lora).stream(client)) as pieces:
            async for piece in pieces:
                yield piece

    async def _embedded(
        self,
        prompts: Sequence[tuple[int, ...]],
        adapters: Sequence[LoRARequest | None],
        dimensions: int | None,
        normalize: bool | None,
    ) -> list[EmbeddedPrompt]:
        """The embedding of each prompt; those of one adapter are computed together."""
        async with self._adapters.loaded(adapters) as loras:
            found = {}
            for lora in dict.fromkeys(loras):
                of_one = [prompt for prompt, its in zip(prompts, loras, strict=True) if its == lora]
                found[lora] = iter(await self._pooled.embed(of_one, dimensions, normalize, Asker(lora=lora)))
            return [next(found[lora]) for lora in loras]

    async def _scored(
        self,
        pairs: Sequence[tuple[str, str]],
        adapters: Sequence[LoRARequest | None],
        instruction: str | None,
        use_activation: bool,
    ) -> list[float]:
        async with self._adapters.loaded(adapters) as (lora,):
            return list((await self._pooled.score(pairs, instruction, Asker(lora=lora), use_activation)).values)

    async def _finish(self, asked: Sequence[_Asked], adapters: Sequence[LoRARequest | None]) -> list[Generation]:
        """Play all replies to their ends; the first that fails ends the others, and is raised."""

        async def play(reply: StreamedReply) -> Generation:
            async for _ in reply.stream(self._engine.client):
                pass
            return _generation(reply)

        async with self._adapters.loaded(adapters) as loras:
            tasks = [asyncio.create_task(play(self._reply(*one))) for one in zip(asked, loras, strict=True)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                await end_tasks(*tasks)


def conversation(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The messages, which may come one by one, as a template reads them. RequestError for what are none."""
    given = list[object]() if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable) else [*messages]
    found = [dict(one) for one in given if isinstance(one, Mapping)]
    if not found or len(found) < len(given):
        said = 'give [{"role": "user", "content": "Hello"}]; `generate` continues a text'
        raise RequestError("messages are a list of dicts, each with a role and content", said, "messages")
    return found


def several(prompts: str | Sequence[Prompt]) -> Sequence[Prompt]:
    """One text, or several prompts, as several. RequestError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    return prompts


def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """The ids of a prompt's tokens, which may come from numpy or torch. RequestError for what are none."""
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
        raise _no_prompt(prompt)
    try:
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError as error:
        raise _no_prompt(prompt) from error


def _no_prompt(given: object) -> RequestError:
    message = f"prompts are texts or lists of ids, and a {type(given).__name__} was given"
    return RequestError(message, 'give "a text", or [[1, 2, 3]] for one prompt of ids', "prompts")


def _generation(reply: StreamedReply) -> Generation:
    assert reply.finish_reason is not None, "it was played to its end"
    return Generation(
        prompt_token_ids=reply.request.prompt_ids,
        token_ids=tuple(reply.token_ids),
        text=reply.text,
        finish_reason=reply.finish_reason,
        logprobs=tuple(reply.logprobs),
        num_cached_tokens=reply.num_cached_tokens,
    )
