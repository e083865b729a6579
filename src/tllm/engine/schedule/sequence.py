"""`Sequence`: a request inside the engine, with its tokens and how far they are computed. Plain Python, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tllm.core.errors import NonFiniteError
from tllm.engine.pages.page_table import Run
from tllm.engine.schedule.batch import PLAIN_GREEDY, BatchEntry, Sampling
from tllm.engine.schedule.grammar_state import GrammarState
from tllm.engine.schedule.prompt_values import PromptValues
from tllm.spec.request import FinishReason, Request

NO_NUMBERS = NonFiniteError(
    "the model comes to no finite numbers for this text, so that neither a token nor a value follows",
    "serve it in a wider dtype, bfloat16 or float32; if every prompt ends so, look at its weights",
)


class SequenceState(Enum):
    """Where a sequence is: in the queue, with a place and pages, or gone."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass
class PrefixRecord:
    """What the prefix cache notes of one sequence.

    `names` are those of its full pages, as far as they were needed. Others can find its first `num_added` pages. After
    the first `num_proven` tokens that are in pages now the model came to numbers.
    `found` is how many of its tokens were found when it first began, None before that; `from_disk` of them were read
    from disk. `is_sought`: what disk has of it was sought, since it came or last ran. `is_doubtful`: its pages may hold
    what are no numbers.
    """

    names: list[bytes]
    num_added: int = 0
    num_proven: int = 0
    found: int | None = None
    from_disk: int = 0
    is_sought: bool = False
    is_doubtful: bool = False


class Sequence:
    """A request inside the engine: its tokens, how many of them are computed, and what is under way.

    `token_ids` are prompt and output. The keys and values of the first `computed` of them are in the cache of every
    stage; those of the first `scheduled` are there or in a batch under way. `in_flight` counts the batches that hold
    some. `stop_ids` are the tokens that end it, `grammar` what holds its reply to a form. While it runs, `state_slot`
    is its own where layers have states. `prompt` is what is gathered of the prompt beside its keys and values.
    """

    def __init__(self, key: int, request: Request, eos_ids: tuple[int, ...] = ()) -> None:
        self.key = key
        self.grammar: GrammarState | None = None
        self.request = request
        self.stop_ids = (*(() if request.params.ignore_eos else eos_ids), *request.params.stop_token_ids)
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0
        self.state = SequenceState.WAITING
        self.state_slot = 0
        self.prefix = PrefixRecord([])
        self.prompt = PromptValues(request)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens that no batch holds yet."""
        return len(self.token_ids) - self.scheduled

    @property
    def num_output(self) -> int:
        """Tokens given out."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def max_cached_tokens(self) -> int:
        """The most slots it can come to need: the last token is given out and never computed."""
        return self.prompt_length + self.request.params.max_tokens - 1

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that a batch may check now.

        One more token is sampled beside them, and stop ids are banned for all of these tokens or for none.
        """
        left = self.request.params.max_tokens - self.num_output - 1
        before_min = self.request.params.min_tokens - self.num_output - 1
        return min(left, before_min) if before_min >= 0 else left

    @property
    def fault(self) -> str:
        """Why it ends with an error: something went wrong in its grammar, or else the model's numbers are none."""
        return (self.grammar.fault if self.grammar is not None else "") or str(NO_NUMBERS)

    def sampling(self) -> Sampling:
        """How its next token is sampled."""
        params = self.request.params
        is_early = params.min_tokens > 0 and self.num_output < params.min_tokens
        banned = self.stop_ids if is_early and self.grammar is None else ()
        is_altered = params.penalised or bool(params.logit_bias) or bool(banned)
        if params.temperature == 0 and not is_altered and params.logprobs is None:
            return PLAIN_GREEDY
        return Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            banned=banned,
            history=tuple(self.token_ids) if params.penalised else (),
            prompt_length=self.prompt_length if params.penalised else 0,
            logprobs=params.logprobs,
            tempered_logprobs=params.tempered_logprobs and params.temperature > 0,
        )

    def batch_entry(self, count: int, page_table: tuple[Run, ...], draft_tokens: list[int] | None = None) -> BatchEntry:
        """Its part of a batch: its next `count` tokens that are not scheduled, and these draft tokens after them.

        The next token may be one that is still under way (`step_after`).
        """
        start, stop, draft_tokens = self.scheduled, self.scheduled + count, draft_tokens or []
        targets: tuple[int, ...] = ()
        if self.prompt.logprobs is not None:
            targets = tuple(self.token_ids[start + 1 : min(stop + 1, self.prompt_length)])
        return BatchEntry(
            key=self.key,
            start=start,
            count=count + len(draft_tokens),
            prompt_length=self.prompt_length,
            page_table=page_table,
            sampling=self.sampling() if stop >= len(self.token_ids) and not self.request.pooling else None,
            targets=targets,
            prompt_top=(self.request.params.prompt_logprobs or 0) if targets else 0,
            num_draft_tokens=len(draft_tokens),
            state_slot=self.state_slot,
            masks=self._masks(draft_tokens) if stop >= len(self.token_ids) else (),
            lora=self.request.lora,
            pooling=self.prompt.pooling_of(stop),
            trace=self.request.trace,
        )

    def _masks(self, draft_tokens: list[int]) -> tuple[bytes, ...]:
        """What its grammar allows for the tokens that are sampled next, without ends that are not wanted yet."""
        if self.grammar is None:
            return ()
        params = self.request.params
        early = self.stop_ids if self.num_output < params.min_tokens else ()
        return self.grammar.masks(draft_tokens, early, params.ignore_eos)

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next token; says why the sequence ends with it, if it does."""
        self.prefix.num_proven = len(self.token_ids)
        self.token_ids.append(token_id)
        if self.grammar is not None and self.grammar.advance(token_id):
            return "error" if self.grammar.fault else "stop"
        count, params = self.num_output, self.request.params
        if token_id in self.stop_ids and count > params.min_tokens:
            return "stop"
        return "length" if count >= params.max_tokens else None

    def end_pooled(self, values: tuple[float, ...]) -> FinishReason:
        """Why it ends with the values that its prompt has come to."""
        if not all(map(math.isfinite, values)):
            return self.fail()
        self.prefix.num_proven = len(self.token_ids)
        return "stop"

    def fail(self) -> FinishReason:
        """The model's numbers for it are none: it ends, and what it has computed is not to be trusted."""
        self.prefix.is_doubtful = True
        return "error"

    @property
    def num_sound_tokens(self) -> int:
        """Tokens whose keys and values are in the cache, or will be before any batch that is made from now on.

        Draft tokens under way are not among them, nor those that were accepted after one that ended the sequence.
        """
        return min(self.scheduled, len(self.token_ids))

    def begin(self, found: int) -> None:
        """Run, with so many tokens that need no computing."""
        self.computed = self.scheduled = found
        self.prefix.num_proven = 0
        self.state = SequenceState.RUNNING

    def restart(self) -> None:
        """Forget what is computed: its pages go to another. Tokens under way may still arrive."""
        self.computed = self.scheduled = 0
        self.prompt.sums.clear()
        self.state = SequenceState.WAITING
