"""Completions of several turns: the model writes, rank 0 runs the tools that it calls, the model continues.

As in TRL's `GRPOTrainer`:

- A completion goes on until a turn has no call, until `max_tool_calling_iterations` turns had some, or until
  `max_completion_length` is used up, in which the tokens of results count.
- A result that does not fit in it is left out, and the completion ends with its call.
- A call that fails becomes a message with the error, and the model goes on.
- Coroutines are awaited together, those of one turn of all completions. Results are in the order of their calls.

What the model wrote stays as it was sampled, and results are appended as ids (`ToolTemplate`). Each turn after the
first is one more sampling of the grown ids, by the replica that has the earlier turns in its cache.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.rollout_keys import RolloutConfig
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder, Rollouts, Turns
from tllm.training.policy.sample_together import CompletionSampler, sample_together
from tllm.training.step.rank_groups import RankConfig
from tllm.training.tools.tool_functions import CallingTurn, FunctionCall, ToolFunctions, ToolResult
from tllm.training.tools.tool_replies import Message, ToolReplies
from tllm.training.tools.tool_template import ToolTemplate
from tllm.training.tools.user_functions import UserModules

log = logging.getLogger("tllm.train")


class Tools:
    """Rank 0's: the functions of a job, how the model calls them, and how results are written for it.

    ConfigError for functions or a chat template that will not do.
    """

    def __init__(
        self, config: RolloutConfig, tokenizer: Tokenizer, template: ChatTemplate | None, modules: UserModules
    ) -> None:
        if template is None:
            raise ConfigError(
                "the job has tools and the model has no chat template", "it writes calls and results: give it one"
            )
        self.functions = ToolFunctions.load(config.tools, config.reward_timeout, modules, config.environment_factory)
        self.replies = ToolReplies(tokenizer, template.all_sources, self.functions.parameters)
        self.template = ToolTemplate(template, tokenizer, self.functions.schemas)
        limit = config.max_tool_calling_iterations
        self.max_iterations = math.inf if limit is None else limit
        self.turn = modules.turn


class CallMade(NamedTuple):
    """A call that a completion made, and what it told; None where that did not fit in the completion."""

    call: FunctionCall
    told: str | None


@dataclass
class GrowingCompletion:
    """A completion as far as it has come. `replica` samples it; `calls` are those of its last turn, yet to be made."""

    prompt_ids: tuple[int, ...]
    seed: int
    replica: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tool_mask: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: tuple[FunctionCall, ...] = ()
    is_truncated: bool = False
    num_calls: int = 0
    num_failures: int = 0

    def take(self, turn: Completion, tools: Tools) -> None:
        """What the model wrote now."""
        before = (*self.prompt_ids, *self.ids)
        message, self.calls = tools.replies.read(before, turn.ids, turn.is_truncated, self.num_calls)
        self.messages.append(message)
        self._add(turn.ids, turn.log_probs, 1)
        self.is_truncated = turn.is_truncated

    def answer(self, results: Sequence[ToolResult], tools: Tools, max_tokens: int) -> bool:
        """Append what the calls came to, if it fits in `max_tokens`; whether the model is to go on."""
        calls, self.calls = self.calls, ()
        self.num_calls += len(calls)
        self.num_failures += sum(result.is_failure for result in results)
        messages = tools.template.messages(calls, results)
        ids = tools.template.suffix(calls, messages, self.ids[-1])
        if len(self.ids) + len(ids) > max_tokens:
            return False
        self.messages += messages
        self._add(ids, [0.0] * len(ids), 0)
        self.is_truncated = len(self.ids) == max_tokens
        return not self.is_truncated

    def completion(self) -> Completion:
        """All turns as one."""
        turns = Turns(tuple(self.tool_mask), tuple(self.messages), self.num_calls, self.num_failures)
        return Completion(tuple(self.ids), tuple(self.log_probs), self.is_truncated, turns)

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], mask: int) -> None:
        self.ids += ids
        self.log_probs += log_probs
        self.tool_mask += [mask] * len(ids)


class StepTurns:
    """Rank 0's: the completions of an order, turn by turn, from the `first` on. Each may have `longest` tokens.

    `seconds`: how long the tools took so far.
    """

    def __init__(self, order: RolloutOrder, first: Sequence[Completion], tools: Tools, longest: int) -> None:
        self._order, self._tools, self._longest = order, tools, longest
        self._every = _begun(order, first, tools)
        self._going = self._every
        self._iteration = 0
        self.seconds = 0.0

    def next(self) -> RolloutOrder:
        """Make the calls of the last turn: what the model is to go on with, without groups where all has ended.
        ConfigError for a tool that goes wrong."""
        tools, calling = self._tools, [one for one in self._going if one.calls]
        if self._iteration >= tools.max_iterations:
            calling = []
        with tools.turn:
            started = time.monotonic()
            turns = [CallingTurn(one.seed, one.calls) for one in calling]
            results = tools.functions.results(turns, Deadline(tools.functions.seconds))
            self.seconds += time.monotonic() - started
        self._going = [
            one for one, told in zip(calling, results, strict=True) if one.answer(told, tools, self._longest)
        ]
        self._iteration += 1
        groups: list[list[PromptGroup]] = [[] for _ in self._order.groups]
        for one in self._going:
            group = PromptGroup((*one.prompt_ids, *one.ids), (one.seed,), self._longest - len(one.ids))
            groups[one.replica].append(group)
        return RolloutOrder(tuple(map(tuple, groups)), self._order.stop_ids)

    def take(self, turns: Sequence[Completion]) -> None:
        """What the model went on with."""
        for one, turn in zip(self._going, turns, strict=True):
            one.take(turn, self._tools)

    def completions(self) -> list[Completion]:
        """All, each with all its turns."""
        return [one.completion() for one in self._every]


class TurnSampler(CompletionSampler):
    """Samples completions with as many turns as the model wants. `tools` are rank 0's, None on other ranks."""

    def __init__(
        self, config: RankConfig, rollouts: Rollouts, sampling: CompletionSampling, tools: Tools | None
    ) -> None:
        super().__init__(config, rollouts, sampling)
        self._tools = tools

    def __call__(self, order: RolloutOrder | None) -> tuple[RolloutOrder, list[Completion]]:
        """The `order` and the completions, which are whole on rank 0; a tool that goes wrong is the order's fault."""
        asked, completions = super().__call__(order)
        self.tool_seconds = 0.0
        if asked.fault is not None:
            return asked, []
        turns = None
        if self._tools is not None:
            turns = StepTurns(asked, completions, self._tools, self.sampling.max_tokens)
        while any(asked.groups):
            later = None if turns is None else _next_or_fault(turns)
            told, found = sample_together(self.config, self.rollouts, self.sampling._replace(goes_on=True), later)
            if told.fault is not None:
                return told, []
            if not any(told.groups):
                break
            if turns is not None:
                turns.take(found)
        if turns is None:
            return asked, []
        self.tool_seconds = turns.seconds
        return asked, turns.completions()


def play_again(order: RolloutOrder, completions: Sequence[Completion], tools: Tools) -> None:
    """Make the calls again that these completions of an order made of their environments, which have just begun: they
    are then as they were. ConfigError for one that goes wrong, and a warning for one that comes to something else."""
    environments = tools.functions.environments
    if environments is None:
        return
    seeds = [seed for groups in order.groups for group in groups for seed in group.seeds]
    made = [_calls_made(one.turns) for one in completions]
    for place in range(max(map(len, made), default=0)):
        calling = []
        for seed, turns in zip(seeds, made, strict=True):
            methods = environments.methods(seed)
            of_turn = turns[place] if place < len(turns) else []
            calling.append((seed, [one for one in of_turn if one.call.name in methods]))
        with tools.turn:
            deadline = Deadline(tools.functions.seconds)
            turns_again = [CallingTurn(seed, [one.call for one in calls]) for seed, calls in calling]
            found = tools.functions.results(turns_again, deadline)
        for (_, calls), results in zip(calling, found, strict=True):
            for (call, told), result in zip(calls, results, strict=True):
                if told is not None and told != result.text:
                    log.warning(
                        "%s told %.100r for a completion that was sampled before the run was stopped, and tells %.100r "
                        "now: what it says of rewards is of now",
                        *(call.name, told, result.text),
                    )


def _calls_made(turns: Turns | None) -> list[list[CallMade]]:
    """By turn the calls that were made."""
    found: list[list[CallMade]] = []
    if turns is None:
        return found
    told = {one["tool_call_id"]: one["content"] for one in turns.messages if one["role"] == "tool"}
    left = turns.num_calls
    for message in turns.messages:
        written = message.get("tool_calls", []) if left > 0 else []
        if written:
            calls = [FunctionCall(one["id"], **one["function"]) for one in written]
            found.append([CallMade(call, told.get(call.id)) for call in calls])
            left -= len(calls)
    return found


def _next_or_fault(turns: StepTurns) -> RolloutOrder:
    try:
        return turns.next()
    except ConfigError as error:
        return RolloutOrder.failed(error)


def _begun(asked: RolloutOrder, completions: Sequence[Completion], tools: Tools) -> list[GrowingCompletion]:
    """The completions of an order after their first turn, in order."""
    begun = [
        GrowingCompletion(group.ids, seed, replica)
        for replica, groups in enumerate(asked.groups)
        for group in groups
        for seed in group.seeds
    ]
    for one, turn in zip(begun, completions, strict=True):
        one.take(turn, tools)
    return begun


def make_sampler(
    config: RankConfig, rollouts: Rollouts, sampling: CompletionSampling, tools: Tools | None
) -> CompletionSampler:
    """One of several turns where the job has tools, which are rank 0's."""
    if config.job.rollouts is None or not config.job.rollouts.calls_tools:
        return CompletionSampler(config, rollouts, sampling)
    return TurnSampler(config, rollouts, sampling, tools)
