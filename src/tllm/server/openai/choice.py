"""One choice of a reply: from the engine's outputs to text, cut at stop strings, with what each token was worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tllm.spec.request import Output, Request, TokenLogprobs
from tllm.text.detokenizer import Detokenizer
from tllm.text.stop_strings import StopFinder
from tllm.text.tokenizer import Tokenizer


@dataclass
class Scored:
    """One token, where its text begins in the choice's text, and its log-probabilities (None where there are none)."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass
class ChoiceProgress:
    """What one output of the engine added to a choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class ChoiceOptions:
    """How a choice's text is made, the same for all choices of a request."""

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the request's own; the model's end tokens are no `stop_reason`
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    logprobs: bool = False
    no_tokens: bool = False  # max_tokens 0: the engine is asked for one token, which is dropped


class ReplyChoice:
    """Reads the outputs of one sequence. `finish_reason` is set when nothing more is wanted."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, options: ChoiceOptions, prompt_text: str = ""
    ) -> None:
        self.index = index
        self.request = request
        self.options = options
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._echo = prompt_text if options.echo else ""
        self._finder = StopFinder(options.stops, options.include_stop)
        self._detokenizer = self._fresh(request.prompt_ids)
        self._length = len(self._echo)
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._begun = False

    def read(self, output: Output) -> ChoiceProgress:
        """What this output adds. Tokens after a stop string are not counted and not shown."""
        step = ChoiceProgress(self.index)
        if output.prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        ready = output.token_ids or output.finish_reason is not None
        if ready and not self._begun:
            self._begin(step)
        if self.options.no_tokens:
            if ready:
                self.finish_reason = step.finish_reason = "length"
            return step
        for place, token_id in enumerate(output.token_ids):
            ends = output.finish_reason == "stop" and place == len(output.token_ids) - 1
            logprobs = output.logprobs[place] if output.logprobs else None
            self._token(step, token_id, logprobs, shown=not ends or self.options.include_stop)
            if self.finish_reason is not None:
                break
            if ends:
                self._stop_reason = token_id if token_id in self.options.stop_token_ids else None
        if self.finish_reason is None and output.finish_reason is not None:
            self._end(step, output.finish_reason)
        step.finish_reason, step.stop_reason = self.finish_reason, self._stop_reason
        return step

    def _begin(self, step: ChoiceProgress) -> None:
        self._begun = True
        if not self.options.echo:
            return
        step.text = self._echo
        step.token_ids = list(self.request.prompt_ids)
        if self.options.logprobs:
            known: Iterable[TokenLogprobs | None] = self._prompt_logprobs or (None,) * len(self.request.prompt_ids)
            step.scored = self._place_prompt(known)

    def _place_prompt(self, logprobs: Iterable[TokenLogprobs | None]) -> list[Scored]:
        walker, length, scored = self._fresh(()), 0, []
        for token_id, one in zip(self.request.prompt_ids, logprobs, strict=True):
            scored.append(Scored(token_id, min(length, len(self._echo)), one))
            length += len(walker.push([token_id])) if walker is not None else 0
        return scored

    def _token(self, step: ChoiceProgress, token_id: int, logprobs: TokenLogprobs | None, shown: bool) -> None:
        self.completion_tokens += 1
        step.token_ids.append(token_id)
        if self.options.logprobs:
            step.scored.append(Scored(token_id, self._length, logprobs))
        if self._detokenizer is None or not shown:
            return
        text = self._detokenizer.push([token_id])
        self._length += len(text)
        if self.completion_tokens <= self.request.params.min_tokens:
            step.text += text  # too early to stop
            return
        step.text += self._finder.push(text)
        self._stopped()

    def _end(self, step: ChoiceProgress, reason: str) -> None:
        if self._detokenizer is not None:
            step.text += self._finder.push(self._detokenizer.finish())
            self._stopped()
            if self.finish_reason is None:
                step.text += self._finder.finish()
        self.finish_reason = self.finish_reason or reason

    def _stopped(self) -> None:
        if self._finder.found is not None:
            self.finish_reason, self._stop_reason = "stop", self._finder.found

    def _fresh(self, prompt_ids: tuple[int, ...]) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, prompt_ids, self.options.skip_special_tokens)
