"""The gated delta rule against a loop written from the paper's equation 10, and faults of states that must show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.engine.test_generation import GREEDY, LENGTHS, greedy_truth, prompts
from tests.parity.model.test_layouts import prompt
from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under
from tests.support.models.reference_gradients import apart, gradients_under, packed
from tllm.engine.compute.recurrent_states import RecurrentStates, StateRuns
from tllm.engine.engine import Engine
from tllm.engine.schedule.batch import BatchEntry
from tllm.engine.schedule.limits import EngineConfig
from tllm.model import gated_delta_net, recurrence
from tllm.model.gated_delta_net import chunked_rule, recurrent_rule
from tllm.model.transformer import Transformer
from tllm.training.attention import packed_attention

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_model("qwen3_5", path)
    return path


def rows(tokens: int, B: int = 2, N: int = 3, K: int = 5, V: int = 7) -> tuple[Tensor, Rows]:
    """A state, and queries, keys of length 1, values, log alphas and betas; in float64."""
    dice = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(B, N, tokens, K, generator=dice, dtype=torch.float64) for _ in range(2))
    v = torch.randn(B, N, tokens, V, generator=dice, dtype=torch.float64)
    a, b = (torch.rand(B, N, tokens, generator=dice, dtype=torch.float64) for _ in range(2))
    state = torch.randn(B, N, K, V, generator=dice, dtype=torch.float64)
    return state, (q, k / k.norm(dim=-1, keepdim=True), v, (0.5 + 0.5 * a).log(), b)


def of_the_paper(S_BNKV: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T, and o_t = S_t q_t, where S is [V, K]."""
    q, k, v, log_alpha, beta = rows
    outs = torch.zeros_like(v)
    states = S_BNKV.transpose(-1, -2).clone()
    for b in range(len(q)):
        for n in range(q.shape[1]):
            S = states[b, n]
            for t in range(q.shape[2]):
                k_t, eye = k[b, n, t], torch.eye(q.shape[-1], dtype=q.dtype)
                fades = log_alpha[b, n, t].exp() * (eye - beta[b, n, t] * torch.outer(k_t, k_t))
                S = S @ fades + beta[b, n, t] * torch.outer(v[b, n, t], k_t)
                outs[b, n, t] = S @ q[b, n, t]
            states[b, n] = S
    return outs, states.transpose(-1, -2)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_chunks_equal_the_loop_of_the_paper(tokens: int) -> None:
    state, of_tokens = rows(tokens)
    want, last = of_the_paper(state, of_tokens)
    got, then = chunked_rule(state, *of_tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(then, last, rtol=0, atol=1e-12)


def test_one_token_after_another_equals_the_loop_of_the_paper() -> None:
    state, of_tokens = rows(40)
    want, last = of_the_paper(state, of_tokens)
    outs = []
    for t in range(40):
        o, state = recurrent_rule(state, *(x[:, :, t : t + 1] for x in of_tokens))
        outs.append(o)
    torch.testing.assert_close(torch.cat(outs, dim=2), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def forget_the_first_chunk(S_BNKV: Tensor, *of_tokens: Tensor) -> tuple[Tensor, Tensor]:
    return chunked_rule(torch.zeros_like(S_BNKV), *of_tokens)


def take_the_neighbours_key_head(rank: int, model: Transformer) -> None:
    net = model.layers["1"].attention
    net.key_of = net.key_of[1:] + net.key_of[:1]


def turn_alpha_and_beta(rank: int, model: Transformer) -> None:
    weight = model.layers["0"].attention.in_proj.weight
    heads = weight.data[-12 // 2 :].clone()  # b and a of this rank's 3 value heads
    weight.data[-6:] = heads.roll(3, dims=0)


@pytest.mark.parametrize("mutate", [take_the_neighbours_key_head, turn_alpha_and_beta], ids=lambda one: one.__name__)
def test_a_fault_in_one_place_shows(mutate: Callable[[int, Transformer], None], folder: Path) -> None:
    want = logits_under(folder, "pp=1", prompt(24), torch.float64)
    got = logits_under(folder, "tp=2", prompt(24), torch.float64, mutate)
    assert (got - want).abs().max() > 1e-3


def test_a_document_that_goes_on_from_the_one_before_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As packed documents would, if states were not reset at their boundaries."""
    tokens = packed([7, 7, 18])
    _, want = gradients_under(folder, "pp=1", tokens, torch.float64)

    def leak(runs: object, advance: recurrence.Advance, *of_tokens: Tensor) -> Tensor:
        return recurrence.recur_afresh([(1, 32)], advance, *of_tokens)

    monkeypatch.setattr(packed_attention, "recur_afresh", leak)
    _, got = gradients_under(folder, "pp=1", tokens, torch.float64)
    assert max(apart(got, want).values()) > 1e-3


CHUNKED = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=3, max_num_batched_tokens=11)
"""Fewer places than prompts, so that a slot is used again."""


def ids(folder: Path) -> list[list[int]]:
    with Engine.load(folder, "pp=1", CHUNKED) as engine:
        return engine.generate(prompts()[::-1], GREEDY)[::-1]  # the shortest last: a long one lets old states fade


def forget_to_begin(self: StateRuns, states: RecurrentStates, entries: tuple[BatchEntry, ...]) -> None:
    BEGIN(self, states, entries)
    self.begins = self.begins[:0]


def take_the_neighbours_convolution(self: StateRuns, states: RecurrentStates, entries: tuple[BatchEntry, ...]) -> None:
    BEGIN(self, states, entries)
    for run in self.runs:
        read = run.read
        run.read = lambda held, read=read: (read((held[0].roll(1, 0), held[1]))[0], read(held)[1])  # type: ignore[method-assign]


BEGIN = StateRuns.__init__


def test_faults_of_slots_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = greedy_truth(save_model("qwen3_5", tmp_path))
    assert len(LENGTHS) > CHUNKED.max_num_seqs
    assert ids(tmp_path) == truth
    for fault in (forget_to_begin, take_the_neighbours_convolution):
        with monkeypatch.context() as patched:
            patched.setattr(StateRuns, "__init__", fault)
            assert ids(tmp_path) != truth, fault
    monkeypatch.setattr(gated_delta_net, "chunked_rule", forget_the_first_chunk)
    assert ids(tmp_path) != truth


def test_prefix_caching_is_switched_off_and_it_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tllm.engine")
    with Engine.load(folder, "pp=1", EngineConfig(dtype="float32", cache_tokens=64)) as engine:
        assert "prefix caching is off" in caplog.text and "prefix" not in "".join(engine.stats())
