"""The loop that anybody would write: `transformers`' own Llama in the same dtype, AdamW and clipping, on one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.devices.training_work import SHAPES, Work
from tllm.devices.memory import forget_peak, peak_memory, wait_for
from tllm.weights.dtypes import torch_dtype

RATE, DECAY, CLIP = 1e-4, 0.1, 1.0


class PeerRun(NamedTuple):
    """Seconds of a step, the most bytes that the device held, and the losses."""

    seconds: float
    memory: int
    losses: list[float]


def peer_run(work: Work, device: torch.device, warm_up: int, steps: int, compiled: bool) -> PeerRun:
    """Weights and AdamW's states are in the work's dtype: less work than with float32 weights beside narrow ones."""
    from transformers import LlamaConfig, LlamaForCausalLM  # not at the top: a run without a peer needs no long import

    config = LlamaConfig(**{**work.config, "attn_implementation": "sdpa"})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(work.dtype))
    try:
        with device:
            model = LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(default)
    print("built", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    forward: Callable[..., object] = torch.compile(model) if compiled else model
    dice, vocab = random.Random(0), SHAPES[work.shape]["vocab_size"]
    ids_BT = torch.tensor([[dice.randrange(vocab) for _ in range(work.length)] for _ in range(work.rows)])
    ids_BT = ids_BT.to(device)

    def step() -> Tensor:
        for _ in range(work.microbatches):
            found = forward(input_ids=ids_BT, labels=ids_BT, use_cache=False)
            loss: Tensor = found.loss / work.microbatches  # type: ignore[attr-defined]
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[float] = []
    before = began = time.perf_counter()
    for number in range(1, warm_up + steps + 1):
        losses.append(step().item())
        if number in (warm_up, warm_up + steps):
            wait_for(device)
        now = time.perf_counter()
        print(f"step {number}: {(now - before) * 1e3:.1f} ms, loss {losses[-1]:.3f}", flush=True)
        before = now
        if number == warm_up:
            forget_peak(device)
            began = now
    return PeerRun((before - began) / steps, peak_memory(device), losses)
