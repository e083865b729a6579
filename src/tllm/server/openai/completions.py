"""`Completions`: makes a `GenerationJob` of a request.

For `/v1/completions` and `/v1/chat/completions` alike:

1. The model's name and the fields are checked.
2. The prompt becomes token ids (`Prompts`).
3. Each prompt and each of its `n` choices becomes a `Request` to the engine, with a `ReplyChoice` that reads what the
   engine gives for it.
4. The job knows how the reply looks (`reply_format`) and runs when the route asks for a reply or a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tllm.core.errors import RequestError
from tllm.server.http.caller import Caller
from tllm.server.http.errors import HttpError, unknown_model
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.choice import ChoiceOptions, ReplyChoice
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.lora_adapters import ServedAdapters
from tllm.server.openai.prompts import Prompt, Prompts, count_prompts
from tllm.server.openai.reply_format import ChatFormat, CompletionFormat, ReplyFields, ReplyFormat
from tllm.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from tllm.server.openai.structured_output import asked_grammar
from tllm.server.openai.tools import OfferedTools
from tllm.server.reply.call_grammars import HARMONY
from tllm.server.reply.held_calls import AskedForm, HeldCalls
from tllm.server.reply.parser_choice import ReplyParser, ReplyParsers, held_to
from tllm.server.reply.reasoning import is_message_open
from tllm.server.reply.reply_ids import ReplyIds
from tllm.server.reply.tool_formats import ToolFormat, plain_reply
from tllm.spec.request import Grammar, Request, Scheduling
from tllm.text.grammar import check_grammar


@dataclass(frozen=True)
class ReplyForm:
    """What holds replies to a form, and who reads them; neither for plain text. `echo`: they begin with the prompt."""

    grammar: Grammar | None = None
    new_parser: Callable[[], ReplyParser] | None = None
    show_special_tokens: bool = False
    echo: bool = False


class Completions:
    """Makes jobs for the engine behind `router`, with a model's tokenizer and chat template.

    `parsers` read what the model says in a chat.
    """

    def __init__(
        self,
        router: RequestRouter,
        prompts: Prompts,
        settings: ServerSettings,
        parsers: ReplyParsers,
        adapters: ServedAdapters,
    ) -> None:
        self._router = router
        self._prompts = prompts
        self._settings = settings
        self.parsers = parsers
        self._held_calls: HeldCalls | None = None
        if prompts.tokenizer is not None and (parsers.tools or parsers.is_harmony):
            self._held_calls = HeldCalls(prompts.tokenizer, HARMONY if parsers.is_harmony else parsers.tools)
        self.adapters = adapters
        self._names = tuple(dict.fromkeys((router.client.model_name, *settings.model_aliases)))

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may give: the model's own, and those of adapters."""
        return (*self._names, *self.adapters.paths)

    async def completion(
        self, request: CompletionRequest, caller: Caller, ids: ReplyIds | None = None
    ) -> GenerationJob:
        """`/v1/completions`. With the `ids` of an earlier reply to the same request, that reply's job."""
        ids = ids or ReplyIds()
        scheduling = self._checked_caller(request, caller, ids)
        # Before there is work on them: a body has room for millions of prompts.
        self._router.check_count(count_prompts(request.prompt) * (request.n or 1))
        prompts = await self._prompts.batch(request.prompt, request.add_special_tokens is not False)
        fields = self._fields(request, request.logprobs is not None)
        logprobs = (request.logprobs, request.logprobs if request.echo else None)
        asked = asked_grammar(request)
        form = ReplyForm(None if asked is None else await self._checked(*asked), echo=bool(request.echo))
        choices = self._choices(request, prompts, logprobs, form, (ids, scheduling))
        return self._job(request, CompletionFormat(fields), choices, prompts, caller, ids)

    async def chat(self, request: ChatRequest, caller: Caller, ids: ReplyIds | None = None) -> GenerationJob:
        """`/v1/chat/completions`. With the `ids` of an earlier reply to the same request, that reply's job."""
        ids = ids or ReplyIds()
        scheduling = self._checked_caller(request, caller, ids)
        tools = OfferedTools(request.tools, request.tool_choice, request.parallel_tool_calls)
        prompt = await self._chat_prompt(request, tools, ids.created)
        form = await self._chat_form(request, tools, prompt.text or "", ids)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        fields = self._fields(request, logprobs is not None)
        choices = self._choices(request, [prompt], (logprobs, None), form, (ids, scheduling))
        return self._job(request, ChatFormat(fields), choices, [prompt], caller, ids)

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of a chat has."""
        self._check(request)
        tools = OfferedTools(request.tools, request.tool_choice, request.parallel_tool_calls)
        return len((await self._chat_prompt(request, tools, int(time.time()))).ids)

    async def _chat_prompt(self, request: ChatRequest, tools: OfferedTools, created: int) -> Prompt:
        """The prompt, in which a template that writes the date writes that of `created`."""
        return await self._prompts.chat(
            request.messages,
            bool(request.add_special_tokens),
            bool(request.continue_final_message),
            {"strftime_now": datetime.fromtimestamp(created).strftime, **template_variables(request)},
            tools.for_template(),
        )

    async def _chat_form(self, request: ChatRequest, tools: OfferedTools, prompt: str, ids: ReplyIds) -> ReplyForm:
        """How replies to a chat are held, and read."""
        if tools.tools and not tools.is_held and not self.parsers.tools:
            raise RequestError(
                "this model's chat template shows no format of calls, so its replies would not be read as calls",
                f"{request.held_calls_hint}start the server with --tool-call-parser NAME",
                "tools",
            )
        grammar, reply = await self._held(asked_grammar(request), tools, prompt)
        parsers, schemas = self.parsers, tools.schemas

        def new_parser() -> ReplyParser:
            parser = parsers.parser(prompt, reply, schemas)
            parser.max_calls = None if tools.is_parallel else 1
            parser.new_id = ids.new
            return parser

        shows = parsers.needs_special_tokens and (parsers.is_harmony or parsers.reasoning == "mistral")
        return ReplyForm(grammar, new_parser, shows or (parsers.needs_special_tokens and bool(tools.tools)))

    async def _held(
        self, form: AskedForm | None, tools: OfferedTools, prompt: str
    ) -> tuple[Grammar | None, ToolFormat | None]:
        """What holds a reply to this prompt, and who reads it: None for the format of this model.

        A reply that has to call has no text that could have the form. One that goes on with a message that the prompt
        has begun is text alone.
        """
        free = self.parsers.free_part(prompt)
        if form is not None:
            await self._checked(*form)
        if (calls := tools.grammar()) is not None:
            return await self._checked(held_to(calls, free), "tools"), tools.reply()
        if form is not None and self.parsers.is_harmony and is_message_open(prompt):
            return form.grammar, plain_reply
        may_call = bool(tools.tools)
        if self._held_calls is not None and (may_call or (form is not None and self.parsers.is_harmony)):
            grammar = await self._held_calls.grammar(tools.held, tools.is_parallel, free, form)
            if grammar is not None or form is None:
                return grammar, None if form is None else self.parsers.form_reader(may_call)
        return (None, None) if form is None else (held_to(form.grammar, free), plain_reply)

    async def _checked(self, grammar: Grammar, param: str) -> Grammar:
        """The grammar, if it can be followed; this takes some milliseconds, aside from the event loop."""
        if self._prompts.tokenizer is None:
            raise RequestError(f"{param} needs a tokenizer and this model's folder has none", "leave it out", param)
        await asyncio.to_thread(check_grammar, grammar, param)
        return grammar

    def check_model(self, name: str | None, is_again: bool = False) -> str:
        """The name to answer under; an unknown one is an error, but of a reply that is only read again: its adapter may
        have been unloaded meanwhile."""
        if name is not None and not is_again and name not in self.models:
            raise unknown_model(name, self.models)
        return name or self._names[0]

    def lora_of(self, name: str | None) -> str:
        """What `Request.lora` is for a model's name, looked up when its requests are made: one that was unloaded while
        their prompts were encoded is unknown, and not the model alone."""
        return self.adapters.id_of(self.check_model(name))

    def _check(self, request: SamplingFields, is_again: bool = False) -> None:
        """Refuse what cannot be done."""
        self.check_model(request.model, is_again)
        request.check(self._settings.limits)
        if request.stops and self._prompts.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer and this model's folder has none", "use stop_token_ids", "stop"
            )

    def _checked_caller(self, request: SamplingFields, caller: Caller, ids: ReplyIds) -> Scheduling:
        """Refuse what cannot be done, or not now for this key, before there is work on it; else when it begins."""
        self._check(request, ids.is_again)
        if not ids.is_again:
            self._router.check(caller.account, 0, request.asked_tokens or self._router.client.max_model_len)
        return caller.scheduling(request.priority, self._settings)

    def _fields(self, request: SamplingFields, logprobs: bool) -> ReplyFields:
        return ReplyFields(
            tokenizer=self._prompts.tokenizer,
            logprobs=logprobs,
            return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
            return_token_ids=bool(request.return_token_ids),
            prompt_logprobs=request.prompt_logprobs,
        )

    def _choices(
        self,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        logprobs: tuple[int | None, int | None],
        form: ReplyForm,
        called: tuple[ReplyIds, Scheduling],
    ) -> list[ReplyChoice]:
        """A choice for each prompt and each of its `n` replies, with the engine's request for it.

        `logprobs`: how many are wanted of each token of the replies, and of prompts that are echoed.
        """
        tokenizer, (ids, scheduling) = self._prompts.tokenizer, called
        defaults = self._settings.generation_config
        request.fill_from(defaults)
        eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        lora = "" if ids.is_again else self.lora_of(request.model)
        choices: list[ReplyChoice] = []
        for prompt in prompts:
            self._check_length(prompt)
            max_tokens = request.allowed_max_tokens(
                len(prompt.ids), self._router.client.max_model_len, defaults.max_new_tokens
            )
            options = ChoiceOptions(
                stops=request.stops,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop_str_in_output=bool(request.include_stop_str_in_output),
                skip_special_tokens=request.skip_special_tokens is not False and not form.show_special_tokens,
                echo=form.echo,
                logprobs=logprobs[0] is not None,
                no_tokens=max_tokens == 0,
                new_parser=form.new_parser,
            )
            text = prompt.text or ""
            if form.echo and prompt.text is None and tokenizer is not None:
                text = tokenizer.decode(prompt.ids, options.skip_special_tokens)
            for seed in request.seeds():
                params = request.sampling_params(max_tokens, seed, eos_ids, *logprobs, form.grammar)
                to_engine = Request(
                    id=ids.request(len(choices)),
                    prompt_ids=prompt.ids,
                    params=params,
                    cache_salt=request.cache_salt or "",
                    lora=lora,
                    scheduling=scheduling,
                )
                choices.append(ReplyChoice(len(choices), to_engine, tokenizer, options, text))
        return choices

    def _check_length(self, prompt: Prompt) -> None:
        most = self._settings.limits.max_input_tokens
        if most and len(prompt.ids) > most:
            message = f"the prompt has {len(prompt.ids)} tokens, at most {most} are taken (shorten it)"
            raise HttpError(400, message, code="prompt_too_long", param="prompt")

    def _job(
        self,
        request: SamplingFields,
        reply_format: ReplyFormat,
        choices: Sequence[ReplyChoice],
        prompts: Sequence[Prompt],
        caller: Caller,
        ids: ReplyIds,
    ) -> GenerationJob:
        options, fields = request.stream_options, reply_format.fields
        return GenerationJob(
            router=self._router,
            account=caller.account,
            reply_format=reply_format,
            choices=choices,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            num_prompts=len(prompts),
            ids=ids,
            model=self.check_model(request.model, ids.is_again),
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
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    return variables
