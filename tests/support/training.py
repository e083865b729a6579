"""One step of training under a layout, its ranks as threads, and the same step by `transformers`: gradients by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.layouts import in_threads, spec_of
from tests.support.slow_load import slices, slow_load
from tllm.comm.link import LocalLink
from tllm.model.attend import PackedCausal
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh, whole
from tllm.parallel.shard import shard_of
from tllm.spec.model import ModelSpec
from tllm.spec.schedule import Schedule
from tllm.spec.schedule import build as build_schedule
from tllm.train.objective import NextToken
from tllm.train.step import StepResult, play
from tllm.train.tensors import Tokens
from tllm.train.wires import Wires

Named = dict[str, Tensor]
Mutate = Callable[[int, list[Transformer]], None]


@dataclass(frozen=True)
class Layout:
    """Stages and their order; `layers` of each place in the model's order, as even as can be when left out."""

    stages: int = 1
    order: str = "gpipe"
    chunks: int = 1
    depth: int = 1
    layers: tuple[int, ...] = field(default=())

    def schedule(self, microbatches: int) -> Schedule:
        depth = {"depth": self.depth} if self.order in ("1f1b", "zero_bubble") else {}
        return build_schedule(self.order, self.stages, microbatches, chunks=self.chunks, **depth)

    def ranges(self, num_layers: int) -> list[range]:
        places = self.stages * self.chunks
        bounds = [num_layers * i // places for i in range(places + 1)]
        if self.layers:
            bounds = [sum(self.layers[:i]) for i in range(places + 1)]
        return [range(a, b) for a, b in itertools.pairwise(bounds)]


def random_tokens(count: int, seed: int = 3, vocab: int = 101) -> list[Tokens]:
    """Microbatches of unequal lengths, each of several documents, some of whose tokens are not predicted."""
    dice = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        lengths = [5 + (index * 3) % 7, 9, 2 + index % 3]
        total = sum(lengths)
        ids_T = torch.randint(0, vocab, (total,), generator=dice)
        labels_T = torch.randint(0, vocab, (total,), generator=dice)
        labels_T[torch.rand(total, generator=dice) < 0.2] = -100
        made.append(Tokens(ids_T, labels_T, torch.cat([torch.arange(n) for n in lengths]), lengths))
    return made


def predicted(microbatches: list[Tokens]) -> int:
    return sum(microbatch.predicted for microbatch in microbatches)


def saved(folder: Path) -> Named:
    """Every tensor of a folder, by the checkpoint's names."""
    tensors: Named = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def gradients_of_transformers(
    model: transformers.PreTrainedModel, microbatches: list[Tokens], folder: Path
) -> tuple[float, Named]:
    """Mean loss and gradients of a plain loop over documents; `folder` is where it may save them as weights.

    Saving is what gives them the checkpoint's names and shapes, which are not those of all models in memory.
    """
    model.zero_grad()
    loss = learn_documents(model, microbatches)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs.grad)
    twin.save_pretrained(folder)
    return loss, saved(folder)


def learn_documents(model: transformers.PreTrainedModel, microbatches: list[Tokens]) -> float:
    """The mean loss over predicted tokens, one document at a time; its gradients are added to the parameters'."""
    total = predicted(microbatches)
    loss = 0.0
    for microbatch in microbatches:
        documents = zip(
            microbatch.ids_T.split(microbatch.lengths), microbatch.labels_T.split(microbatch.lengths), strict=True
        )
        for ids_T, labels_T in documents:
            part = F.cross_entropy(model(ids_T[None]).logits[0], labels_T, reduction="sum") / total
            part.backward()
            loss += part.item()
    return loss


def chunks_of(
    spec: ModelSpec, folder: Path, layout: Layout, stage: int, dtype: torch.dtype, mesh: Mesh | None = None
) -> list[Transformer]:
    """One rank's chunks, filled and ready to learn."""
    ranges = layout.ranges(spec.num_layers)
    base = replace(mesh or whole(spec), pp=layout.stages * layout.chunks, stage=stage)
    chunks = []
    for chunk in range(layout.chunks):
        model = build(spec, replace(base, layers=ranges[chunk * layout.stages + stage]), dtype)
        slow_load(model, folder)
        chunks.append(model.requires_grad_(True))
    return chunks


def wires_of(stages: int) -> list[Wires]:
    links = {(a, b): LocalLink(a, b) for a in range(stages) for b in range(stages) if a != b}
    return [
        Wires(
            {b: (links[stage, b],) for b in range(stages) if b != stage},
            {a: links[a, stage] for a in range(stages) if a != stage},
        )
        for stage in range(stages)
    ]


def collect(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], into: Named, shapes: Named) -> None:
    """Add each rank's pieces to gradients of whole tensors; an element that two ranks hold is added twice."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        for piece in shard_of(parameter).pieces:
            out = into.setdefault(piece.name, torch.zeros(shapes[piece.name].shape, dtype=gradient.dtype))
            part = out[slices(piece.source)]
            part += gradient[slices(piece.target)].reshape(part.shape)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, f"{shard_of(parameter).pieces[0].name} has no gradient"
    return parameter.grad


def gradients_under(
    folder: Path,
    layout: Layout,
    microbatches: list[Tokens],
    dtype: torch.dtype,
    shapes: Named,
    mutate: Mutate = lambda stage, chunks: None,
) -> tuple[float, Named]:
    """Mean loss and gradients, by the checkpoint's names, of one replica's step under a layout."""
    spec = spec_of(folder)
    schedule = layout.schedule(len(microbatches))
    models = [chunks_of(spec, folder, layout, stage, dtype) for stage in range(layout.stages)]
    for stage, chunks in enumerate(models):
        mutate(stage, chunks)
    scale = 1 / predicted(microbatches)

    def work(stage: int, wires: Wires) -> StepResult:
        return play(schedule, stage, models[stage], microbatches, wires, NextToken(), scale, PackedCausal)

    results = in_threads([partial(work, stage, wires) for stage, wires in enumerate(wires_of(layout.stages))])
    named: Named = {}
    for chunks in models:
        parameters = [p for model in chunks for p in model.parameters()]
        collect(parameters, [_gradient(p) for p in parameters], named, shapes)
    return sum(result.loss_sum for result in results) * scale, named


def furthest(got: Named, want: Named) -> tuple[float, str]:
    """The largest difference of a parameter's gradient relative to its size, and whose it is."""
    assert set(got) == set(want), set(got) ^ set(want)
    return max(
        (float((got[name].double() - want[name].double()).norm() / want[name].double().norm()), name) for name in want
    )
