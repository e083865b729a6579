"""`PolicyFeed`: a rank's microbatches of each step, from completions that the replicas sample with its weights.

For each step, or where `num_iterations` says so for several:

1. Rank 0 reads prompts and tells every rank which replica samples what (`SampledRows.groups`).
2. Each replica samples (`CompletionSampler`), and sends what came to rank 0; where tools are called, several times. Or
   servers do, some steps ahead (`SampledAhead`).
3. Rank 0 has them judged, and makes rows of what is learned of each (`SampledRows.learned`): reward functions give
   advantages, a teacher the probabilities of all tokens.
4. The rows are dealt to the replicas like any others, and the reference says what it thinks of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from tllm.core.errors import ConfigError
from tllm.training.data.batch_feed import ReplicaBatch, receive_part, send_parts, split_global_batch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.packing import PackedRow
from tllm.training.job.job_parts import steps_of_one_sampling
from tllm.training.objectives.policy_gradient import KEPT, OLD, REFERENCE
from tllm.training.policy.reference_model import ReferenceModel
from tllm.training.policy.rollouts import Completion, PromptGroup, RolloutOrder
from tllm.training.policy.sample_together import StepSampler, dealt
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.step.shared_prompts import share_prompts
from tllm.weights.dtypes import torch_dtype


class SampledRows(Protocol):
    """Rank 0's part: what is sampled, and what is learned of it (`RewardedRows`, `OnPolicyRows`)."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a completion."""

    def prepare(self, done: int) -> None:
        """Go on after `done` steps."""

    def groups(self, step: int) -> list[PromptGroup]:
        """What is to be sampled for step `step`, the first being 0. Several steps may be asked for before one is
        learned."""

    def learned(self, step: int, completions: Sequence[Completion]) -> tuple[list[PackedRow], dict[str, float]]:
        """The rows of the step from what was sampled for `groups`, in order, and metrics. ConfigError for a fault."""

    def position(self, step: int) -> bytes:
        """Where in the data `step` begins, as snapshots keep it."""

    def close(self) -> None: ...


class PolicyFeed:
    """A `Feed` whose rows are sampled when they are asked for, by the weights of that moment.

    `judged` is rank 0's. `reference` is kept where the loss has a KL divergence; it gets `initial_weights`.
    """

    def __init__(
        self,
        config: RankConfig,
        sampler: StepSampler,
        judged: SampledRows | None,
        initial_weights: InitialWeights,
        policy: RankModel,
        with_positions: bool = False,
    ) -> None:
        self._config, self._sampler, self._judged = config, sampler, judged
        self._initial_weights, self._with_positions = initial_weights, with_positions
        self._passes = steps_of_one_sampling(config.job)
        grpo = config.job.grpo
        self._reference = ReferenceModel(config, grpo.temperature, policy) if grpo is not None and grpo.beta else None
        self._step = 0
        self._batch: ReplicaBatch | None = None
        self._microbatches: list[Tokens] = []
        self.role_seconds: dict[str, float] = {}

    @property
    def is_between(self) -> bool:
        """Whether new completions come next."""
        return self._step % self._passes == 0

    def begin(self, step: int, stop: int) -> None:
        """Start with `step`, at which completions are sampled."""
        assert step % self._passes == 0, "saves are made between two samplings"
        self._step = step
        self._sampler.begin(step, stop)
        if self._judged is not None:
            self._judged.prepare(step)
        if self._reference is not None:
            self._reference.fill(self._initial_weights)

    def next(self, on_wait: Callable[[str], object]) -> ReplicaBatch:
        """This replica's batch of the next step, sampled now if its turn has come."""
        self.role_seconds = {}
        if self.is_between:
            self._batch = self._sampled()
        assert self._batch is not None
        self._step += self._batch.fault is None
        return self._batch

    def microbatches(self, batch: ReplicaBatch) -> list[Tokens]:
        """The batch as tensors, with log-probabilities of the pass before and of the reference."""
        is_first = (self._step - 1) % self._passes == 0
        if is_first:
            shares = self._config.shares_prompts
            computed = [share_prompts(tokens) if shares else tokens for tokens in batch.unpack()]
            self._microbatches = [self._with_room(tokens) for tokens in self._with_reference(computed)]
        if self._passes == 1 or is_first:
            return self._microbatches
        return [
            replace(tokens, of_tokens={**_without(tokens, KEPT), OLD: tokens.of_tokens[KEPT]})
            for tokens in self._microbatches
        ]

    def position(self, batch: ReplicaBatch) -> bytes:
        """Where in the data the next step begins, with what was sampled ahead."""
        return self._sampler.position(batch.next_position, self._step)

    def close(self) -> None:
        self._sampler.close()
        if self._reference is not None:
            self._reference.close()
        if self._judged is not None:
            self._judged.close()

    def _sampled(self) -> ReplicaBatch:
        config, plan = self._config, self._config.plan
        order_of = None if self._judged is None else self._ordered
        with self._timed("sampling"):
            asked, completions = self._sampler.of_step(self._step, order_of)
        if self._sampler.tool_seconds:
            self.role_seconds["tools"] = self._sampler.tool_seconds
            self.role_seconds["sampling"] -= self._sampler.tool_seconds
        if asked.fault is not None:
            return ReplicaBatch(fault=asked.fault)
        if self._judged is None:
            return receive_part(config.groups.data)
        with self._timed("teacher" if config.job.distill is not None else "rewards"):
            batches = self._judged_batches(completions)
        send_parts(batches, plan, config.groups.data)
        return batches[0]

    def _ordered(self, step: int) -> RolloutOrder:
        """On rank 0: what each replica is to sample for a step."""
        assert self._judged is not None
        try:
            groups = self._judged.groups(step)
        except ConfigError as error:
            return RolloutOrder.failed(error)
        return dealt(groups, self._judged.stop_ids, self._config.plan)

    def _judged_batches(self, completions: Sequence[Completion]) -> list[ReplicaBatch]:
        """On rank 0: the batch of each replica."""
        assert self._judged is not None
        plan = self._config.plan
        try:
            rows, metrics = self._judged.learned(self._step, completions)
        except ConfigError as error:
            return [ReplicaBatch(fault=(error.message, error.hint))] * plan.replicas
        position = self._judged.position(self._step + self._passes) if self._with_positions else b""
        batches = split_global_batch(rows, plan.dp, self._config.job.microbatch_size, position)
        metrics = {**metrics, **self._sampler.metrics}
        return [msgspec.structs.replace(batch, metrics=metrics) for batch in batches]

    def _with_reference(self, microbatches: list[Tokens]) -> list[Tokens]:
        if self._reference is None:
            return microbatches
        with self._timed("reference"):
            found = self._reference.log_probs(microbatches, self._dtype)
        return [
            replace(tokens, of_tokens={**tokens.of_tokens, REFERENCE: log_probs_T})
            for tokens, log_probs_T in zip(microbatches, found, strict=True)
        ]

    @contextmanager
    def _timed(self, role: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.role_seconds[role] = time.monotonic() - start

    def _with_room(self, tokens: Tokens) -> Tokens:
        """With a place for the log-probabilities that the first pass finds, where later passes want them."""
        if self._passes == 1:
            return tokens
        room_T = torch.zeros(len(tokens.ids_T), dtype=self._dtype, device=self._config.device)
        return replace(tokens, of_tokens={**tokens.of_tokens, KEPT: room_T})

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if torch_dtype(self._config.job.dtype) == torch.float64 else torch.float32


def _without(tokens: Tokens, name: str) -> dict[str, Tensor]:
    return {key: x_T for key, x_T in tokens.of_tokens.items() if key != name}
