"""Which linears of a model a job adapts, by their names in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from tllm.core.errors import ConfigError, nearest
from tllm.model.transformer import build
from tllm.parallel.lora.adapted_model import (
    NO_DORA,
    NO_DROPOUT,
    ODD_EXPERTS,
    OF_LATENTS,
    is_of_expert,
    module_shapes,
    odd_experts,
)
from tllm.parallel.lora.lora_update import B_NAME, LoraModule, tensor_names
from tllm.parallel.mesh import whole
from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec
from tllm.training.job.job import Job
from tllm.training.job.lora_job import ALL_LINEAR, LoraJob

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def adapted_modules(lora: LoraJob, spec: ModelSpec) -> dict[str, LoraModule]:
    """Rank and scale of each linear of the whole model that is adapted. ConfigError for a target that matches none."""
    shapes, config = _shapes(spec), lora.config
    for target in lora.target_modules:
        if target != ALL_LINEAR and not any(ends_with(name, target) for name in shapes):
            raise ConfigError(
                f"lora.target_modules has {target!r}, and no linear of this model that can be adapted ends so",
                f"linears of attention, MLPs and experts can be: {_known(target, shapes)}",
            )
    _check_left_out(lora, spec, shapes)
    chosen = [name for name in shapes if config.names(name) and _is_left(lora, name)]
    if not chosen:
        raise ConfigError(
            "lora.exclude_modules and lora.layers_to_transform leave nothing of lora.target_modules to adapt",
            "name fewer modules to exclude, or more layers",
        )
    modules = {name: LoraModule(config.rank(name), config.scale(name), config.use_dora) for name in chosen}
    _check_modules(lora, modules, shapes)
    return modules


def lowest_learned_layer(job: Job, spec: ModelSpec) -> int:
    """The first layer with something that is learned; those below it run no backward pass. What is learned beside the
    model, of hidden states, may be anywhere."""
    if job.lora is None or (job.distill is not None and job.distill.hidden_state_layers):
        return 0
    return min(int(match[1]) for name in adapted_modules(job.lora, spec) if (match := LAYER.match(name)))


def _is_left(lora: LoraJob, name: str) -> bool:
    """Whether a module is adapted if it is a target."""
    if lora.target_modules == (ALL_LINEAR,) and (is_of_expert(name) or name.endswith(OF_LATENTS)):
        return False
    layers, layer = lora.layers_to_transform, LAYER.match(name)
    is_in_layer = not layers or (layer is not None and int(layer[1]) in layers)
    return is_in_layer and not any(ends_with(name, end) for end in lora.exclude_modules)


def _check_left_out(lora: LoraJob, spec: ModelSpec, shapes: Mapping[str, object]) -> None:
    for end in lora.exclude_modules:
        if not any(ends_with(name, end) for name in shapes):
            raise ConfigError(
                f"lora.exclude_modules has {end!r}, and no linear of this model ends so", _known(end, shapes)
            )
    for number in lora.layers_to_transform:
        if not 0 <= number < spec.num_layers:
            raise ConfigError(
                f"lora.layers_to_transform has {number} and the model has the layers 0 to {spec.num_layers - 1}"
            )


def _check_modules(lora: LoraJob, modules: Mapping[str, LoraModule], shapes: Mapping[str, object]) -> None:
    of_expert = next(filter(is_of_expert, modules), "")
    if of_expert and lora.use_dora:
        raise ConfigError(
            f"lora.use_dora and {of_expert}, {NO_DORA}",
            "leave use_dora out, or name others: mlp.gate_proj, say, is of no expert",
        )
    if of_expert and lora.lora_dropout:
        raise ConfigError(
            f"lora.lora_dropout is {lora.lora_dropout:g} and {of_expert} is adapted, {NO_DROPOUT}",
            "leave lora_dropout out, or name others: mlp.gate_proj, say, is of no expert",
        )
    if odd := odd_experts(modules, shapes):
        raise ConfigError(
            f"lora.target_modules names {odd} and {ODD_EXPERTS}", "name the part alone, such as down_proj"
        )


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
    others = {end for name in _modules(spec) if name not in wanted for end in _ends(name)}
    return sorted({next((end for end in _ends(name) if end not in others), name) for name in wanted})


def _ends(name: str) -> list[str]:
    """A name and what is left of it behind each dot, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[at:]) for at in reversed(range(len(parts)))]


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
