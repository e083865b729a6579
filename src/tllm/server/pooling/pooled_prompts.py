"""`PooledPrompts`: embeddings of prompts and scores of pairs of texts, for the server and for Python."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tllm.core.errors import RequestError
from tllm.core.tasks import end_tasks
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.pooling.score_prompts import ScorePrompts
from tllm.server.pooling.vectors import Vector, cosine, embedding
from tllm.spec.request import Output, PoolingParams, Request, SamplingParams, Scheduling

AT_ONCE = 64
"""Prompts of one call that the engine has at a time, at most."""

T = TypeVar("T")

RunPooled = Callable[[Request, Callable[[Output], None]], Awaitable[Output]]
"""Runs a request that is pooled to its end; each of its outputs goes to the function."""

NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class EmbeddedPrompt:
    """The embedding of one prompt, and how many tokens of that were found in the cache and not computed."""

    vector: Vector
    num_cached_tokens: int


@dataclass(frozen=True)
class Scores:
    """What pairs of texts were scored, in their order, and the tokens of all prompts that this took."""

    values: tuple[float, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Asker:
    """Who asks: the salt of the prefixes of their prompts, the id of the adapter that these are computed with ("" for
    none), and when they begin among others that wait.

    `pays(tokens, cached)` is called for each prompt that is done, `cached` of whose tokens were not computed, and for
    what was computed of one that is cancelled.
    """

    salt: str = ""
    lora: str = ""
    scheduling: Scheduling = field(default_factory=Scheduling)
    pays: Callable[[int, int], None] = lambda tokens, cached: None


ANYBODY = Asker()


class PooledPrompts:
    """What one model makes of prompts besides replies, `at_once` of a call at a time. `check` refuses a prompt that is
    too long."""

    def __init__(
        self,
        run: RunPooled,
        pooling: ModelPooling,
        prompts: ScorePrompts,
        check: Callable[[Sequence[int]], None] = lambda ids: None,
        at_once: int = AT_ONCE,
    ) -> None:
        self._run, self.pooling, self._prompts, self._check = run, pooling, prompts, check
        self.at_once = at_once

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        dimensions: int | None = None,
        normalize: bool | None = None,
        asker: Asker = ANYBODY,
    ) -> list[EmbeddedPrompt]:
        """The embedding of each prompt, cut to `dimensions`; RequestError for more than the model has."""
        width = self.pooling.hidden_size
        if dimensions is not None and not 1 <= dimensions <= width:
            message = f"dimensions is {dimensions}, and this model's embeddings have {width}"
            raise RequestError(message, f"give 1 to {width}", "dimensions")
        outputs = await self.pooled(prompts, PoolingParams(kind=self.pooling.kind), asker)
        is_normalized = self.pooling.normalize if normalize is None else normalize
        return [EmbeddedPrompt(embedding(one.pooled, is_normalized, dimensions), one.cached_tokens) for one in outputs]

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None = None,
        asker: Asker = ANYBODY,
        activation: bool = True,
    ) -> Scores:
        """How well the texts of each pair go together, by the model's `score_type`.

        A classification head's number is put through the logistic function, unless `activation` is false.
        """
        kind = self.pooling.score_type
        if instruction is not None and kind != "generative":
            raise RequestError(f"an instruction is for generative scores; this model's are by {kind}", "leave it out")
        if kind == "embedding":
            return await self._by_embeddings(pairs, asker)
        if kind == "generative":
            ids = await self._encoded(lambda pair: self._prompts.question(*pair, instruction), pairs)
            params = PoolingParams(kind="logprobs", token_ids=self._prompts.answer_ids())
            outputs = await self.pooled(ids, params, asker)
            # e^yes / (e^no + e^yes): what the two would have if there were no other tokens
            values = tuple(logistic(one.pooled[1] - one.pooled[0]) for one in outputs)
        else:
            if self.pooling.num_labels != 1:
                message = f"the model's head has {self.pooling.num_labels} labels, and a score is one number"
                raise RequestError(message, "serve a model with one label")
            ids = await self._encoded(lambda pair: self._prompts.pair(*pair), pairs)
            outputs = await self.pooled(ids, PoolingParams(kind="score"), asker)
            values = tuple(logistic(one.pooled[0]) if activation else one.pooled[0] for one in outputs)
        return Scores(values, sum(map(len, ids)))

    async def classify(
        self, prompts: Sequence[Sequence[int]], asker: Asker = ANYBODY, activation: bool = True
    ) -> list[Vector]:
        """The probability of each label for each prompt; without `activation` the numbers of the head themselves.

        As in vLLM: those of one of several labels are their softmax, one label's or several independent ones' the
        logistic function of each, and a regression's are as they are.
        """
        if self.pooling.score_type != "classification":
            message = "the model has no classification head (score.weight)"
            raise RequestError(message, "serve a model for sequence classification")
        outputs = await self.pooled(prompts, PoolingParams(kind="score"), asker)
        if not activation or self.pooling.problem_type == "regression":
            return [one.pooled for one in outputs]
        is_one_of_several = self.pooling.num_labels > 1 and self.pooling.problem_type != "multi_label_classification"
        return [softmax(one.pooled) if is_one_of_several else tuple(map(logistic, one.pooled)) for one in outputs]

    async def pooled(
        self, prompts: Sequence[Sequence[int]], params: PoolingParams, asker: Asker = ANYBODY
    ) -> list[Output]:
        """What each prompt comes to; the first that fails ends the others."""
        for ids in prompts:
            self._check(ids)
        found: dict[int, Output] = {}
        left = iter(enumerate(prompts))

        async def work() -> None:
            for place, ids in left:
                request = Request(
                    id=uuid.uuid4().hex,
                    prompt_ids=tuple(ids),
                    params=NOTHING_SAMPLED,
                    pooling=params,
                    cache_salt=asker.salt,
                    lora=asker.lora,
                    scheduling=asker.scheduling,
                )
                found[place] = await self._paid(request, asker)

        tasks = [asyncio.create_task(work()) for _ in range(min(self.at_once, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        return [found[place] for place in range(len(prompts))]

    async def _paid(self, request: Request, asker: Asker) -> Output:
        """What one prompt comes to, paid for; of one that is cancelled what was computed is."""
        tokens = cached = 0

        def look(output: Output) -> None:
            nonlocal tokens
            tokens = max(tokens, output.computed_tokens)

        try:
            output = await self._run(request, look)
            tokens, cached = len(request.prompt_ids), output.cached_tokens
        finally:
            if tokens:
                asker.pays(tokens, cached)
        return output

    async def _by_embeddings(self, pairs: Sequence[tuple[str, str]], asker: Asker) -> Scores:
        """Each text is embedded once, however many pairs it is in."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = await self._encoded(self._prompts.tokenizer.encode, texts)
        vectors = {text: one.vector for text, one in zip(texts, await self.embed(ids, asker=asker), strict=True)}
        values = tuple(cosine(vectors[text], vectors[other]) for text, other in pairs)
        return Scores(values, sum(map(len, ids)))

    async def _encoded(self, encode: Callable[[T], Sequence[int]], texts: Sequence[T]) -> list[Sequence[int]]:
        """What each text is encoded as, in another thread: many take long, and other requests go on.

        Nothing is encoded after the first that is too long, such as a long query, which is part of each pair.
        """

        def encode_all() -> list[Sequence[int]]:
            found = list[Sequence[int]]()
            for text in texts:
                found.append(encode(text))
                self._check(found[-1])
            return found

        return await asyncio.to_thread(encode_all)


def softmax(values: Vector) -> Vector:
    """e^x of each over the sum of all, without overflow."""
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    total = math.fsum(powers)
    return tuple(power / total for power in powers)


def logistic(x: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
