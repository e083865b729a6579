"""`StartedPrompts`: the prompts that completions continue: those of the rows, with what environments add to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from tllm.training.data.prompt_batches import PromptBatches, PromptRow
from tllm.training.policy.rollouts import PromptGroup
from tllm.training.tools.environments import Environments


class StartedPrompts(NamedTuple):
    """The prompt and the seed of each completion, as many of each row in turn; `groups` are the same to be sampled."""

    rows_N: Sequence[PromptRow] = ()
    seeds_N: Sequence[int] = ()
    groups: Sequence[PromptGroup] = ()


def start_prompts(
    rows: Sequence[PromptRow],
    seeds: Sequence[Sequence[int]],
    prompts: PromptBatches,
    environments: Environments | None,
) -> StartedPrompts:
    """Begin the completions of these rows, with an environment for each seed where the job has some.

    Completions of a row whose environments add the same share its prompt. ConfigError for an environment that fails, or
    adds too much.
    """
    seeds_N = [seed for each in seeds for seed in each]
    rows_N = [row for row, each in zip(rows, seeds, strict=True) for _ in each]
    if environments is None:
        groups = [PromptGroup(row.ids, tuple(each)) for row, each in zip(rows, seeds, strict=True)]
        return StartedPrompts(rows_N, seeds_N, groups)
    added = environments.begin(seeds_N, [row.columns for row in rows_N])
    rows_N = [prompts.continued(row, text) for row, text in zip(rows_N, added, strict=True)]
    numbers = [number for number, each in enumerate(seeds) for _ in each]
    alike = groupby(zip(numbers, rows_N, seeds_N, strict=True), lambda one: (one[0], one[1].ids))
    groups = [PromptGroup(ids, tuple(seed for _, _, seed in each)) for (_, ids), each in alike]
    return StartedPrompts(rows_N, seeds_N, groups)
