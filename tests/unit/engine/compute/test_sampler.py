"""Tokens sampled of many rows together, against a slow twin that samples row by row, and what a choice depends on."""

from __future__ import annotations

import math
import random

import pytest
import torch
from msgspec.structs import replace

from tests.support.serving import row_sampler
from tllm.comm.collectives.group import solo
from tllm.engine.compute import sampler
from tllm.engine.compute.logprobs import token_logprobs
from tllm.engine.compute.sampler import sample_tokens
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, Sampling
from tllm.engine.schedule.grammar_state import pack_mask
from tllm.spec.request import TokenLogprobs

Wanted = list[tuple[Sampling, int]]


def random_sampling(dice: random.Random, vocab: int) -> Sampling:
    history = tuple(dice.randrange(vocab) for _ in range(dice.choice([0, 0, 5, 60])))
    temperature = dice.choice([0.0, 1e-5, 0.3, 1.0, 1.7])
    mask = pack_mask(dice.getrandbits(vocab) | 1, -(-vocab // 8)) if dice.random() < 0.2 else b""
    return Sampling(
        temperature=temperature,
        seed=dice.randrange(-(2**63), 2**64),
        top_p=dice.choice([1.0, 1.0, 0.95, 0.5, 1e-6, dice.uniform(0.01, 1)]),
        top_k=dice.choice([0, 0, 1, 40, vocab, dice.randrange(vocab)]),
        min_p=dice.choice([0.0, 0.0, 0.05, 1.0]),
        history=history,
        prompt_length=dice.randrange(len(history) + 1),
        repetition_penalty=dice.choice([1.0, 1.3, 0.8]),
        presence_penalty=dice.choice([0.0, 0.5, -1.0]),
        frequency_penalty=dice.choice([0.0, 0.37]),
        logit_bias={dice.randrange(vocab): dice.uniform(-5, 5) for _ in range(dice.choice([0, 3]))},
        banned=tuple(dice.randrange(vocab) for _ in range(dice.choice([0, 2]))) if not mask else (),
        mask=mask,
        logprobs=dice.choice([None, 0, 5, 20]),
        tempered_logprobs=temperature > 0 and dice.random() < 0.5,
    )


def random_entry(dice: random.Random, key: int, vocab: int) -> BatchEntry:
    """A reply's next token, one with draft tokens before it, or a prompt whose log-probabilities are wanted."""
    count, drafts, targets = dice.choice([(1, 0, 0), (3, 2, 0), (9, 0, 8)])
    sampling = replace(random_sampling(dice, vocab), history=(), prompt_length=0, mask=b"")
    return BatchEntry(
        key=key,
        start=dice.randrange(50),
        count=count,
        prompt_length=60,
        page_table=((0, 20),),
        sampling=sampling,
        targets=tuple(dice.randrange(vocab) for _ in range(targets)),
        prompt_top=key % 4 if targets else 0,
        num_draft_tokens=drafts,
    )


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_rows_of_a_batch_are_each_their_own_wherever_a_piece_of_logits_ends(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", at_once)
    torch.manual_seed(5)
    dice, vocab = random.Random(5), 30
    entries = tuple(random_entry(dice, key, vocab) for key in range(30))
    logits_TV = torch.randn(sum(entry.count for entry in entries), vocab)
    ids, logprobs, of_prompts, stop = list[int](), list[TokenLogprobs | None](), list[tuple[TokenLogprobs, ...]](), 0
    for entry in entries:
        rows, stop = logits_TV[stop : stop + entry.count], stop + entry.count
        assert entry.sampling is not None
        top, heat = entry.sampling.logprobs, entry.sampling.temperature if entry.sampling.tempered_logprobs else 1.0
        for back in range(entry.num_draft_tokens, -1, -1):
            row = rows[entry.count - 1 - back]
            ids.append(row_sampler.sample_token(row, entry.sampling, entry.stop - back))
            logprobs.append(None if top is None else row_sampler.token_logprobs(row / heat, ids[-1], top))
        if entry.targets:
            told = zip(rows, entry.targets, strict=False)
            of_prompts.append(tuple(row_sampler.token_logprobs(row, id, entry.prompt_top) for row, id in told))
    with torch.inference_mode():
        found = sampler.Sampler(lambda x: x, solo(), [(0, vocab)])(logits_TV, Batch(1, entries, (0,) * stop))
    want = Results(number=1, token_ids=tuple(ids), logprobs=tuple(logprobs), prompt_logprobs=tuple(of_prompts))
    assert found == want


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(("vocab", "scale"), [(7, 2.0), (257, 0.5), (1000, 6.0), (3000, 1.0)])
def test_rows_together_are_the_rows_of_the_slow_twin(by_kernel: bool, vocab: int, scale: float) -> None:
    dice = random.Random(vocab)
    torch.manual_seed(vocab)
    for rows in (1, 16, 48):
        logits_RV = torch.randn(rows, vocab) * scale
        if rows == 16:
            logits_RV = logits_RV.bfloat16().float()  # many are equal
        wanted = [(random_sampling(dice, vocab), dice.randrange(2**20)) for _ in range(rows)]
        before = logits_RV.clone()
        with torch.inference_mode(by_kernel):  # where there could be gradients, torch draws
            ids_R = sample_tokens(logits_RV, wanted)
            tempered = [one.temperature if one.tempered_logprobs else 1.0 for one, _ in wanted]
            token_ids, logprobs = token_logprobs(logits_RV, ids_R, [one.logprobs for one, _ in wanted], tempered)
        assert torch.equal(logits_RV, before)
        for row, (sampling, position) in enumerate(wanted):
            want = row_sampler.sample_token(logits_RV[row], sampling, position)
            assert token_ids[row] == want, (sampling, position)
            scores_V = logits_RV[row] / tempered[row]
            top = sampling.logprobs
            assert logprobs[row] == (None if top is None else row_sampler.token_logprobs(scores_V, want, top))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 300)
    asked = [Sampling(temperature=1.0, seed=seed, top_p=0.95) for seed in range(40)]
    wanted: Wanted = [(sampling, 100 + seed) for seed, sampling in enumerate(asked)]
    torch.manual_seed(99)
    there = sample_tokens(rows, wanted).tolist()
    assert sample_tokens(rows.flip(0), wanted[::-1]).tolist() == there[::-1]
    assert there != sample_tokens(rows, [(one, at + 1) for one, at in wanted]).tolist()
    assert there != sample_tokens(rows, [(asked[(n + 1) % 40], 100 + n) for n in range(40)]).tolist()


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5, 1e4, 1e300])
def test_extreme_temperatures_choose_something_allowed(temperature: float, by_kernel: bool) -> None:
    logits_RV = torch.tensor([[3.0, 900.0, -900.0, 899.0]])
    with torch.inference_mode(by_kernel):
        token = int(sample_tokens(logits_RV, [(Sampling(temperature=temperature, seed=1, top_k=3, banned=(0,)), 0)]))
    assert token in (1, 2, 3)
    if temperature < 1:
        assert token == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-38])
def test_log_probabilities_at_hardly_any_temperature_are_numbers(temperature: float) -> None:
    logits_RV = torch.tensor([[3.0, 900.0, -900.0, -math.inf], [-1e8, -1e8, -1e9, -1e9]])
    first, second = token_logprobs(logits_RV, torch.tensor([1, 0]), [4, 4], [temperature] * 2)[1]
    assert first is not None and second is not None
    assert (first.logprob, first.rank, first.top[0]) == (0.0, 1, (1, 0.0))
    assert all(value < -1e30 for _, value in first.top[1:])
    assert second.logprob == pytest.approx(-math.log(2)) and second.top[1] == (1, second.logprob)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample_tokens(torch.tensor([[1.0, 5.0, 5.0]]), [(Sampling(), 0)]).tolist() == [1]


def test_the_chosen_value_is_the_one_in_the_list() -> None:
    torch.manual_seed(3)
    logits_RV = torch.randn(2, 1000) * 5
    token = int(logits_RV[0].argmax())
    [first, second] = token_logprobs(logits_RV, torch.tensor([token, 3]), [5, 0])[1]
    assert first is not None and second is not None
    assert first.top[0] == (token, first.logprob)
    want = torch.log_softmax(logits_RV.double(), -1)
    assert first.logprob == pytest.approx(float(want[0, token]), abs=1e-5)
    assert [t for t, _ in first.top] == want[0].topk(5).indices.tolist()
    assert second.token_id == 3 and second.top == ()


def test_of_logits_that_are_no_numbers_no_token_is_drawn() -> None:
    logits_RV = torch.tensor([[0.0, math.nan], [0.0, 1.0]])
    for logprobs, temperature in ((None, 1.0), (1, 1.0), (None, 0.0), (1, 0.0)):
        ids_R = sample_tokens(logits_RV, [(Sampling(temperature=temperature), 0)] * 2)
        assert token_logprobs(logits_RV, ids_R, [logprobs] * 2)[0][0] == 2
