"""`RolloutInquirer`: what a run sends to each of its rollout servers, and the checks of what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tllm.core.errors import ClusterError, ConfigError
from tllm.training.policy.rollouts import Completion, PromptGroup
from tllm.training.rollout_servers.published_weights import PublishedWeights, ServerConnection
from tllm.training.rollout_servers.rollout_messages import (
    SAMPLING,
    PromptGroups,
    RolloutAnswer,
    RolloutQuestion,
    RolloutRun,
)

ROUNDING = 1e-6
"""How far above 0 a log-probability may be rounded."""


@dataclass(frozen=True)
class RolloutInquirer:
    """`vocab_size` and `eos_ids` are the model's. A server has one question at a time: it computes all that fits."""

    introduction: RolloutRun
    weights: PublishedWeights
    vocab_size: int
    eos_ids: tuple[int, ...]
    conversation = SAMPLING
    in_flight = 1

    def send(self, connection: ServerConnection, question: RolloutQuestion, name: str) -> int:
        """The prompts, once the server has the weights that they are to be completed with."""
        assert isinstance(question, PromptGroups), "nothing else waits in the queue"
        self.weights.bring(connection, name, question.root)
        return connection.send_question(question)

    def checked(self, answer: RolloutAnswer, question: RolloutQuestion, name: str) -> RolloutAnswer:
        assert isinstance(question, PromptGroups), "nothing else waits in the queue"
        if answer.error:
            raise ClusterError(f"the rollout server at {name} cannot sample: {answer.error}")
        most = [group.most_tokens(question.sampling) for group in question.groups for _ in group.seeds]
        if (answer.number, len(answer.completions)) != (question.number, len(most)):
            raise ClusterError(
                f"the rollout server at {name} answers question {answer.number} with {len(answer.completions)} "
                f"completions, and question {question.number} asks for {len(most)}"
            )
        ends = {*question.stop_ids, *self.eos_ids}
        for number, completion in enumerate(answer.completions):
            if reason := _fault(completion, most[number], self.vocab_size, ends):
                raise ClusterError(
                    f"completion {number} of the rollout server at {name} {reason}",
                    "its release or its machine is at fault: leave it out, and go on",
                )
        return answer

    def refused(self, model: str, name: str, reason: str) -> ConfigError:
        return ConfigError(
            f"the rollout server {model} at {name} cannot sample for this run: {reason}",
            "start `tllm rollout` with the model that the run begins with",
        )


def portions(groups: Sequence[PromptGroup], servers: int, at_once: int) -> Iterator[tuple[PromptGroup, ...]]:
    """The groups in order, as questions: about one for each server, of as many completions as one computes at once."""
    each = -(-len(groups) // servers)
    at = 0
    while at < len(groups):
        taken, completions = 0, 0
        while at + taken < len(groups) and taken < each:
            completions += len(groups[at + taken].seeds)
            if taken and completions > at_once:
                break
            taken += 1
        yield tuple(groups[at : at + taken])
        at += taken


def _fault(completion: Completion, max_tokens: int, vocab_size: int, ends: set[int]) -> str:
    """Why this cannot be what was sampled, in words; "" where it can."""
    ids, log_probs = completion.ids, completion.log_probs
    if len(ids) != len(log_probs):
        return f"has {len(ids)} tokens and {len(log_probs)} log-probabilities"
    if not 1 <= len(ids) <= max_tokens:
        return f"has {len(ids)} tokens, and 1 to {max_tokens} were asked for"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"has token {max(ids) if max(ids) >= vocab_size else min(ids)}, of a vocabulary of {vocab_size}"
    if not all(math.isfinite(one) and one <= ROUNDING for one in log_probs):
        return "has log-probabilities that are none"
    if completion.is_truncated and len(ids) < max_tokens:
        return f"is cut off after {len(ids)} tokens, and {max_tokens} were asked for"
    if not completion.is_truncated and ids[-1] not in ends:
        return f"ends with token {ids[-1]}, which ends no reply"
    return ""
