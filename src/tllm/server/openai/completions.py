"""One completion request, or one chat request, as a `GenerationJob`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tllm.core.errors import RequestError
from tllm.server.http.errors import unknown_model
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.choice import ChoiceOptions, ReplyChoice
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.prompts import Prompt, Prompts
from tllm.server.openai.reply_format import ChatShape, CompletionShape, Shape, Shown
from tllm.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from tllm.server.openai.sampling import budget, sampling_params, seeds
from tllm.spec.request import Request

_COMPLETION_TOKENS = 16  # OpenAI's default


class Completions:
    """Makes jobs: prompts to ids, fields to sampling parameters, one `ReplyChoice` for each prompt and n."""

    def __init__(self, router: RequestRouter, prompts: Prompts, settings: ServerSettings) -> None:
        self._router = router
        self._prompts = prompts
        self._settings = settings
        self.models = (router.client.model_name, *settings.model_aliases)

    async def completion(self, request: CompletionRequest) -> GenerationJob:
        """`/v1/completions`."""
        model = self._begin(request)
        prompts = await self._prompts.batch(request.prompt, request.add_special_tokens is not False)
        shown = self._shown(request, request.logprobs is not None)
        echoed = request.logprobs if request.echo else None
        choices = self._choices(request, prompts, _COMPLETION_TOKENS, request.logprobs, echoed, bool(request.echo))
        return self._job(request, CompletionShape(shown), choices, prompts, model, shown)

    async def chat(self, request: ChatRequest) -> GenerationJob:
        """`/v1/chat/completions`."""
        model = self._begin(request)
        variables = template_variables(request)
        prompt = await self._prompts.chat(
            request.messages, bool(request.add_special_tokens), bool(request.continue_final_message), variables
        )
        top = (request.top_logprobs or 0) if request.logprobs else None
        shown = self._shown(request, top is not None)
        choices = self._choices(request, [prompt], None, top, None, False)
        return self._job(request, ChatShape(shown), choices, [prompt], model, shown)

    def check_model(self, name: str | None) -> str:
        """The name to answer under; an unknown one is an error."""
        if name is not None and name not in self.models:
            raise unknown_model(name, self.models[0])
        return name or self.models[0]

    def _begin(self, request: SamplingFields) -> str:
        model = self.check_model(request.model)
        request.check()
        if request.stops:
            self._prompts_need_text()
        return model

    def _prompts_need_text(self) -> None:
        if self._prompts.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer and this model's folder has none", "use stop_token_ids", "stop"
            )

    def _shown(self, request: SamplingFields, logprobs: bool) -> Shown:
        return Shown(
            tokenizer=self._prompts.tokenizer,
            logprobs=logprobs,
            labels_as_ids=bool(request.return_tokens_as_token_ids),
            token_ids=bool(request.return_token_ids),
        )

    def _choices(
        self,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        default_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        echo: bool,
    ) -> list[ReplyChoice]:
        tokenizer = self._prompts.tokenizer
        count = request.n or 1
        made: list[ReplyChoice] = []
        for prompt in prompts:
            tokens = budget(request, len(prompt.ids), self._router.client.max_model_len, default_tokens)
            options = ChoiceOptions(
                stops=request.stops,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop=bool(request.include_stop_str_in_output),
                skip_special_tokens=request.skip_special_tokens is not False,
                echo=echo,
                logprobs=logprobs is not None,
                no_tokens=tokens == 0,
            )
            text = prompt.text or ""
            if echo and prompt.text is None and tokenizer is not None:
                text = tokenizer.decode(prompt.ids, options.skip_special_tokens)
            eos = tokenizer.eos_ids if tokenizer is not None else ()
            for seed in seeds(request, count):
                params = sampling_params(request, tokens, seed, eos, logprobs, prompt_logprobs)
                whole = Request(id=uuid.uuid4().hex, prompt_ids=prompt.ids, params=params)
                made.append(ReplyChoice(len(made), whole, tokenizer, options, text))
        return made

    def _job(
        self,
        request: SamplingFields,
        shape: Shape,
        choices: Sequence[ReplyChoice],
        prompts: Sequence[Prompt],
        model: str,
        shown: Shown,
    ) -> GenerationJob:
        wanted = request.stream_options
        return GenerationJob(
            router=self._router,
            shape=shape,
            choices=choices,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            fingerprint=self._settings.fingerprint,
            final_usage=bool(wanted and wanted.include_usage),
            running_usage=bool(wanted and wanted.include_usage and wanted.continuous_usage_stats),
            every_token=shown.logprobs or shown.token_ids or shown.tokenizer is None,
        )


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """What a request adds for its template to see."""
    variables = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    return variables
