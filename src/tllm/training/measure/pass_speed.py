"""Measures how fast this process trains: a model's layers, its logits and its optimizer. Predictions use it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import solo
from tllm.core.timing import mean_seconds_each
from tllm.devices.choose import CPU
from tllm.devices.memory import completed
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh, whole
from tllm.planner.cost.flops import BACKWARD, layer_flops
from tllm.planner.measured.survey import SurveyedPass, documents
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.training.attention.varlen_attention import attention_on
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.optim.optimizer import Optimizer
from tllm.training.state.initial_weights import STD
from tllm.training.step.matmul_dtype import choose_matmul_dtype
from tllm.training.step.split_backward import input_half

LAYERS = 2
"""Layers of a pass: what the first of them needs beside is then not all that is measured."""

ELEMENTS = 2**22

Work = Callable[[], object]


class TrainingPasses(NamedTuple):
    """`update`: seconds of the optimizer for an element. `split`: how much longer layers take whose way back is in two
    halves."""

    layers: tuple[SurveyedPass, ...]
    logits: tuple[SurveyedPass, ...]
    update: float
    split: float


def training_passes(
    spec: ModelSpec,
    dtype: torch.dtype,
    length: int,
    rows: tuple[int, ...],
    optimizer: Optimizer,
    seconds: float,
    device: torch.device = CPU,
) -> TrainingPasses:
    """In about `seconds`, by turns, on this process's `device`. `rows`: tokens of a microbatch, in documents of
    `length`."""
    middle = dataclasses.replace(spec, layers=(spec.layers[0], *_some(spec), spec.layers[-1]))
    models = {ranks: _middle(middle, ranks, dtype, device) for ranks in ((1, 2) if spec.num_heads > 1 else (1,))}
    last = spec.num_layers
    mesh = Mesh(2, 3, range(last, last), solo(), cut_stage(spec, (1,))[0])
    end, loss = _filled(spec, mesh, dtype, device), NextTokenLoss(mesh)
    through = [(ranks, count) for ranks in models for count in rows]
    works: list[Work] = [_Through(models[ranks], dtype, count, length).whole for ranks, count in through]
    works += [partial(_through_logits, end, loss, *_ends(spec, dtype, count, length, device)) for count in rows]
    works += [_Through(models[1], dtype, rows[0], length).halves, _update(optimizer, dtype, device)]
    taken = iter(mean_seconds_each([completed(work, device) for work in works], seconds))
    layers = tuple(SurveyedPass(count, length, ranks, next(taken) / LAYERS) for ranks, count in through)
    logits = tuple(SurveyedPass(count, length, 1, next(taken)) for count in rows)
    split = next(taken) / LAYERS / layers[0].seconds
    return TrainingPasses(layers, logits, next(taken) / ELEMENTS, max(split, 1.0))


def _middle(spec: ModelSpec, ranks: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """What one of so many ranks has of the layers."""
    cut = cut_stage(spec, (1,) * ranks)[0]
    return _filled(spec, Mesh(1, 3, range(1, 1 + LAYERS), solo(), cut), dtype, device)


def _some(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers that stand for all: one from each half."""
    return tuple(spec.layers[(2 * i + 1) * spec.num_layers // (2 * LAYERS)] for i in range(LAYERS))


def _filled(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> Transformer:
    model = build(spec, mesh, dtype, device).requires_grad_()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=STD)
    if device == CPU:  # only the processor has a choice
        choose_matmul_dtype(model.parameters(), dtype)
    return model


class _Through:
    """So many rows through layers and back: at once, or the weights' gradients after that of the rows."""

    def __init__(self, model: Transformer, dtype: torch.dtype, rows: int, length: int) -> None:
        device = next(model.parameters()).device
        self.model, self.tokens = model, _tokens(rows, length, device)
        self.x_TD = torch.randn(rows, model.spec.hidden_size, dtype=dtype, device=device, requires_grad=True)

    def whole(self) -> None:
        torch.autograd.backward(self._forward().sum())
        _forget(self.model, self.x_TD)

    def halves(self) -> None:
        input_half(self._forward().sum(), None, self.x_TD)[1].run()
        _forget(self.model, self.x_TD)

    def _forward(self) -> Tensor:
        return _through_layers(self.model, self.x_TD, self.tokens)


def _through_layers(model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
    """As a microbatch of a step goes."""
    attend = attention_on(x_TD.device)(model.attention_specs(), tokens)
    out_TD: Tensor = model(x_TD, tokens.positions_T, attend, tokens.lengths_T if model.scales_by_length else None)
    return out_TD


def _ends(spec: ModelSpec, dtype: torch.dtype, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tokens]:
    x_TD = torch.randn(rows, spec.hidden_size, dtype=dtype, device=device, requires_grad=True)
    return x_TD, _tokens(rows, length, device)


def _through_logits(model: Transformer, loss: NextTokenLoss, x_TD: Tensor, tokens: Tokens) -> None:
    torch.autograd.backward(loss(model, x_TD, tokens).loss)
    _forget(model, x_TD)


def _update(optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> Work:
    """What a step does to `ELEMENTS`: the gradient's norm, the update, and the narrow weights of 16-bit ones."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights, gradient = (torch.full((ELEMENTS,), STD, dtype=wide, device=device) for _ in range(2))
    state = {name: torch.zeros(ELEMENTS, dtype=wide, device=device) for name in optimizer.states}
    narrow = torch.empty(ELEMENTS, dtype=dtype, device=device)

    @torch.no_grad()
    def update() -> None:
        gradient.norm()
        optimizer.update(weights, gradient, state, 1, 1e-4, 0.0)
        if dtype != wide:
            narrow.copy_(weights)

    return update


def _tokens(rows: int, length: int, device: torch.device) -> Tokens:
    each = list(documents(rows, length))
    places_T = torch.cat([torch.arange(count) for count in each])
    return Tokens(torch.zeros_like(places_T), torch.zeros_like(places_T), places_T, each).to(device)


def _forget(model: nn.Module, x_TD: Tensor) -> None:
    """Gradients are given back, as buckets take them over in a step."""
    model.zero_grad()
    x_TD.grad = None


TOKENS = 2048
"""At most so many are computed at once; more do not make products faster."""
SECONDS = 1.0


def layer_speed(
    spec: ModelSpec, dtype: torch.dtype, seq_len: int, microbatch_size: int, device: torch.device = CPU
) -> float:
    """Floating-point operations per second of forward and backward passes through a layer, on this process's `device`.

    The middle layer, uncut, over rows of one document each: the best of some passes in about a second.
    """
    middle, uncut = spec.num_layers // 2, whole(spec)
    model = _filled(spec, Mesh(1, 3, range(middle, middle + 1), uncut.tp, uncut.cut), dtype, device)
    length = min(seq_len, TOKENS)
    rows = length * max(1, min(microbatch_size, TOKENS // length))
    work = (1 + BACKWARD) * layer_flops(spec, spec.layers[middle], uncut.cut, documents(rows, length))
    passes = completed(_Through(model, dtype, rows, length).whole, device)
    best, until = 0.0, time.perf_counter() + SECONDS
    while not best or time.perf_counter() < until:
        begun = time.perf_counter()
        passes()
        best = max(best, work / (time.perf_counter() - begun))
    return best
