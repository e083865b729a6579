"""What a server is asked for, and the batches into which the engine's scheduler cuts it for a ring of stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cost.cache_room import MAX_NUM_BATCHED_TOKENS, PAGE_SIZE
from tllm.planner.cost.rank_bytes import ITEM_BYTES, check_dtype
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.cache_form import check_kv_cache_dtype

SMALLEST_CHUNK = 128
"""Tokens that a batch of prompts has at least where there are several stages."""


@dataclass(frozen=True)
class ServingFacts:
    """The requests that a plan is chosen for, all of which come at once, and the numbers that it is served in."""

    dtype: str
    prompt: int = 512
    """Tokens of each prompt."""
    reply: int = 128
    """Tokens of each reply."""
    concurrency: int = 1
    """Requests at once."""
    weight_bits: float | None = None
    """Bits that every weight is taken to have, whatever the model's config says (`--weight-bits`)."""
    message_bits: float | None = None
    """Bits of a number in a message between ranks, where messages are compressed below `dtype`."""
    num_speculative_tokens: int = 0
    """Draft tokens of each sequence that a decode step may check beside its next token."""
    acceptance: float = 0.0
    """Probability that a draft token is right if those before it were."""
    kv_cache_dtype: str = "auto"
    """How keys and values are held: `auto` (as `dtype`), or in one byte each (`spec.quantized.cache_form`)."""
    draft_model: ModelSpec | None = None
    """The model that drafts on the first rank's device; None where drafts are looked up, which takes no time."""
    max_model_len: int | None = None
    """Tokens of the longest sequence; None for as many as by default (`context_of`)."""
    max_num_seqs: int | None = None
    """Sequences that an engine computes at once at the most, with room to work with them all; None for as many as there
    are requests, and room for their tokens alone."""
    whole_prompts: bool = False
    """Whether all of a prompt is computed in one batch, as its tokens see those after them."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_kv_cache_dtype(self.kv_cache_dtype)
        for name in ("prompt", "reply", "concurrency"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of 1 or more")
        if not 0 <= self.acceptance <= 1:
            raise PlanError(f"acceptance is {self.acceptance}", "give a probability, 0 to 1")
        if not 0 <= self.num_speculative_tokens < MAX_NUM_BATCHED_TOKENS:
            raise PlanError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and a batch has {MAX_NUM_BATCHED_TOKENS}",
                "4 to 16 are usual; 0 for none",
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of an activation, and of a key's or value's number where the cache has the model's dtype."""
        return ITEM_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in plain numbers, or in the bits that are asked for."""
        return self.item_bytes if self.weight_bits is None else self.weight_bits / 8

    @property
    def has_few_bits(self) -> bool:
        """Whether weights are taken to have fewer bits than plain numbers."""
        return self.weight_bits is not None and self.weight_bits < 16

    @property
    def message_bytes(self) -> float:
        """Bytes of a number in a message."""
        return self.item_bytes if self.message_bits is None else self.message_bits / 8

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are cached at most, in whole pages."""
        return self.concurrency * -(-(self.prompt + self.reply) // PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True)
class SamplingFacts:
    """Completions that the ranks of a training run sample between two steps, with the weights that they train."""

    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion."""
    groups: int
    """Prompts of a step, over all replicas."""
    num_generations: int
    """Completions of each prompt, which is computed once for all of them."""
    at_once: int
    """Completions that a replica computes at once, for which its KV cache has room."""
    context: int
    """Tokens that each of them has room for, its prompt included."""
    one_by_one: bool = False
    """Whether the groups of prompts are sampled one after another (`deterministic`)."""
    share: float = 1.0
    """Of the steps, those before which completions are sampled; 0 where only evaluations sample some."""
    servers: tuple[int, ...] = ()
    """Devices that sample and do not train; left out, the ranks sample."""
    plan: Plan | None = None
    """By which so many of these devices in a row divide one model; left out, each has a whole one."""
    ahead: int = 0
    """Steps by which these are ahead of the ranks (`max_staleness`); 0: the ranks wait for them."""

    @property
    def teams(self) -> list[tuple[int, ...]]:
        """The `servers`, by those that have one model together."""
        size = 1 if self.plan is None else self.plan.world_size
        return [self.servers[at : at + size] for at in range(0, len(self.servers), size)]

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values a replica has room for, in whole pages."""
        return self.at_once * -(-self.context // PAGE_SIZE) * PAGE_SIZE

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch at most."""
        return max(MAX_NUM_BATCHED_TOKENS, 2 * self.at_once)


@dataclass(frozen=True)
class ExpectedBatch:
    """A batch on an average; its numbers need not be whole."""

    tokens: float
    sequences: float
    keys: float
    """Keys that each token attends to."""
    rows: float
    """Tokens that logits are computed for."""
    after_idle: bool = False
    """Whether a stage has nothing to do until the batch comes."""
    draft_steps: int = 0
    """Steps of a draft model that the first rank takes before the batch."""


class RingSeconds(NamedTuple):
    """One batch through all stages of the ring, in seconds: in sum, and on the stage or wire that takes longest."""

    total: float
    slowest: float


@dataclass(frozen=True)
class ServingLoad:
    """What goes through a ring of `stages` stages: `chunks` batches of prompts (prefill), then decode steps.

    In a decode step each of the `batches` in flight goes round the ring once. It gives each request one token, and of
    the `draft_tokens` that it checks (speculative decoding) as many as are right, from the first on.
    """

    stages: int
    facts: ServingFacts
    draft_tokens: int = 0

    @cached_property
    def batches(self) -> int:
        """Batches in flight: one for each stage, if there are as many requests."""
        return min(self.stages, self.facts.concurrency)

    @cached_property
    def chunks(self) -> int:
        """Batches in which all prompts are computed, as `engine.schedule.scheduler` cuts them."""
        tokens = self.facts.concurrency * self.facts.prompt
        most = MAX_NUM_BATCHED_TOKENS
        if self.facts.whole_prompts:
            most = max(most, self.facts.max_model_len or 0)
            return -(-self.facts.concurrency // max(1, most // self.facts.prompt))
        if self.stages > 1:
            most = min(most, max(SMALLEST_CHUNK, -(-tokens // (2 * self.stages))))
        return -(-tokens // most)

    @cached_property
    def prefill(self) -> ExpectedBatch:
        """One chunk of prompts."""
        tokens = self.facts.concurrency * self.facts.prompt / self.chunks
        sequences = max(1.0, tokens / self.facts.prompt)
        keys = self.facts.prompt if self.facts.whole_prompts else (self.facts.prompt + 1) / 2
        return ExpectedBatch(tokens, sequences, keys, sequences)

    @cached_property
    def decode(self) -> ExpectedBatch:
        """One batch in the middle of its replies."""
        sequences = -(-self.facts.concurrency // self.batches)
        rows = sequences * (1 + self.draft_tokens)
        keys = self.facts.prompt + self.facts.reply / 2
        steps = 0 if self.facts.draft_model is None else self.draft_tokens
        return ExpectedBatch(rows, sequences, keys, rows, self.batches < self.stages, steps)

    @cached_property
    def tokens_per_step(self) -> float:
        """Expected tokens that a request gets in a decode step: 1 + a + a^2 + … for an acceptance rate of a
        (Leviathan et al., 2211.17192, equation 1)."""
        return sum(self.facts.acceptance**count for count in range(1 + self.draft_tokens))

    @property
    def rows_per_token(self) -> float:
        """Rows that go round the ring for each token that a request gets."""
        return (1 + self.draft_tokens) / self.tokens_per_step

    def prompt_seconds(self, total: float, slowest: float, requests: float | None = None) -> float:
        """Seconds until the prompts of all requests, or of the first `requests` of them, are computed.

        `total` and `slowest` are of one chunk (`RingSeconds`). Chunks follow one another through the stages.
        """
        share = 1.0 if requests is None else requests / self.facts.concurrency
        return total + max(0.0, share * self.chunks - 1) * max(slowest, total / self.stages)

    def step_seconds(self, total: float, slowest: float) -> float:
        """Seconds of a decode step of all batches in flight; `total` and `slowest` are of one batch."""
        return max(total, self.batches * slowest)

    def seconds_per_token(self, total: float, slowest: float) -> float:
        """Mean seconds from one token of a request to its next."""
        return self.step_seconds(total, slowest) / self.tokens_per_step

    def total_seconds(self, prefill: RingSeconds, decode: RingSeconds) -> float:
        """Seconds until all requests have their replies."""
        return self.prompt_seconds(*prefill) + (self.facts.reply - 1) * self.seconds_per_token(*decode)


def loads(stages: int, facts: ServingFacts) -> list[ServingLoad]:
    """One load for each number of draft tokens that a step may check; the plan's times decide which is best."""
    return [ServingLoad(stages, facts, draft_tokens) for draft_tokens in range(1 + facts.num_speculative_tokens)]
