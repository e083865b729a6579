"""`GreedyTexts`: what the model writes after prompts, decoded greedily until one of some stop texts.

The engine ends completions by tokens, not by texts. So a completion is sampled in pieces, each of which finds the pages
of those before it, until its text has a stop; whatever comes after the stop is cut off. No more completions are under
way than the engine has pages for; when one has ended, another begins with the next piece.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from tllm.core.errors import ConfigError
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.packing import deal
from tllm.training.job.job_parts import sampling_facts
from tllm.training.policy.rollouts import CompletionSampling, PromptGroup, RolloutOrder, Rollouts
from tllm.training.policy.sample_together import sample_together
from tllm.training.step.rank_groups import RankConfig

PIECE = 32
"""Tokens between two looks for a stop."""


@dataclass
class WantedText:
    """A prompt, the texts before which what is written ends, and the most tokens of it. `ids` are those so far."""

    prompt_ids: Sequence[int]
    stops: Sequence[str]
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def piece(self) -> PromptGroup:
        """What is to be sampled of it next."""
        return PromptGroup((*self.prompt_ids, *self.ids), (0,), min(PIECE, self.max_tokens - len(self.ids)))

    def text(self, tokenizer: Tokenizer) -> str:
        """Up to the first stop."""
        count = bisect_left(range(len(self.ids) + 1), True, key=lambda count: self._has_stop(count, tokenizer))
        text = tokenizer.decode(self.ids[:count], skip_special_tokens=True)
        for stop in self.stops:
            text = text.partition(stop)[0]
        return text

    def add(self, ids: Sequence[int], is_truncated: bool, tokenizer: Tokenizer) -> None:
        """A piece that was sampled."""
        self.ids += ids
        has_stop = self._has_stop(len(self.ids), tokenizer)
        self.has_ended = not is_truncated or has_stop or len(self.ids) >= self.max_tokens

    def _has_stop(self, count: int, tokenizer: Tokenizer) -> bool:
        """Whether so many tokens have a stop, which may be a special token."""
        text = tokenizer.decode(self.ids[:count], skip_special_tokens=False)
        return any(stop in text for stop in self.stops)


class GreedyTexts:
    """Every rank makes the same calls: rank 0, which has the tokenizer, `of`, the others `follow`."""

    def __init__(self, config: RankConfig, rollouts: Rollouts) -> None:
        self._config, self._rollouts = config, rollouts
        self._sampling = CompletionSampling(PIECE, temperature=0.0)
        sizes = sampling_facts(config.job)
        assert sizes is not None, "there are rollouts"
        self._at_once = sizes.at_once

    def of(self, wanted: Sequence[WantedText], tokenizer: Tokenizer) -> list[str]:
        """On rank 0. ConfigError where nothing can be sampled."""
        parts = [wanted[part.start : part.stop] for part in deal(len(wanted), self._config.plan.dp)]
        sampling = self._sampling
        while any(going := [self._under_way(part) for part in parts]):
            order = RolloutOrder(tuple(tuple(one.piece for one in each) for each in going), tokenizer.eos_ids)
            told, completions = sample_together(self._config, self._rollouts, sampling, order)
            if told.fault is not None:
                raise ConfigError(*told.fault)
            for one, completion in zip(chain(*going), completions, strict=True):
                one.add(completion.ids, completion.is_truncated, tokenizer)
            sampling = self._sampling._replace(goes_on=True)
        sample_together(self._config, self._rollouts, sampling, RolloutOrder((), ()))
        return [one.text(tokenizer) for one in wanted]

    def _under_way(self, wanted: Sequence[WantedText]) -> list[WantedText]:
        """Of a replica's part."""
        return list(islice((one for one in wanted if not one.has_ended), self._at_once))

    def follow(self) -> None:
        """On another rank: what `of` asks for, up to its end or a fault."""
        sampling = self._sampling
        while True:
            told, _ = sample_together(self._config, self._rollouts, sampling, None)
            if told.fault is not None or not any(told.groups):
                return
            sampling = self._sampling._replace(goes_on=True)
