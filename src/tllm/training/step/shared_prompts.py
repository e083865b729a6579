"""`share_prompts`: a microbatch in which the tokens of a prompt stand once for all its completions, those that a policy
wrote or the replies of preferences.

Nothing in a transformer but attention mixes tokens, and a prompt's tokens see none of a completion. So rows of one
prompt, G of them,

    p1 … pn a1 … am      p1 … pn b1 … bk      …

are the same numbers as these documents, of which all but the first see the keys of the first before their own:

    p1 … pn-1      pn a1 … am-1      pn b1 … bk-1      …

The prompt's last token stays with each completion, whose first it predicts: so every token has one label as before. A
completion's last token is left out, as it predicts nothing and no other token sees it; so is all that comes after the
last label of a row, or of one without labels all but its first own token. Gradients at the prompt add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.training.data.batch_tensors import PROMPT_LENGTH, Tokens, picked
from tllm.training.data.encoder import IGNORED
from tllm.training.data.preference_rows import ROLE
from tllm.training.job.job_parts import shares_prompts
from tllm.training.step.rank_groups import RankConfig


def with_shared_prompts(config: RankConfig) -> RankConfig:
    """The same, which says whether this run shares prompts: if all ranks can, which they tell each other."""
    job, plan = config.job, config.plan
    if not shares_prompts(job, config.spec, cp=plan.cp):
        return config
    cannot = not shares_prompts(job, config.spec, config.device.type, plan.cp)
    unable = config.groups.world.all_reduce(torch.tensor([float(cannot)], dtype=torch.float64))
    return replace(config, shares_prompts=not float(unable))


class _Piece(NamedTuple):
    """Tokens [start, stop) of a microbatch, which are of document `of`, and see the piece of number `prefix` first."""

    of: int
    start: int
    stop: int
    prefix: int | None = None
    is_prefix: bool = False


def share_prompts(tokens: Tokens) -> Tokens:
    """The same loss, of fewer tokens. Documents are taken to be of one prompt where they follow one another and begin
    with the same as many tokens: their `PROMPT_LENGTH`, or where they do not tell it, those up to the first label.

    A prompt becomes a document of its own, with 0 for all numbers of documents but the length of the prompt. The
    microbatch must be whole.
    """
    assert tokens.spans is None and not tokens.prefixes, "prompts are shared first, and once"
    pieces = list(_pieces(tokens))
    spans = [(piece.start, piece.stop) for piece in pieces]
    of_D = torch.tensor([piece.of for piece in pieces])
    own_D = ~torch.tensor([piece.is_prefix for piece in pieces])
    return replace(
        tokens,
        ids_T=picked(tokens.ids_T, spans),
        labels_T=picked(tokens.labels_T, spans),
        positions_T=picked(tokens.positions_T, spans),
        lengths=[stop - start for start, stop in spans],
        of_documents={
            name: x_N[of_D] if name == PROMPT_LENGTH else x_N[of_D] * own_D for name, x_N in tokens.of_documents.items()
        },
        of_tokens={name: picked(x_T, spans) for name, x_T in tokens.of_tokens.items()},
        prefixes=tuple(piece.prefix for piece in pieces) if any(piece.is_prefix for piece in pieces) else (),
    )


def as_computed(config: RankConfig, batch: Sequence[Tokens]) -> Sequence[Tokens]:
    """The microbatches as this run computes them: with the prompts of preferences shared, if it shares any; of
    completions that were sampled they are already."""
    if not config.shares_prompts:
        return batch
    return [share_prompts(tokens) if ROLE in tokens.of_documents else tokens for tokens in batch]


def _pieces(tokens: Tokens) -> Iterator[_Piece]:
    """What is computed, in order."""
    starts = list(accumulate(tokens.lengths, initial=0))
    ids, labels = (torch.split(x_T, tokens.lengths) for x_T in (tokens.ids_T, tokens.labels_T))
    told_N = tokens.of_documents.get(PROMPT_LENGTH)
    prompts = [_before_labels(labels_T) for labels_T in labels] if told_N is None else told_N.tolist()
    count, first = 0, 0
    while first < len(prompts):
        last = first + 1
        while last < len(prompts) and _is_same(ids[first], ids[last], prompts[first], prompts[last]):
            last += 1
        shared, prefix = max(0, prompts[first] - 1) if last - first > 1 else 0, None
        if shared > 0:
            prefix = count
            yield _Piece(first, starts[first], starts[first] + shared, is_prefix=True)
            count += 1
        for of in range(first, last):
            yield _Piece(of, starts[of] + shared, starts[of] + max(_learned(labels[of]), shared + 1), prefix)
            count += 1
        first = last


def _is_same(ids_T: Tensor, other_T: Tensor, prompt: int, other: int) -> bool:
    """Whether two documents begin with the same prompt."""
    return prompt == other and torch.equal(ids_T[:prompt], other_T[:prompt])


def _before_labels(labels_T: Tensor) -> int:
    """Tokens of a document up to the first that has a label, which is the last of its prompt; 0 if none has."""
    (places,) = torch.nonzero(labels_T != IGNORED, as_tuple=True)
    return int(places[0]) + 1 if len(places) else 0


def _learned(labels_T: Tensor) -> int:
    """Tokens of a document up to the last that has a label."""
    (places,) = torch.nonzero(labels_T != IGNORED, as_tuple=True)
    return int(places[-1]) + 1 if len(places) else 0
