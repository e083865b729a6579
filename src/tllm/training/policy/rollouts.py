"""`Rollouts`: the interface by which a trainer has completions sampled with the weights that it trains.

Engine and trainer know nothing of each other: whoever starts a rank hands in what samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tllm.core.errors import ConfigError, decoded
from tllm.training.data.seeds import key_for
from tllm.training.job.job import Job
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel


class CompletionSampling(NamedTuple):
    """How tokens are sampled: `max_tokens` at most of each completion; a temperature of 0 takes the likeliest.

    `goes_on`: the weights are those of the call before, and what is known from it of prompts may be used again.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    goes_on: bool = False


class PromptGroup(msgspec.Struct, frozen=True, array_like=True):
    """A prompt, and the seed of each completion that is wanted of it.

    `max_tokens`: the most that each may have, where that is less than the sampling allows.
    """

    ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int | None = None

    def most_tokens(self, sampling: CompletionSampling) -> int:
        """The most that each completion may have."""
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens


class Turns(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 knows of a completion in which tools were called, or could have been.

    `tool_mask` is 1 for each token that the model wrote and 0 for those that tools did, as in TRL; `messages` are the
    assistant's and the tools' in turn.
    """

    tool_mask: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    num_calls: int
    num_failures: int


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were sampled, each with its log-probability at the temperature, before top-k and top-p.

    The last is one that ends a reply, unless the completion `is_truncated`. Where a job has tools, rank 0 adds what
    they wrote, with a log-probability of 0, and the `turns` tell whose each token is.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    is_truncated: bool
    turns: Turns | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that the model wrote."""
        return len(self.ids) if self.turns is None else sum(self.turns.tool_mask)


class RolloutOrder(msgspec.Struct, frozen=True):
    """What every replica is to sample in a step: `groups[r]` are replica r's. A token of `stop_ids` ends a completion.

    A `fault` says, with a hint, why there is nothing to sample.
    """

    groups: tuple[tuple[PromptGroup, ...], ...]
    stop_ids: tuple[int, ...]
    fault: tuple[str, str] | None = None

    @classmethod
    def failed(cls, error: ConfigError) -> RolloutOrder:
        """That there is nothing to sample, because of this."""
        return cls((), (), (error.message, error.hint))


class Rollouts(Protocol):
    """Samples with the weights that are trained, as they are at the moment: here, or on other machines.

    Every rank of a replica makes the same calls. `metrics` are of the last call, on rank 0.
    """

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        """What of an order the rank's replica is to sample."""

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        """The completions of each group in turn, on the replica's first rank; nothing on the others.

        ConfigError, on the first rank of all, where that cannot be done and the run is to end.
        """

    def close(self) -> None:
        """Let go of the cache."""


MakeRollouts = Callable[[RankConfig, RankModel], Rollouts]
"""make(what the rank is asked to do, the model whose weights it shares)"""


def sampling_of(job: Job) -> CompletionSampling:
    """How a job that learns from completions samples them."""
    config = job.rollouts
    assert config is not None, "checked when the run began"
    return CompletionSampling(config.max_completion_length, config.temperature, config.top_p, config.top_k)


def completion_seed(seed: int, step: int, place: int, number: int) -> int:
    """The seed of completion `number` of the prompt at `place` of a step's, the first step being 0."""
    return key_for("completion", seed, step, place, number) >> 1


class SampledPart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sampled, as it travels to the others; or a `fault`, with a hint."""

    completions: tuple[Completion, ...] = ()
    fault: tuple[str, str] | None = None


_PARTS, _ORDERS = msgspec.msgpack.Decoder(SampledPart), msgspec.msgpack.Decoder(RolloutOrder)


def decode_part(content: bytes) -> SampledPart:
    """FrameError for anything else."""
    return decoded(content, _PARTS, "what a replica sent are no completions")


def decode_order(content: bytes) -> RolloutOrder:
    """What rank 0 asks for; FrameError for anything else."""
    return decoded(content, _ORDERS, "what rank 0 sent are no prompts")
