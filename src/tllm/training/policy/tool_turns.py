"""`ToolTurns`: completions of several turns: the model writes, rank 0 runs the tools that it calls, the model goes on.

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

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tllm.core.errors import ConfigError
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
        going = [] if self._tools is None else _begun(asked, completions, self._tools)
        whole, iteration = list(going), 0
        while any(asked.groups):
            later = None
            if self._tools is not None:
                later, going = self._next_turn(going, asked, iteration)
            told, found = sample_together(self.config, self.rollouts, self.sampling._replace(goes_on=True), later)
            if told.fault is not None:
                return told, []
            if not any(told.groups):
                break
            if self._tools is not None:
                for one, turn in zip(going, found, strict=True):
                    one.take(turn, self._tools)
            iteration += 1
        return asked, completions if self._tools is None else [one.completion() for one in whole]

    def _next_turn(
        self, going: Sequence[GrowingCompletion], asked: RolloutOrder, iteration: int
    ) -> tuple[RolloutOrder, list[GrowingCompletion]]:
        """On rank 0: make the calls; the order for those completions that the model is to go on with, and these."""
        tools, longest = self._tools, self.sampling.max_tokens
        assert tools is not None, "rank 0 has them"
        started = time.monotonic()
        until = started + tools.functions.seconds
        calling = [one for one in going if one.calls] if iteration < tools.max_iterations else []
        try:
            results = tools.functions.results([CallingTurn(one.seed, one.calls) for one in calling], until)
            going = [one for one, told in zip(calling, results, strict=True) if one.answer(told, tools, longest)]
        except ConfigError as error:
            return RolloutOrder((), asked.stop_ids, (error.message, error.hint)), []
        self.tool_seconds += time.monotonic() - started
        groups: list[list[PromptGroup]] = [[] for _ in asked.groups]
        for one in going:
            group = PromptGroup((*one.prompt_ids, *one.ids), (one.seed,), longest - len(one.ids))
            groups[one.replica].append(group)
        return RolloutOrder(tuple(map(tuple, groups)), asked.stop_ids), going


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
