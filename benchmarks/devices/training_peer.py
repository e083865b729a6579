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


def peer_seconds(
    work: Work, device: torch.device, warm_up: int, steps: int, compiled: bool
) -> tuple[float, int, float]:
    """Seconds of a step, the peak of memory, and the last loss. Weights and AdamW's states are in the work's dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM  # not at the top: a run without a peer needs no long import

    config = LlamaConfig(**{**work.config, "attn_implementation": "sdpa"})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(work.dtype))
    try:
        with device:
            model = LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(default)
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

    loss = torch.zeros(())
    for _ in range(warm_up):
        loss = step()
    wait_for(device)
    forget_peak(device)
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
        loss.item()
    wait_for(device)
    return PeerRun((time.perf_counter() - began) / steps, peak_memory(device), float(loss))
