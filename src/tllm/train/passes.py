"""How fast this process trains a model's layers, its logits and its optimizer: what seconds of a step come from."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.comm.group import solo
from tllm.ground.timing import mean_seconds
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.planner.survey import Passed, documents
from tllm.spec.cut import cut_stage
from tllm.spec.model import LayerSpec, ModelSpec
from tllm.train.attend import TrainAttend
from tllm.train.halves import input_half
from tllm.train.initial import STD
from tllm.train.objective import NextToken
from tllm.train.optimizer import Optimizer
from tllm.train.tensors import Tokens

LAYERS = 2
"""Layers of a pass: what the first of them needs beside is then not all that is measured."""

ELEMENTS = 2**22


class TrainingPasses(NamedTuple):
    """`update`: seconds of the optimizer for an element. `split`: how much longer layers take whose way back is in two
    halves."""

    layers: tuple[Passed, ...]
    logits: tuple[Passed, ...]
    update: float
    split: float


def training_passes(
    spec: ModelSpec, dtype: torch.dtype, length: int, rows: tuple[int, ...], optimizer: Optimizer, seconds: float
) -> TrainingPasses:
    """In about `seconds`. `rows`: tokens of a microbatch, in documents of `length`."""
    cuts = (1, 2) if spec.num_heads > 1 else (1,)
    share = seconds / ((len(cuts) + 1) * len(rows) + 2)
    middle = dataclasses.replace(spec, layers=(spec.layers[0], *_some(spec), spec.layers[-1]))
    layers, split = list[Passed](), 1.0
    for ranks in cuts:
        cut = cut_stage(spec, (1,) * ranks)[0]
        model = _filled(middle, Mesh(1, 3, range(1, 1 + LAYERS), solo(), cut), dtype)
        for count in rows:
            taken = mean_seconds(_Through(model, dtype, count, length).whole, share) / LAYERS
            layers.append(Passed(count, length, ranks, taken))
        if ranks == 1:
            split = mean_seconds(_Through(model, dtype, rows[0], length).halves, share) / LAYERS / layers[0].seconds
    last = spec.num_layers
    mesh = Mesh(2, 3, range(last, last), solo(), cut_stage(spec, (1,))[0])
    end = _filled(spec, mesh, dtype)
    logits = tuple(_through_logits(spec, end, NextToken(mesh), dtype, count, length, share) for count in rows)
    return TrainingPasses(tuple(layers), logits, _update(optimizer, dtype, share), max(split, 1.0))


def _some(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers that stand for all: one from each half."""
    return tuple(spec.layers[(2 * i + 1) * spec.num_layers // (2 * LAYERS)] for i in range(LAYERS))


def _filled(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype) -> Transformer:
    model = build(spec, mesh, dtype).requires_grad_()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=STD)
    return model


class _Through:
    """So many rows through layers and back: at once, or the weights' gradients after that of the rows."""

    def __init__(self, model: Transformer, dtype: torch.dtype, rows: int, length: int) -> None:
        self.model, self.tokens = model, _tokens(rows, length)
        self.x_TD = torch.randn(rows, model.spec.hidden_size, dtype=dtype, requires_grad=True)

    def whole(self) -> None:
        torch.autograd.backward(self._forward().sum())
        _forget(self.model, self.x_TD)

    def halves(self) -> None:
        input_half(self._forward().sum(), None, self.x_TD)[1].run()
        _forget(self.model, self.x_TD)

    def _forward(self) -> Tensor:
        attend = TrainAttend(self.model.attention_specs(), self.tokens)
        out_TD: Tensor = self.model(self.x_TD, self.tokens.positions_T, attend, self.tokens.lengths_T)
        return out_TD


def _through_logits(
    spec: ModelSpec, model: Transformer, loss: NextToken, dtype: torch.dtype, rows: int, length: int, seconds: float
) -> Passed:
    tokens = _tokens(rows, length)
    x_TD = torch.randn(rows, spec.hidden_size, dtype=dtype, requires_grad=True)

    def both_ways() -> None:
        torch.autograd.backward(loss(model, x_TD, tokens))
        _forget(model, x_TD)

    return Passed(rows, length, 1, mean_seconds(both_ways, seconds))


def _update(optimizer: Optimizer, dtype: torch.dtype, seconds: float) -> float:
    """Seconds for an element: the gradient's norm, the update, and the narrow weights of 16-bit ones."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights, gradient = torch.full((ELEMENTS,), STD, dtype=wide), torch.full((ELEMENTS,), STD, dtype=wide)
    state = {name: torch.zeros(ELEMENTS, dtype=wide) for name in optimizer.states}
    narrow = torch.empty(ELEMENTS, dtype=dtype)

    def update() -> None:
        gradient.norm()
        optimizer.update(weights, gradient, state, 1, 1e-4, 0.0)
        if dtype != wide:
            narrow.copy_(weights)

    with torch.no_grad():
        return mean_seconds(partial(update), seconds) / ELEMENTS


def _tokens(rows: int, length: int) -> Tokens:
    each = list(documents(rows, length))
    places_T = torch.cat([torch.arange(count) for count in each])
    return Tokens(torch.zeros_like(places_T), torch.zeros_like(places_T), places_T, each)


def _forget(model: nn.Module, x_TD: Tensor) -> None:
    """Gradients are given back, as buckets take them over in a step."""
    model.zero_grad()
    x_TD.grad = None
