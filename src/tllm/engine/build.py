"""Makes the entries of a batch from sequences."""

from __future__ import annotations

from tllm.engine.batch import PLAIN, Entry, Sampling
from tllm.engine.pages import Run
from tllm.engine.sequence import Sequence


def entry_of(
    sequence: Sequence, start: int, count: int, table: tuple[Run, ...], eos_ids: tuple[int, ...], drafted: int = 0
) -> Entry:
    """What the stages need to compute tokens [start, start + count) of a sequence, and so many drafted ones after."""
    stop = start + count
    targets: tuple[int, ...] = ()
    if sequence.wants_prompt_logprobs:
        targets = tuple(sequence.token_ids[start + 1 : min(stop + 1, sequence.prompt_length)])
    return Entry(
        key=sequence.key,
        start=start,
        count=count + drafted,
        prompt_length=sequence.prompt_length,
        table=table,
        sampling=sampling_of(sequence, eos_ids) if stop == len(sequence.token_ids) else None,
        targets=targets,
        prompt_top=(sequence.params.prompt_logprobs or 0) if targets else 0,
        drafted=drafted,
    )


def sampling_of(sequence: Sequence, eos_ids: tuple[int, ...]) -> Sampling:
    """How a sequence's next token is chosen."""
    params = sequence.params
    banned = sequence.stop_ids(eos_ids) if sequence.num_output < params.min_tokens else ()
    altered = params.penalised or bool(params.logit_bias) or bool(banned)
    if params.temperature == 0 and not altered and params.logprobs is None:
        return PLAIN
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        banned=banned,
        history=tuple(sequence.token_ids) if params.penalised else (),
        prompt_length=sequence.prompt_length if params.penalised else 0,
        logprobs=params.logprobs,
    )
