"""`ReplyChoice`: one choice of a reply, from the engine's outputs to text that is cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tllm.server.admission.account import Charge
from tllm.server.reply.events import ReplyEvent
from tllm.server.reply.parser_choice import ReplyParser
from tllm.spec.request import Output, Request, TokenLogprobs
from tllm.text.detokenizer import Detokenizer
from tllm.text.stop_strings import StopFinder
from tllm.text.tokenizer import Tokenizer


@dataclass
class ScoredToken:
    """One token, where its text begins in the choice's text, and its log-probabilities (None where there are none).

    `num_events`: how many events of its progress there were when it had been read.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None
    num_events: int = 0


@dataclass
class ChoiceProgress:
    """What one output of the engine added to a choice. `events` are what its text is, where somebody parses it."""

    index: int
    text: str = ""
    events: list[ReplyEvent] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class ChoiceOptions:
    """How a choice's text is made, the same for all choices of a request; the names are the API's."""

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the request's own; the model's end tokens are no `stop_reason`
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    logprobs: bool = False
    no_tokens: bool = False  # max_tokens is 0: the engine is asked for one token, which is dropped
    new_parser: Callable[[], ReplyParser] | None = None  # of one reply's text; None leaves it as it is


class PromptEcho:
    """The prompt's text at the beginning of a choice, with log-probabilities where they were asked for."""

    def __init__(
        self, prompt_ids: tuple[int, ...], text: str, tokenizer: Tokenizer | None, skip_special_tokens: bool
    ) -> None:
        self.prompt_ids = prompt_ids
        self.text = text
        self.logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def scored(self) -> list[ScoredToken]:
        """The prompt's tokens, each with the place in the text where it begins."""
        walker = None if self._tokenizer is None else Detokenizer(self._tokenizer, (), self._skip_special_tokens)
        length, scored = 0, []
        logprobs = self.logprobs or (None,) * len(self.prompt_ids)
        for token_id, of_token in zip(self.prompt_ids, logprobs, strict=True):
            scored.append(ScoredToken(token_id, min(length, len(self.text)), of_token))
            length += len(walker.push([token_id])) if walker is not None else 0
        return scored


class ReplyChoice:
    """Reads the outputs of one sequence. `finish_reason` is set when nothing more is wanted."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, options: ChoiceOptions, prompt_text: str = ""
    ) -> None:
        self.index = index
        self.request = request
        self.options = options
        self.completion_tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        skip = options.skip_special_tokens
        self._echo = PromptEcho(request.prompt_ids, prompt_text, tokenizer, skip) if options.echo else None
        self._stop_finder = StopFinder(options.stops, options.include_stop_str_in_output)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.prompt_ids, skip)
        self._length = len(prompt_text) if options.echo else 0  # of the text so far
        self._parser = None if options.new_parser is None else options.new_parser()

    @property
    def has_begun(self) -> bool:
        """Whether anything was generated."""
        return bool(self.completion_tokens) or self.finish_reason is not None

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens are of the model's reasoning."""
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def read(self, output: Output) -> ChoiceProgress:
        """What this output adds. Tokens after a stop string are not counted and not shown."""
        progress = ChoiceProgress(self.index)
        if not self.completion_tokens:  # a reply that another process goes on with would tell of it once more
            self.cached_tokens += output.cached_tokens
        progress.prompt_logprobs = output.prompt_logprobs
        if self._echo is not None and output.prompt_logprobs:
            top = self.request.params.logprobs
            self._echo.logprobs = tuple(None if one is None else one.cut(top) for one in output.prompt_logprobs)
        is_ready = output.token_ids or output.finish_reason is not None
        if is_ready and self._echo is not None:
            self._add_prompt(progress, self._echo)
            self._echo = None
        if self.options.no_tokens:
            if is_ready:
                self.finish_reason = progress.finish_reason = "length"
                self._parse(progress, 0)
            return progress
        for place, token_id in enumerate(output.token_ids):
            is_last = output.finish_reason == "stop" and place == len(output.token_ids) - 1
            is_stop = is_last and self._is_end_token(token_id)
            logprobs = output.logprobs[place] if output.logprobs else None
            is_shown = not is_stop or self.options.include_stop_str_in_output
            length = len(progress.text)
            self._add_token(progress, token_id, logprobs, is_shown)
            self._parse(progress, length, 1)
            if progress.scored:
                progress.scored[-1].num_events = len(progress.events)
            if self.finish_reason is not None:
                break
            if is_stop:
                self._stop_reason = token_id if token_id in self.options.stop_token_ids else None
        if self.finish_reason is None and output.finish_reason is not None:
            length = len(progress.text)
            self._finish(progress, output.finish_reason)
            self._parse(progress, length)
        progress.finish_reason, progress.stop_reason = self.finish_reason, self._stop_reason
        return progress

    def _is_end_token(self, token_id: int) -> bool:
        """Whether the last token is there to end the reply. A grammar's reply may end with a token of its text."""
        params = self.request.params
        return params.grammar is None or token_id in params.stop_token_ids

    def _parse(self, progress: ChoiceProgress, start: int, tokens: int = 0) -> None:
        """The events of the text since `start`, which so many tokens added, and of the end if this is it."""
        if self._parser is None:
            return
        progress.events += self._parser.push(progress.text[start:], tokens)
        if self.finish_reason is not None:
            progress.events += self._parser.finish(self.finish_reason, self._stop_reason)

    def _add_prompt(self, progress: ChoiceProgress, echo: PromptEcho) -> None:
        progress.text = echo.text
        progress.token_ids = list(self.request.prompt_ids)
        if self.options.logprobs:
            progress.scored = echo.scored()

    def _add_token(
        self, progress: ChoiceProgress, token_id: int, logprobs: TokenLogprobs | None, is_shown: bool
    ) -> None:
        self.completion_tokens += 1
        progress.token_ids.append(token_id)
        if self.options.logprobs:
            progress.scored.append(ScoredToken(token_id, self._length, logprobs))
        if self._detokenizer is None or not is_shown:
            return
        text = self._detokenizer.push([token_id])
        self._length += len(text)
        self._add_text(progress, text)

    def _finish(self, progress: ChoiceProgress, reason: str) -> None:
        if self._detokenizer is not None:
            self._add_text(progress, self._detokenizer.finish())
            if self.finish_reason is None:
                progress.text += self._stop_finder.finish()
        self.finish_reason = self.finish_reason or reason

    def _add_text(self, progress: ChoiceProgress, text: str) -> None:
        """Text of the last token, which may end the reply where a stop string ends in it, after `min_tokens`."""
        is_early = self.completion_tokens <= self.request.params.min_tokens
        progress.text += self._stop_finder.push(text, is_early)
        if self._stop_finder.found is not None:
            self.finish_reason, self._stop_reason = "stop", self._stop_finder.found


def charge_choices(charge: Charge, choices: Sequence[ReplyChoice], cached: int) -> None:
    """Charge what has been computed so far of a request's choices, `cached` of whose prompts was not."""
    if any(choice.has_begun for choice in choices):
        charge.use(sum(choice.completion_tokens for choice in choices), cached)
