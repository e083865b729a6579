"""The sampler against plain references over Python floats, and against everything that a choice must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.engine.batch import Sampling
from tllm.engine.sampler import Sampler, altered, kept, mix, scored


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def slow_altered(logits: list[float], sampling: Sampling) -> list[float]:
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


def slow_kept(scores: list[float], sampling: Sampling) -> set[int]:
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
    got = kept(torch.tensor(scores), sampling)
    assert {t for t, s in enumerate(got.tolist()) if s > -math.inf} == slow_kept(scores, sampling)


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
    got = altered(logits_V, sampling)
    torch.testing.assert_close(got, torch.tensor(slow_altered(scores, sampling), dtype=torch.float64))
    assert torch.equal(logits_V, before), "log-probabilities are read from the same logits afterwards"


def test_top_p_looks_beyond_the_likeliest() -> None:
    """A flat distribution over more tokens than are looked at first."""
    scores_V = torch.arange(5000) * -1e-4
    left = int((kept(scores_V, Sampling(temperature=1.0, top_p=0.9)) > -math.inf).sum())
    chances = torch.softmax(scores_V.double(), 0)
    want = int((chances.cumsum(0) - chances < 0.9).sum())
    assert abs(left - want) <= 1


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    got = kept(torch.tensor([1.0, 2.0, 1.0, 0.0]), Sampling(temperature=1.0, top_k=2))
    assert (got > -math.inf).tolist() == [True, True, True, False]


def test_draws_follow_the_chances() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    sampler, draws = Sampler(), 20000
    counts = [0] * 5
    for position in range(draws):
        counts[sampler.choose(logits_V, Sampling(temperature=0.7, seed=5), position)] += 1
    for count, chance in zip(counts, softmax([x / 0.7 for x in logits_V.tolist()]), strict=True):
        assert abs(count - draws * chance) < 5 * math.sqrt(draws * chance * (1 - chance))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 300)
    asked = [Sampling(temperature=1.0, seed=seed, top_p=0.95) for seed in range(40)]
    sampler = Sampler()
    there = [sampler.choose(rows[i], asked[i], 100 + i) for i in range(40)]
    torch.manual_seed(99)
    back = [Sampler().choose(rows[i], asked[i], 100 + i) for i in reversed(range(40))]
    assert there == back[::-1]
    assert there != [sampler.choose(rows[i], asked[i], 101 + i) for i in range(40)]
    assert torch.initial_seed() == 99, "the process's own generator is left alone"


def test_seeds_mix_well() -> None:
    seen = {mix(seed, position) % 2**32 for seed in range(100) for position in range(100)}
    assert len(seen) > 9990  # of 10,000: a birthday or two among 32 bits
    assert mix(2**64 - 1, 3) == mix(-1, 3) < 2**63
    assert mix(0, 1) != mix(1, 0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e4])
def test_extreme_temperatures_choose_something_allowed(temperature: float) -> None:
    logits_V = torch.tensor([3.0, 900.0, -900.0, 899.0])
    token = Sampler().choose(logits_V, Sampling(temperature=temperature, seed=1, banned=(0,)), 0)
    assert token != 0
    if temperature < 1:
        assert token == 1


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler().choose(torch.tensor([1.0, 5.0, 5.0]), Sampling(), 0) == 1


def test_the_chosen_value_is_the_one_in_the_list() -> None:
    torch.manual_seed(3)
    logits_V = torch.randn(1000) * 5
    token = int(logits_V.argmax())
    found = scored(logits_V, token, 5)
    assert found.top[0] == (token, found.logprob)
    want = torch.log_softmax(logits_V.double(), 0)
    assert found.logprob == pytest.approx(float(want[token]), abs=1e-5)
    assert [t for t, _ in found.top] == want.topk(5).indices.tolist()
    assert scored(logits_V, 3, 0).top == ()
