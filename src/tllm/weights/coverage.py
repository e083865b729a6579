"""Whether the pieces of all ranks make up the model: each element held once, or more often if declared. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.weights.boxes import Box, Shape, is_inside, regions, show, whole


class HeldBlock(NamedTuple):
    """One block of a tensor of the checkpoint that a rank holds. `replicated`: others may hold it as well."""

    name: str
    box: Box = ()
    replicated: bool = False


def check_coverage(
    held: Mapping[int, Iterable[HeldBlock]], shapes: Mapping[str, Shape], needed: Collection[str] | None = None
) -> None:
    """Raises PlanError for an element of a needed tensor that no rank holds, or that two hold without declaring so.

    `held` is what each rank holds, `shapes` what the files have, `needed` the model's tensors: all of `shapes` if None.
    """
    by_name: dict[str, list[tuple[int, Box, bool]]] = {name: [] for name in (shapes if needed is None else needed)}
    for rank, blocks in held.items():
        for block in blocks:
            by_name.setdefault(block.name, []).append((rank, block.box, block.replicated))
    for name, blocks_of in by_name.items():
        if name not in shapes:
            raise PlanError(
                f"tensor {name!r} is in the plan and not in the weight files",
                "see that all files of the model are there, and that config.json is of this model",
            )
        _check_tensor(name, shapes[name], blocks_of)


def _check_tensor(name: str, shape: Shape, blocks: list[tuple[int, Box, bool]]) -> None:
    for rank, box, _ in blocks:
        if box and not is_inside(box, shape):
            raise PlanError(f"rank {rank} holds {name}{show(box)}, which is not inside its shape {shape}")
    for box, holders in regions(shape, [box or whole(shape) for _, box, _ in blocks]):
        if not holders:
            raise PlanError(f"{name}{show(box)} of shape {shape} is held by no rank", "give a plan that holds it all")
        alone = [blocks[i][0] for i in holders if not blocks[i][2]]
        if len(holders) > 1 and alone:
            ranks = " and ".join(str(rank) for rank in sorted(blocks[i][0] for i in holders))
            raise PlanError(
                f"{name}{show(box)} of shape {shape} is held {len(holders)} times, by ranks {ranks}, "
                f"and rank {alone[0]} holds it as its alone",
                "give a plan that holds each part once",
            )
