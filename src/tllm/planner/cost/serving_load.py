"""What serving is asked for, and the batches that this makes in a ring of stages, as `engine.schedule.scheduler`
cuts them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tllm.core.errors import PlanError
from tllm.planner.cost.cache_room import MAX_NUM_BATCHED_TOKENS, PAGE_SIZE
from tllm.planner.cost.rank_bytes import ITEM_BYTES

SMALLEST_CHUNK = 128
"""Tokens of a prompt in a batch at the least, with several stages."""


@dataclass(frozen=True)
class ServingFacts:
    """What is asked: requests of `prompt` tokens that get `reply` tokens, `concurrency` at once.

    `weight_bits`, `message_bits`: of one weight and of a number on its way, where these have fewer than `dtype`.
    `num_speculative_tokens`: that a turn may check of each reply beside its next token, each of which is right with
    probability `acceptance` if those before it were.
    """

    dtype: str
    prompt: int = 512
    reply: int = 128
    concurrency: int = 1
    weight_bits: float | None = None
    message_bits: float | None = None
    num_speculative_tokens: int = 0
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"dtype {self.dtype!r} is not known", "known: " + ", ".join(ITEM_BYTES))
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
        return ITEM_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight."""
        return self.item_bytes if self.weight_bits is None else self.weight_bits / 8

    @property
    def message_bytes(self) -> float:
        """Bytes of a number in a message."""
        return self.item_bytes if self.message_bits is None else self.message_bits / 8

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are kept at the most, in whole pages."""
        return self.concurrency * -(-(self.prompt + self.reply) // PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True)
class ExpectedBatch:
    """`tokens` of `sequences`, of which each sees `keys` on an average; `rows` of them get logits. `after_idle`: a stage has
    nothing to do until it comes."""

    tokens: float
    sequences: float
    keys: float
    rows: float
    after_idle: bool = False


@dataclass(frozen=True)
class ServingLoad:
    """What goes round a ring of `stages`: `chunks` batches of prompts, then for each turn `batches` in flight.

    A turn gives each request a token, and as many more as are right, from the first on, of `draft_tokens` that it checks.
    """

    stages: int
    facts: ServingFacts
    draft_tokens: int = 0

    @cached_property
    def batches(self) -> int:
        return min(self.stages, self.facts.concurrency)

    @cached_property
    def chunks(self) -> int:
        tokens = self.facts.concurrency * self.facts.prompt
        most = MAX_NUM_BATCHED_TOKENS
        if self.stages > 1:
            most = min(most, max(SMALLEST_CHUNK, -(-tokens // (2 * self.stages))))
        return -(-tokens // most)

    @cached_property
    def prefill(self) -> ExpectedBatch:
        tokens = self.facts.concurrency * self.facts.prompt / self.chunks
        sequences = max(1.0, tokens / self.facts.prompt)
        return ExpectedBatch(tokens, sequences, (self.facts.prompt + 1) / 2, sequences)

    @cached_property
    def decode(self) -> ExpectedBatch:
        sequences = -(-self.facts.concurrency // self.batches)
        rows = sequences * (1 + self.draft_tokens)
        keys = self.facts.prompt + self.facts.reply / 2
        return ExpectedBatch(rows, sequences, keys, rows, after_idle=self.batches < self.stages)

    @cached_property
    def tokens_per_step(self) -> float:
        """Of each request, on an average: 1 + a + a^2 + ... (2211.17192, equation 1)."""
        return sum(self.facts.acceptance**count for count in range(1 + self.draft_tokens))

    @property
    def rows_per_token(self) -> float:
        """Rows that go round for each token that is given out."""
        return (1 + self.draft_tokens) / self.tokens_per_step

    def prompt_seconds(self, total: float, slowest: float, request: float | None = None) -> float:
        """Seconds until prompts are computed: all, or those of so many requests. `total`: one chunk through the ring;
        `slowest`: on the stage or wire that takes longest."""
        share = 1.0 if request is None else request / self.facts.concurrency
        return total + max(0.0, share * self.chunks - 1) * max(slowest, total / self.stages)

    def step_seconds(self, total: float, slowest: float) -> float:
        """Seconds of a turn."""
        return max(total, self.batches * slowest)

    def seconds_per_token(self, total: float, slowest: float) -> float:
        """Seconds from one token of a request to its next, on an average."""
        return self.step_seconds(total, slowest) / self.tokens_per_step

    def total_seconds(self, prefill: tuple[float, float], decode: tuple[float, float]) -> float:
        """Until all requests have their replies; each (total, slowest)."""
        return self.prompt_seconds(*prefill) + (self.facts.reply - 1) * self.seconds_per_token(*decode)


def loads(stages: int, facts: ServingFacts) -> list[ServingLoad]:
    """With each number of drafted tokens that a turn may check: which is best, the plan's times decide."""
    return [ServingLoad(stages, facts, drafted) for drafted in range(1 + facts.num_speculative_tokens)]
