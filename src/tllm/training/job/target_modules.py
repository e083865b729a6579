"""Which linears of a model a job adapts, by their names in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tllm.core.errors import ConfigError, nearest
from tllm.model.transformer import build
from tllm.parallel.lora import B_NAME, LoraModule, module_shapes, tensor_names
from tllm.parallel.mesh import whole
from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec
from tllm.training.job.lora_job import ALL_LINEAR, LoraJob


def adapted_modules(lora: LoraJob, spec: ModelSpec) -> dict[str, LoraModule]:
    """Rank and scale of each linear of the whole model that is adapted. ConfigError for a target that matches none."""
    shapes, config = _shapes(spec), lora.config
    for target in lora.target_modules:
        if target != ALL_LINEAR and not any(ends_with(name, target) for name in shapes):
            raise ConfigError(
                f"lora.target_modules has {target!r}, and no linear of this model that can be adapted ends so",
                f"linears of attention, MLPs and shared experts can be: {_known(target, shapes)}",
            )
    chosen = [name for name in shapes if config.names(name)]
    return {name: LoraModule(config.rank(name), config.scale(name), config.use_dora) for name in chosen}


def adapter_shapes(lora: LoraJob, spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The shapes of A and B of every module of an adapter of the whole model."""
    of_modules, found = _shapes(spec), dict[str, tuple[int, int]]()
    for name, (rank, _, _) in adapted_modules(lora, spec).items():
        outputs, inputs = of_modules[name]
        found |= zip(tensor_names(name), ((rank, inputs), (outputs, rank)), strict=True)
    return found


def adapter_parameter_count(lora: LoraJob | None, spec: ModelSpec) -> int:
    """Of an adapter of the whole model, if there is one: A and B, and with DoRA a magnitude of each output."""
    if lora is None:
        return 0
    shapes = adapter_shapes(lora, spec).items()
    magnitudes = sum(outputs for name, (outputs, _) in shapes if lora.use_dora and name.endswith(B_NAME))
    return sum(rows * columns for _, (rows, columns) in shapes) + magnitudes


def target_names(chosen: Iterable[str], spec: ModelSpec) -> list[str]:
    """The shortest ends of names that tell the chosen linears from all other weights of a model, as PEFT reads them."""
    wanted = set(chosen)
    others = [name for name in _modules(spec) if name not in wanted]
    found = set[str]()
    for name in wanted:
        parts = name.split(".")
        ends = (".".join(parts[at:]) for at in reversed(range(len(parts))))
        found.add(next((end for end in ends if not any(ends_with(other, end) for other in others)), name))
    return sorted(found)


def ends_with(name: str, target: str) -> bool:
    """Whether a target names a module, by its name or an end of it."""
    return name == target or name.endswith(f".{target}")


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    return module_shapes(build(spec, whole(spec), torch.float32, "meta"))


def _modules(spec: ModelSpec) -> set[str]:
    """Every module of the whole model that has a weight."""
    parameters = build(spec, whole(spec), torch.float32, "meta").parameters()
    return {piece.name.removesuffix(".weight") for parameter in parameters for piece in shard_of(parameter).pieces}


def _known(target: str, shapes: Mapping[str, object]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in shapes})
    return f"{', '.join(ends)}; {nearest(target, ends)}"
