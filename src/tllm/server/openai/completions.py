"""`Completions`: makes a `GenerationJob` of a request.

For `/v1/completions` and `/v1/chat/completions` alike:

1. The model's name and the fields are checked.
2. The prompt becomes token ids (`Prompts`).
3. Each prompt and each of its `n` choices becomes a `Request` to the engine, with a `ReplyChoice` that reads what the
   engine gives for it.
4. The job knows how the reply looks (`reply_format`) and runs when the route asks for a reply or a stream.
"""

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
from tllm.server.openai.reply_format import ChatFormat, CompletionFormat, ReplyFields, ReplyFormat
from tllm.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from tllm.spec.request import Request

_DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's; a chat reply may fill the context


class Completions:
    """Makes jobs for the engine behind `router`, with a model's tokenizer and chat template."""

    def __init__(self, router: RequestRouter, prompts: Prompts, settings: ServerSettings) -> None:
        self._router = router
        self._prompts = prompts
        self._settings = settings
        self.models = (router.client.model_name, *settings.model_aliases)

    async def completion(self, request: CompletionRequest) -> GenerationJob:
        """`/v1/completions`."""
        model = self._check(request)
        prompts = await self._prompts.batch(request.prompt, request.add_special_tokens is not False)
        fields = self._fields(request, request.logprobs is not None)
        echo = bool(request.echo)
        prompt_logprobs = request.logprobs if echo else None
        choices = self._choices(request, prompts, _DEFAULT_MAX_TOKENS, request.logprobs, prompt_logprobs, echo)
        return self._job(request, CompletionFormat(fields), choices, prompts, model, fields)

    async def chat(self, request: ChatRequest) -> GenerationJob:
        """`/v1/chat/completions`."""
        model = self._check(request)
        variables = template_variables(request)
        prompt = await self._prompts.chat(
            request.messages, bool(request.add_special_tokens), bool(request.continue_final_message), variables
        )
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        fields = self._fields(request, logprobs is not None)
        choices = self._choices(request, [prompt], None, logprobs, None, False)
        return self._job(request, ChatFormat(fields), choices, [prompt], model, fields)

    def check_model(self, name: str | None) -> str:
        """The name to answer under; an unknown one is an error."""
        if name is not None and name not in self.models:
            raise unknown_model(name, self.models[0])
        return name or self.models[0]

    def _check(self, request: SamplingFields) -> str:
        """Refuse what cannot be done; gives the model's name."""
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

    def _fields(self, request: SamplingFields, logprobs: bool) -> ReplyFields:
        return ReplyFields(
            tokenizer=self._prompts.tokenizer,
            logprobs=logprobs,
            return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
            return_token_ids=bool(request.return_token_ids),
        )

    def _choices(
        self,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        default_max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        echo: bool,
    ) -> list[ReplyChoice]:
        """A choice for each prompt and each of its `n` replies, with the engine's request for it."""
        tokenizer = self._prompts.tokenizer
        eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        choices: list[ReplyChoice] = []
        for prompt in prompts:
            max_tokens = request.allowed_max_tokens(
                len(prompt.ids), self._router.client.max_model_len, default_max_tokens
            )
            options = ChoiceOptions(
                stops=request.stops,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop_str_in_output=bool(request.include_stop_str_in_output),
                skip_special_tokens=request.skip_special_tokens is not False,
                echo=echo,
                logprobs=logprobs is not None,
                no_tokens=max_tokens == 0,
            )
            text = prompt.text or ""
            if echo and prompt.text is None and tokenizer is not None:
                text = tokenizer.decode(prompt.ids, options.skip_special_tokens)
            for seed in request.seeds():
                params = request.sampling_params(max_tokens, seed, eos_ids, logprobs, prompt_logprobs)
                salt = request.cache_salt or ""
                to_engine = Request(id=uuid.uuid4().hex, prompt_ids=prompt.ids, params=params, cache_salt=salt)
                choices.append(ReplyChoice(len(choices), to_engine, tokenizer, options, text))
        return choices

    def _job(
        self,
        request: SamplingFields,
        reply_format: ReplyFormat,
        choices: Sequence[ReplyChoice],
        prompts: Sequence[Prompt],
        model: str,
        fields: ReplyFields,
    ) -> GenerationJob:
        options = request.stream_options
        return GenerationJob(
            router=self._router,
            reply_format=reply_format,
            choices=choices,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            num_prompts=len(prompts),
            id=f"{reply_format.id_prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            fingerprint=self._settings.fingerprint,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            every_token=fields.logprobs or fields.return_token_ids or fields.tokenizer is None,
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
