"""Penalties, bias, bans and masks of many rows against plain references over Python floats."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.engine.compute.logits_processing import draws_of, processed
from tllm.engine.schedule.batch import Sampling
from tllm.engine.schedule.grammar_state import pack_mask


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


# Far enough apart that float32 and Python agree on who is in.
SCORES = st.permutations([x * 0.37 - 3 for x in range(24)])

SAMPLINGS = st.builds(
    lambda history, prompt, repetition, presence, frequency, bias, banned: Sampling(
        history=tuple(history),
        prompt_length=min(prompt, len(history)),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        banned=tuple(banned),
    ),
    st.lists(st.integers(0, 23), max_size=30),
    st.integers(0, 30),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.25]),
    st.dictionaries(st.integers(0, 23), st.floats(-5, 5), max_size=4),
    st.sets(st.integers(0, 23), max_size=3),
)


@settings(max_examples=examples(60))
@given(rows=st.lists(st.tuples(SCORES, SAMPLINGS), min_size=1, max_size=4))
def test_penalties_bias_and_bans(rows: list[tuple[list[float], Sampling]]) -> None:
    logits_RV = torch.tensor([scores for scores, _ in rows], dtype=torch.float64)
    before = logits_RV.clone()
    got = processed(logits_RV, [sampling for _, sampling in rows])
    torch.testing.assert_close(got, torch.tensor([slow_penalties(*row) for row in rows], dtype=torch.float64))
    assert torch.equal(logits_RV, before), "log-probabilities are read from the same logits afterwards"


def test_rows_that_ask_for_nothing_stay_as_they_are() -> None:
    logits_RV = torch.randn(3, 21)
    assert processed(logits_RV, [Sampling(), Sampling(temperature=1.0, top_p=0.5), Sampling(logprobs=2)]) is logits_RV
    draws = draws_of(logits_RV, [(Sampling(temperature=0.5, seed=-1), 7)] * 3)
    assert draws.least is None and draws.top_p is None
    assert draws.seeds.tolist() == [[-1]] * 3 and draws.positions.tolist() == [[7]] * 3
    assert draws_of(logits_RV, [(Sampling(seed=2**64 - 1), 0)] * 3).seeds.tolist() == [[-1]] * 3


def test_a_mask_takes_out_what_it_does_not_allow() -> None:
    scores_RV = torch.arange(21.0).repeat(3, 1)
    got = processed(scores_RV, [Sampling(mask=pack_mask(1 << 3 | 1 << 20, 3)), Sampling(), Sampling(banned=(0,))])
    assert got[0].isfinite().nonzero().flatten().tolist() == [3, 20]
    assert got[0, 3] == 3 and got[0, 20] == 20
    assert torch.equal(got[1:, 1:], scores_RV[1:, 1:]) and got[:, 0].tolist() == [-math.inf, 0, -math.inf]


def test_top_k_and_min_p_are_a_least_score() -> None:
    logits_RV = torch.tensor([[-1.0, 0.0, -1.0, -2.0], [1.0, 4.0, 3.0, 2.0]])
    asked = [Sampling(temperature=1.0, top_k=2), Sampling(temperature=2.0, min_p=0.5, top_k=3)]
    least = draws_of(logits_RV, [(one, 0) for one in asked]).least
    assert least is not None and least.tolist() == [[-1.0], [max(math.log(0.5), -1.0)]]
    unlimited = draws_of(logits_RV, [(asked[0], 0), (Sampling(temperature=1.0, top_k=4), 0)]).least
    assert unlimited is not None and unlimited.tolist() == [[-1.0], [-math.inf]]
