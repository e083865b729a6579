"""Adapters merged into a tensor that holds all experts of a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tllm.parallel.lora.lora_update import LoraModule, tensor_names
from tllm.weights.lora import merge
from tllm.weights.lora.merge import AdapterSource, MergedTensor

EXPERTS, INPUTS, OUTPUTS, RANK = 4, 5, 6, 2


class LargestDouble(TorchDispatchMode):
    """Keeps how many numbers the largest tensor of float64 has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.numbers = max(self.numbers, made.numel())
        return made


def adapter_of(seed: int, module: str) -> AdapterSource:
    """With modules of each expert, of rank 2 and scale 0.5."""
    random = torch.Generator().manual_seed(seed)
    modules = {f"experts.{expert}.{module}": LoraModule(RANK, 0.5, False) for expert in range(EXPERTS)}
    tensors: dict[str, torch.Tensor] = {}
    for name in modules:
        a, b = tensor_names(name)
        tensors |= {a: torch.randn(RANK, INPUTS, generator=random), b: torch.randn(OUTPUTS, RANK, generator=random)}
    index = SimpleNamespace(slice=lambda source, name: tensors[name])
    adapter: Any = SimpleNamespace(modules=modules, index=index)
    return AdapterSource(adapter, SimpleNamespace())  # type: ignore[arg-type]


def test_experts_of_one_tensor_are_merged_one_at_a_time_and_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.randn(EXPERTS, INPUTS, OUTPUTS).bfloat16()
    monkeypatch.setattr(merge, "read_piece", lambda *_: plain)
    adapters = (adapter_of(1, "down_proj"), adapter_of(2, "down_proj"), adapter_of(3, "gate_up_proj"))
    want = torch.empty_like(plain)
    for expert in range(EXPERTS):
        whole = plain[expert].double().t()
        for one in adapters[:2]:
            a, b = (one._read(name) for name in tensor_names(f"experts.{expert}.down_proj"))
            whole = whole + 0.5 * (b @ a)
        want[expert] = whole.t().to(torch.bfloat16)
    index: Any = SimpleNamespace()
    tensor = MergedTensor("experts.down_proj", tuple(plain.shape), torch.bfloat16, index, index, adapters)
    with LargestDouble() as largest:
        made = tensor.make()
    assert torch.equal(made, want) and not torch.equal(made, plain)
    assert largest.numbers == INPUTS * OUTPUTS
