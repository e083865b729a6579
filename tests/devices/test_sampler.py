"""Sampling where the logits lie on a device with memory of its own: the processor's tokens and log-probabilities."""

from __future__ import annotations

from typing import get_args

import msgspec
import torch

from tests.support.device.separate_device import SEPARATE
from tllm.comm.collectives.group import solo
from tllm.engine.compute.pooler import Pooler
from tllm.engine.compute.sampler import Sampler
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, Sampling
from tllm.engine.schedule.grammar_state import pack_mask
from tllm.spec.request import PoolingKind, PoolingParams

WIDTH, VOCAB = 8, 300
SAMPLINGS = (
    Sampling(),
    Sampling(logprobs=3),
    Sampling(temperature=0.7, seed=1, logprobs=0, tempered_logprobs=True),
    Sampling(temperature=0.9, seed=2, top_p=0.5),
    Sampling(temperature=0.9, seed=3, top_k=5, min_p=0.05, top_p=0.9, logprobs=2),
    Sampling(temperature=1.0, seed=4, history=(1, 2, 3, 2), prompt_length=1, repetition_penalty=2.0),
    Sampling(history=(4, 5), prompt_length=1, frequency_penalty=1.0, logit_bias={7: 9.0}, banned=(8, 9)),
)


def results(samplings: tuple[Sampling, ...], device: torch.device) -> Results:
    """Of a batch with a sequence for each sampling, one with draft tokens and masks, and prompts that are pooled."""
    dice = torch.Generator().manual_seed(5)
    table_DV = torch.randn(WIDTH, VOCAB, generator=dice).to(device)
    entries = [BatchEntry(key, 4, 1, 4, ((key, 1),), one) for key, one in enumerate(samplings)]
    masks = (pack_mask(1 << 6 | 1 << 99, 38), b"")
    entries.append(BatchEntry(90, 4, 2, 4, ((90, 1),), Sampling(), num_draft_tokens=1, masks=masks))
    entries.append(BatchEntry(91, 0, 3, 9, ((91, 1),), targets=(4, 5), prompt_top=2))
    for key, kind in enumerate(get_args(PoolingKind), 92):
        pooling = PoolingParams(kind=kind, token_ids=(3, 4) if kind == "logprobs" else ())
        entries.append(BatchEntry(key, 0, 2, 2, ((key, 1),), pooling=pooling))
    tokens = sum(entry.count for entry in entries)
    batch = Batch(0, tuple(entries), tuple(range(tokens)))
    x_TD = torch.randn(tokens, WIDTH, generator=dice).to(device)
    sampler = Sampler(lambda x: x @ table_DV, solo(), [(0, VOCAB)])
    found = Pooler(torch.sigmoid, lambda x: x[:, :2], sampler)(x_TD, batch, sampler(x_TD, batch))
    assert found is not None
    return found


def test_tokens_and_numbers_are_those_of_the_processor() -> None:
    for samplings in (SAMPLINGS, SAMPLINGS[2:6], SAMPLINGS[:1]):
        here, there = (results(samplings, device) for device in (torch.device("cpu"), SEPARATE[0]))
        assert msgspec.json.encode(here) == msgspec.json.encode(there)
        assert len(here.token_ids) == len(samplings) + 2 and len(here.pooled) == 4 and here.prompt_logprobs
