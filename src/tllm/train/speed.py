"""How fast this machine trains one layer of a model: what the seconds of a step are predicted from."""

from __future__ import annotations

import time

import torch

from tllm.model.transformer import build
from tllm.parallel.mesh import Mesh, whole
from tllm.planner.flops import BACKWARD, layer_flops
from tllm.spec.model import ModelSpec
from tllm.train.attend import TrainAttend
from tllm.train.initial import fill_randomly
from tllm.train.tensors import Tokens

TOKENS = 2048
"""At most so many are computed at once; more do not make products faster."""
SECONDS = 1.0


def layer_speed(spec: ModelSpec, dtype: torch.dtype, seq_len: int, microbatch_size: int) -> float:
    """Floating-point operations per second of forward and backward passes through a layer, on this process's threads.

    The middle layer, uncut, over rows of one document each: the best of some passes in about a second.
    """
    middle, uncut = spec.num_layers // 2, whole(spec)
    model = build(spec, Mesh(1, 3, range(middle, middle + 1), uncut.tp, uncut.cut), dtype).requires_grad_()
    fill_randomly(model.parameters(), spec, 0)
    length = min(seq_len, TOKENS)
    lengths = [length] * max(1, min(microbatch_size, TOKENS // length))
    tokens = sum(lengths)
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    batch = Tokens(positions_T, positions_T, positions_T, lengths)
    x_TD = torch.randn(tokens, spec.hidden_size, dtype=dtype, requires_grad=True)
    work = (1 + BACKWARD) * layer_flops(spec, spec.layers[middle], uncut.cut, lengths)
    best, until = 0.0, time.perf_counter() + SECONDS
    while not best or time.perf_counter() < until:
        begun = time.perf_counter()
        attend = TrainAttend(model.attention_specs(), batch)
        model(x_TD, positions_T, attend, batch.lengths_T).sum().backward()
        best = max(best, work / (time.perf_counter() - begun))
    return best
