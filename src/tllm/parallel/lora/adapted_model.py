"""Which parts of a rank's model an adapter can add to, and their updates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from tllm.parallel.experts import ExpertProduct, ExpertSum
from tllm.parallel.linear import ColumnLinear, HeadLinear, RouterLinear, RowLinear
from tllm.parallel.lora.expert_update import ExpertUpdate
from tllm.parallel.lora.head_update import HeadUpdate
from tllm.parallel.lora.lora_update import DoraUpdate, LoraModule, LoraUpdate, modules_of

Update = LoraUpdate | ExpertUpdate | HeadUpdate

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)")
"""A module of one expert: what comes before its number, the number, and which of its products it is."""

OF_LATENTS = ".kv_b_proj"
"""The end of the name of what makes keys and values of latents, whose product is taken apart: by heads, and with
queries in the place of latents."""


NO_DORA = "of an expert: PEFT, which adapts a layer's experts as one stack (target_parameters), has no DoRA of them"
NO_DROPOUT = "an expert's: PEFT, which adapts a layer's experts as one stack (target_parameters), drops nothing there"
ODD_EXPERTS = "not every expert of its layer alike: those of a layer are adapted together, by one rank and one scale"
"""What is said of adapters that cannot be computed."""


def adaptable_weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """What adds an update, and the weight that it is added to: linears, but those that choose experts; the products of
    heads with keys and values of latents; the two products of experts."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | HeadLinear) and not isinstance(module, RouterLinear):
            yield module, module.weight
        elif isinstance(module, ExpertSum):
            yield from zip((module.into, module.out), module.products(), strict=True)


def module_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each adaptable module, by its name in the checkpoint, as far as this model holds them."""
    shapes: dict[str, tuple[int, int]] = {}
    for _, weight in adaptable_weights(model):
        for name, pieces in modules_of(weight):
            outputs, inputs = max(piece.source[0][1] for piece in pieces), max(piece.source[1][1] for piece in pieces)
            known = shapes.get(name, (0, 0))
            shapes[name] = max(outputs, known[0]), inputs
    return shapes


def updates_of(model: nn.Module, modules: Mapping[str, LoraModule]) -> dict[nn.Module, Update]:
    """An update, without values yet, for each part of a rank's model that has one of these modules.

    Of experts all that a layer has are adapted alike (`odd_experts`).
    """
    found = dict[nn.Module, Update]()
    heads = dict[str, HeadUpdate]()
    for module, weight in adaptable_weights(model):
        names = [name for name, _ in modules_of(weight) if name in modules]
        if not names:
            continue
        if isinstance(module, HeadLinear):
            found[module] = heads[module.name] = HeadUpdate(module, modules[module.name], heads.get(module.name))
        elif isinstance(module, ExpertProduct):
            found[module] = ExpertUpdate(weight, modules)
        else:
            found[module] = LoraUpdate(weight, modules)
    return found


def with_dora(updates: Mapping[nn.Module, Update]) -> dict[nn.Module, DoraUpdate]:
    """The updates that may be part of DoRA, which those of experts may not."""
    return {one: update for one, update in updates.items() if not isinstance(update, ExpertUpdate)}


def odd_experts(modules: Mapping[str, LoraModule], shapes: Mapping[str, object]) -> str:
    """The name of an expert's module that is adapted where that of another expert of its layer is not, or is with
    another rank or scale; "" where there is none. `shapes` are all modules of the model."""
    of_layers: dict[tuple[str, str], set[LoraModule | None]] = {}
    for name in shapes:
        if (key := _key(name)) is not None:
            of_layers.setdefault(key, set()).add(modules.get(name))
    odd = {key for key, ways in of_layers.items() if len(ways) > 1}
    return next((name for name in modules if _key(name) in odd), "")


def is_of_expert(module: str) -> bool:
    """Whether a module of this name is one of an expert's: such have no dropout and no DoRA, in PEFT neither."""
    return EXPERT.fullmatch(module) is not None


def _key(name: str) -> tuple[str, str] | None:
    found = EXPERT.fullmatch(name)
    return None if found is None else (found[1], found[3])
