"""Penalties, candidates and noise against plain references over Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.engine.compute.logits_processing import (
    GOLDEN_GAMMA,
    GUMBEL_SPREAD,
    _splitmix,
    apply_penalties,
    candidates,
    gumbel_noise,
)
from tllm.engine.schedule.batch import Sampling


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def slow_penalties(logits: list[float], sampling: Sampling) -> list[float]:
    out = list(logits)
    output = sampling.history[sampling.prompt_length :]
    for token in range(len(out)):
        if token in sampling.history:
            p = sampling.repetition_penalty
            out[token] = out[token] / p if out[token] > 0 else out[token] * p
        if token in output:
            out[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        out[token] += sampling.logit_bias.get(token, 0.0)
        if token in sampling.banned:
            out[token] = -math.inf
    return out


def slow_candidates(scores: list[float], sampling: Sampling) -> set[int]:
    """Min-p, then top-k of those, then top-p of those."""
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    left = [t for t in order if scores[t] >= scores[order[0]] + (math.log(sampling.min_p) if sampling.min_p else -99)]
    if sampling.top_k:
        left = left[: sampling.top_k]
    chances, total, nucleus = softmax([scores[t] for t in left]), 0.0, []
    for token, chance in zip(left, chances, strict=True):
        if total >= sampling.top_p:
            break
        nucleus.append(token)
        total += chance
    return set(nucleus)


# Far enough apart that float32 and Python agree on who is in.
SCORES = st.permutations([x * 0.37 - 3 for x in range(24)])


@settings(max_examples=200, deadline=None)
@given(
    scores=SCORES,
    top_k=st.sampled_from([0, 1, 3, 10, 24, 100]),
    top_p=st.sampled_from([0.05, 0.4, 0.77, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_same_tokens_are_kept(scores: list[float], top_k: int, top_p: float, min_p: float) -> None:
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    got = candidates(torch.tensor(scores) - max(scores), sampling).tolist()
    assert got == sorted(slow_candidates(scores, sampling))


@settings(max_examples=100, deadline=None)
@given(
    scores=SCORES,
    history=st.lists(st.integers(0, 23), max_size=30),
    prompt_length=st.integers(0, 30),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25]),
    bias=st.dictionaries(st.integers(0, 23), st.floats(-5, 5), max_size=4),
    banned=st.sets(st.integers(0, 23), max_size=3),
)
def test_penalties_bias_and_bans(
    scores: list[float],
    history: list[int],
    prompt_length: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    banned: set[int],
) -> None:
    sampling = Sampling(
        history=tuple(history),
        prompt_length=min(prompt_length, len(history)),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        banned=tuple(banned),
    )
    logits_V = torch.tensor(scores, dtype=torch.float64)
    before = logits_V.clone()
    got = apply_penalties(logits_V, sampling)
    torch.testing.assert_close(got, torch.tensor(slow_penalties(scores, sampling), dtype=torch.float64))
    assert torch.equal(logits_V, before), "log-probabilities are read from the same logits afterwards"


@pytest.mark.parametrize("slope", [1e-4, 1e-3, 4e-3])
def test_top_p_looks_as_deep_as_it_must(slope: float) -> None:
    scores_V = torch.arange(5000) * -slope
    left = len(candidates(scores_V, Sampling(temperature=1.0, top_p=0.9)))
    chances = torch.softmax(scores_V.double(), 0)
    want = int((chances.cumsum(0) - chances < 0.9).sum())
    assert abs(left - want) <= 1


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    got = candidates(torch.tensor([-1.0, 0.0, -1.0, -2.0]), Sampling(temperature=1.0, top_k=2))
    assert got.tolist() == [0, 1, 2]


def test_noise_is_gumbels_and_a_tokens_own() -> None:
    ids = torch.arange(100_000)
    drawn = gumbel_noise(ids, seed=7, position=3)
    assert torch.equal(gumbel_noise(ids[5::7], 7, 3), drawn[5::7]), "whatever else is drawn for"
    assert float(drawn.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(drawn.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    for other in (gumbel_noise(ids, 7, 4), gumbel_noise(ids, 8, 3), gumbel_noise(ids, 3, 7), drawn.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((drawn, other)))[0, 1])) < 0.02
    of_seeds = torch.cat([gumbel_noise(torch.tensor([11]), seed, 0) for seed in range(5000)])
    assert float(of_seeds.mean()) == pytest.approx(0.5772, abs=0.08)


def test_noise_is_splitmix() -> None:
    """The wrapping sums and shifts of torch's signed integers against Python's own."""
    for seed, position, token in ((0, 0, 0), (2**64 - 1, 5, 31999), (-1, 5, 31999), (12345, 2**20, 128_000)):
        state = _splitmix(_splitmix(seed % 2**64) ^ position)
        bits = _splitmix((state + token * GOLDEN_GAMMA - GOLDEN_GAMMA) % 2**64) >> 40
        want = -math.log(-math.log((bits + 0.5) / 2**24))
        assert float(gumbel_noise(torch.tensor([token]), seed, position)) == pytest.approx(want, rel=1e-12)


def test_no_noise_reaches_further_than_is_looked() -> None:
    lowest, highest = (-math.log(-math.log(u)) for u in (0.5 / 2**24, 1 - 0.5 / 2**24))
    assert highest - lowest < GUMBEL_SPREAD
