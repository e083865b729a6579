"""What a rank holds of a LoRA adapter, where a job trains one and the model beside it stays as it is.

A of a linear has the adapter's rank times the linear's inputs, B as many times its outputs, as far as it is cut.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tllm.planner.cost.rank_bytes import Parameter
from tllm.planner.cost.weight_bits import linears
from tllm.spec.cut import Cut
from tllm.spec.model_spec import ModelSpec
from tllm.spec.quantized.weight_form import Quantize

ALL = "all-linear"


@dataclass(frozen=True)
class AdapterFacts:
    """What of a job's adapter decides what it costs.

    Its rank; the ends of names of linears that it is for; what plain weights of the model beside it are rounded to.
    """

    rank: int
    targets: tuple[str, ...] = (ALL,)
    quantize: Quantize | None = None

    def adapts(self, module: str) -> bool:
        """Whether a linear has an update."""
        return ALL in self.targets or any(module == end or module.endswith(f".{end}") for end in self.targets)


def adapter_parameters(spec: ModelSpec, number: int, cut: Cut, adapter: AdapterFacts) -> list[Parameter]:
    """The parameters of an adapter in one layer on a rank: A and B of each linear, but those of experts."""
    outputs, inputs = defaultdict[str, int](int), dict[str, int]()
    for linear in linears(spec, number, cut):
        if ".experts." not in linear.module and adapter.adapts(linear.module) and linear.columns:
            outputs[linear.module] += linear.elements // linear.columns
            inputs[linear.module] = linear.columns
    sizes = [adapter.rank * size for name in outputs for size in (inputs[name], outputs[name])]
    return [Parameter(size) for size in sizes]
