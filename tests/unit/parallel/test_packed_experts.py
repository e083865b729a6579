"""Experts in few bits: a stack's product is that of its weights, and sums are alike to the bit however they are cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.few_bits import KINDS, name_of, take, ways
from tllm.comm.collectives.group import solo
from tllm.kernels.library import Library
from tllm.model.mlp import gate
from tllm.model.moe import clamped_swiglu
from tllm.parallel import experts as experts_module
from tllm.parallel import quantized_weight
from tllm.parallel.experts import Experts, ExpertSum, StackedExperts
from tllm.parallel.quantized_weight import (
    PackedRows,
    QuantizedStack,
    QuantizedWeight,
    carry,
    empty_parameter,
    quantized_stack,
    weight_bytes,
)
from tllm.quantization.blocks import Blocks, dequantize
from tllm.quantization.packed_layout import pack
from tllm.quantization.reference_matmul import on_grid, reference_matmul
from tllm.spec.cut import Range

COUNT, HIDDEN, WIDTH, CHOICES = 5, 96, 128, 2


@pytest.fixture(params=ways(), ids=name_of)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return take(request.param, monkeypatch)


def weight_of(blocks: Blocks) -> QuantizedWeight:
    outputs, columns = blocks.codes.shape
    return QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, outputs, columns)], columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_stack_multiplies_each_experts_rows_with_its_weight(kind: str, exact: bool, kernels: Library) -> None:
    torch.manual_seed(0)
    weights = [weight_of(KINDS[kind](37, 256)) for _ in range(COUNT)]
    stack, counts = QuantizedStack(weights), (3, 0, 141, 1, 20)
    bounds = list(itertools.accumulate(counts, initial=0))
    x = torch.randn(bounds[-1], 256) * 2e-5
    want = [weight.matmul(x[a:b], exact) for weight, (a, b) in zip(weights, itertools.pairwise(bounds), strict=True)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(stack.matmul(x, torch.tensor(bounds), exact), torch.cat(want))
    finally:
        torch.set_num_threads(before)
    assert stack.nbytes == sum(weight.nbytes for weight in weights)
    assert stack.matmul(x[:0], torch.zeros(COUNT + 1, dtype=torch.int64)).shape == (0, 37)


def test_experts_of_several_formats_and_plain_ones(kernels: Library) -> None:
    torch.manual_seed(1)
    plain, four, eight = torch.randn(32, 256), KINDS["rounded_to_4"](32, 256), KINDS["groups_of_16"](32, 256)
    halves = [PackedRows(pack(four), four.scheme, 32, 256), PackedRows(pack(eight), eight.scheme, 32, 256)]
    weights = [QuantizedWeight(parts, 256) for parts in (halves, [halves[1], plain], [plain, halves[0]])]
    x, bounds = torch.randn(9, 256), [0, 4, 6, 9]
    found = QuantizedStack(weights).matmul(x, torch.tensor(bounds))
    for weight, (a, b) in zip(weights, itertools.pairwise(bounds), strict=True):
        assert torch.equal(found[a:b], weight.matmul(x[a:b]))


def packed_parameter(matrices: list[Blocks], transposed: bool) -> nn.Parameter:
    outputs, columns = matrices[0].codes.shape
    shape = torch.Size((len(matrices), *((columns, outputs) if transposed else (outputs, columns))))
    parameter = empty_parameter(shape, torch.float32)
    carry(parameter, QuantizedStack([weight_of(blocks) for blocks in matrices]))
    return parameter


def small_by_table(outputs: int, columns: int) -> Blocks:
    """As MXFP4, with numbers of the size that weights have."""
    blocks = KINDS["by_small_table"](outputs, columns)
    return replace(blocks, scales=blocks.scales - 6)


class Case:
    """Random experts, of which a rank can have any widths and any experts: with gate above up, or by turns."""

    def __init__(self, by_turns: bool) -> None:
        torch.manual_seed(2)
        kind = small_by_table if by_turns else KINDS["rounded_to_4"]
        self.by_turns = by_turns
        self.into = [kind(2 * WIDTH, HIDDEN) for _ in range(COUNT)]
        self.out = [kind(HIDDEN, WIDTH) for _ in range(COUNT)]
        self.into_bias, self.out_bias = torch.randn(COUNT, 2 * WIDTH), torch.randn(COUNT, HIDDEN)
        self.act = clamped_swiglu(2.0, 1.7) if by_turns else partial(gate, activation="silu")

    def held(self, experts: Range = (0, COUNT), columns: Range = (0, WIDTH)) -> ExpertSum:
        """What a rank with these experts and widths holds."""
        start, stop = columns
        here = slice(*experts)
        out = [blocks.narrow(-1, start, stop) for blocks in self.out[here]]
        if not self.by_turns:
            parts = [[(start, stop), (WIDTH + start, WIDTH + stop)]] * len(out)
            made = Experts((experts,), columns, HIDDEN, "{}.{}".format, self.act, solo())
            into = [
                QuantizedWeight([self._rows(blocks, part) for part in both], HIDDEN)
                for blocks, both in zip(self.into[here], parts, strict=True)
            ]
            made.gate_up = empty_parameter(made.gate_up.shape, torch.float32)
            carry(made.gate_up, QuantizedStack(into))
            made.down = packed_parameter(out, transposed=False)
            return made
        stacked = StackedExperts((experts,), columns, HIDDEN, "experts", self.act, solo())
        rows = [blocks.narrow(-2, 2 * start, 2 * stop) for blocks in self.into[here]]
        stacked.gate_up, stacked.down = packed_parameter(rows, True), packed_parameter(out, True)
        stacked.gate_up_bias.data = self.into_bias[here, 2 * start : 2 * stop]
        if stacked.down_bias is not None:
            stacked.down_bias.data = self.out_bias[here]
        return stacked

    def slow(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """A token and an expert at a time."""
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
        for token, choice in itertools.product(range(len(x_TD)), range(CHOICES)):
            expert, weight = int(experts_TK[token, choice]), weights_TK[token, choice]
            y = reference_matmul(x_TD[token, None], pack(self.into[expert]), self.into[expert].scheme, 2 * WIDTH)
            y = self.act(y + self.into_bias[expert] if self.by_turns else y) * weight
            y_TD[token] += reference_matmul(y, pack(self.out[expert]), self.out[expert].scheme, HIDDEN, exact=True)[0]
            if self.by_turns:
                y_TD[token] += on_grid(self.out_bias[expert] * weight)
        return y_TD

    @staticmethod
    def _rows(blocks: Blocks, part: Range) -> PackedRows:
        some = blocks.narrow(-2, *part)
        return PackedRows(pack(some), some.scheme, part[1] - part[0], HIDDEN)


def rows(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(3)
    chosen = torch.rand(tokens, COUNT, generator=dice).topk(CHOICES).indices
    return torch.randn(tokens, HIDDEN, generator=dice), torch.rand(tokens, CHOICES, generator=dice), chosen


@pytest.mark.parametrize("by_turns", [False, True])
def test_sums_over_experts_are_alike_however_they_are_cut(
    by_turns: bool, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, (x, weights, chosen) = Case(by_turns), rows(11)
    with torch.no_grad():
        whole = case.held()(x, weights, chosen)
        assert whole.dtype == torch.float64 and torch.equal(whole, case.slow(x, weights, chosen))
        widths = [case.held(columns=part)(x, weights, chosen) for part in ((0, 32), (32, 96), (96, 128))]
        assert torch.equal(sum(widths[::-1]), whole)
        spread = [case.held(experts=part)(x, weights, chosen) for part in ((0, 2), (2, COUNT))]
        assert torch.equal(sum(spread), whole)
        assert torch.equal(case.held()(x, weights.flip(1), chosen.flip(1)), whole), "the order of a token's choices"
        for token in range(len(x)):
            some = slice(token, token + 1)
            assert torch.equal(case.held()(x[some], weights[some], chosen[some]), whole[some])
        monkeypatch.setattr(experts_module, "ROWS_AT_ONCE", 5)
        assert torch.equal(case.held()(x, weights, chosen), whole)
        monkeypatch.setattr(quantized_weight, "library", lambda: None)
        assert torch.equal(case.held()(x, weights, chosen), whole), "steps of torch"


@pytest.mark.parametrize("by_turns", [False, True])
def test_experts_are_near_those_of_plain_numbers(by_turns: bool) -> None:
    """What differs is the rounding of activations to 8 bits: about 1 % of them."""
    case, (x, weights, chosen) = Case(by_turns), rows(40)
    held = case.held()
    plain = case.held()
    for name in ("gate_up", "down"):
        matrices = [dequantize(blocks) for blocks in (case.into if name == "gate_up" else case.out)]
        setattr(plain, name, nn.Parameter(torch.stack([m.t() if by_turns else m for m in matrices])))
    with torch.no_grad():
        found, want = held(x, weights, chosen), plain(x, weights, chosen)
    assert want.dtype == torch.float32 and quantized_stack(held.down) is not None
    assert ((found - want).norm() / want.norm()) < 0.02


def test_a_stack_takes_the_bytes_of_its_codes_and_scales() -> None:
    case = Case(by_turns=True)
    held = case.held()
    assert weight_bytes(held.gate_up) == COUNT * 2 * WIDTH * HIDDEN * 17 // 32, "4.25 bits a weight, as in files"
    assert weight_bytes(held.down) == COUNT * HIDDEN * WIDTH * 17 // 32


def test_only_one_stack_in_few_bits(kernels: Library) -> None:
    """A file may have one of an expert's matrices in plain numbers: products are then one by one."""
    case, (x, weights, chosen) = Case(by_turns=False), rows(6)
    mixed = case.held()
    mixed.down = nn.Parameter(torch.stack([dequantize(blocks) for blocks in case.out]))
    want = torch.zeros(6, HIDDEN)
    with torch.no_grad():
        found = mixed(x, weights, chosen)
        for token, choice in itertools.product(range(6), range(CHOICES)):
            expert = int(chosen[token, choice])
            y = case.act(weight_of(case.into[expert]).matmul(x[token, None]))
            want[token] += (F.linear(y, mixed.down[expert]) * weights[token, choice])[0]
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-4)
