"""What 1D, 2D, 2.5D and 3D tensor parallelism send: `python -m benchmarks.comm.tensor_parallel`.

Bytes and messages of one layer's forward and backward pass, counted on the links of ranks that are threads of this
process, beside the planner's law. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from tllm.comm.collectives.group import Group
from tllm.comm.links.link import LocalLink
from tllm.core.errors import PlanError
from tllm.model.transformer import Transformer, build
from tllm.parallel.grid.grid_mesh import GridMesh, grid_mesh_of
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.planner.cost.tensor_parallel.layer_traffic import LayerSent, Sent, layer_sent
from tllm.spec.families import spec_from_config
from tllm.spec.grid.grid_shape import MODES, TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens

RANKS = (4, 8, 9, 16)
WIDTH = 576
TOKENS = (1, 4, 16)
"""Tokens of a microbatch, in multiples of the width."""


DOCUMENTS = 4
"""Of a rank's tokens."""


class CountingLink(LocalLink):
    """Counts the messages that go over it."""

    messages = 0

    def _put(self, message: Tensor | bytes, size: int) -> None:
        super()._put(message, size)
        self.messages += 1


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    spec, rows = spec_of(WIDTH), list[dict[str, Any]]()
    for ranks in RANKS:
        for mode in modes_of(ranks):
            counted, law = counted_layer(spec, mode, ranks, 4 * WIDTH), layer_sent(spec, mode, ranks, 4 * WIDTH)
            assert counted == (law.forward, law.backward), f"{mode} on {ranks} ranks: {counted} is not {law}"
            rows.append(_row(spec, mode, ranks, law))
    write(page(rows), {"width": WIDTH, "rows": rows})
    return 0


def modes_of(ranks: int) -> list[TensorMode]:
    """Those whose grid so many ranks form."""
    modes: list[TensorMode] = []
    for mode in MODES:
        try:
            grid_shape(mode, ranks)
        except PlanError:
            continue
        modes.append(mode)
    return modes


def spec_of(width: int) -> ModelSpec:
    """A llama with 16 heads and an MLP 8/3 as wide as its hidden states."""
    return spec_from_config(
        dict(
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=width // 16,
            vocab_size=1000,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=4096,
        )
    )


def counted_layer(spec: ModelSpec, mode: TensorMode, ranks: int, tokens: int) -> tuple[Sent, Sent]:
    """What the middle layer of a model sends for these tokens, forward and backward."""
    links = {(a, b): CountingLink(a, b) for a in range(ranks) for b in range(ranks) if a != b}
    plan = Plan.parse(f"tp={ranks},tensor={mode}", spec.num_layers)
    models = [_middle(spec, plan, rank, _group(rank, ranks, links)) for rank in range(ranks)]
    outs = _in_threads(models, lambda model, mesh: _forward(model, mesh, tokens))
    forward = _sent(links)
    gradients = {id(model): out for (model, _), out in zip(models, outs, strict=True)}
    _in_threads(models, lambda model, mesh: gradients[id(model)].sum().backward())
    both = _sent(links)
    return forward, Sent(both.bytes - forward.bytes, both.messages - forward.messages)


def _middle(spec: ModelSpec, plan: Plan, rank: int, tp: Group) -> tuple[Transformer, Mesh]:
    whole = mesh_of(spec, plan, rank, tp) if plan.grid is None else grid_mesh_of(spec, plan, rank, tp)
    mesh = replace(whole, layers=range(1, 2))
    model = build(spec, mesh, torch.float32).requires_grad_()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return model, mesh


def _forward(model: Transformer, mesh: Mesh, tokens: int) -> Tensor:
    blocks = mesh.grid.shape.token_blocks if isinstance(mesh, GridMesh) else 1
    here = tokens // blocks
    first, last = mesh.hidden(model.spec.hidden_size).held
    lengths = [here // DOCUMENTS] * DOCUMENTS
    places = torch.arange(here // DOCUMENTS).repeat(DOCUMENTS)
    attend = TrainAttend(model.attention_specs(), Tokens(places, places, places, lengths))
    x_TD = torch.full((here, last - first), 0.01, requires_grad=True)
    out: Tensor = model(x_TD, places, attend)
    return out


def _in_threads(models: Sequence[tuple[Transformer, Mesh]], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(lambda pair: work(*pair), models))


def _group(rank: int, ranks: int, links: dict[tuple[int, int], CountingLink]) -> Group:
    others = [other for other in range(ranks) if other != rank]
    send, recv = {other: links[rank, other] for other in others}, {other: links[other, rank] for other in others}
    return Group(rank, ranks, dict(send), dict(recv))


def _sent(links: dict[tuple[int, int], CountingLink]) -> Sent:
    return Sent(sum(link.bytes_moved for link in links.values()), sum(link.messages for link in links.values()))


def _row(spec: ModelSpec, mode: TensorMode, ranks: int, counted: LayerSent) -> dict[str, Any]:
    both = counted.forward.plus(counted.backward)
    megabytes = {}
    for times in TOKENS:
        law = layer_sent(spec, mode, ranks, times * WIDTH)
        megabytes[str(times)] = (law.forward.bytes + law.backward.bytes) / ranks / 1e6
    return {
        "ranks": ranks,
        "mode": mode,
        "grid": str(grid_shape(mode, ranks) or ranks),
        "forward": counted.forward._asdict(),
        "backward": counted.backward._asdict(),
        "step_megabytes_a_rank": counted.step_bytes / ranks / 1e6,
        "messages_a_rank": both.messages // ranks,
        "megabytes_a_rank": megabytes,
    }


PURPOSE = """Bytes and messages that a rank sends for one layer, forward and backward, where ranks cut its weights one
way (1d, Megatron-LM) or both ways, as a square (2d), several squares (2.5d) or a cube (3d). A llama layer
of width D = 576 in float32, 16 heads, an MLP of 8/3 D; a microbatch of T tokens."""
READING = """Cells are MB a rank, means over ranks; `step`: gradients of weights that several squares sum, once a step,
however many microbatches it has. The run counts bytes and messages on its links at T = 4 D, and ends unless both are
the planner's law (`planner/cost/tensor_parallel/layer_traffic.py`) exactly; other columns are by the law. From some
multiple of D on a square sends less than 1d, as hidden states go along one of its sides only; with fewer tokens it
sends more, because weights travel too. A cube sends the wide activations of the MLP as well."""
LIMITS = """- Nothing is timed. The products of a grid are rounds of messages that wait for each other, more of them
  than the all-reduces of 1d take: over links that answer slowly this decides, and not bytes.
- Attention sends nothing on a grid, as each document is whole on a rank. Blocks of tokens are filled to one length,
  which the table does not show.
- Serving does not know grids: a step that decodes has few tokens, and weights would travel for each."""


def page(rows: Sequence[dict[str, Any]]) -> Page:
    titles = ["ranks", "tensor", "grid", *(f"T = {times} D" for times in TOKENS), "step", "messages"]
    body = [
        [
            str(row["ranks"]),
            row["mode"],
            row["grid"],
            *(f"{row['megabytes_a_rank'][str(times)]:.1f}" for times in TOKENS),
            f"{row['step_megabytes_a_rank']:.1f}",
            str(row["messages_a_rank"]),
        ]
        for row in rows
    ]
    title = "Tensor parallelism in one, two and three dimensions"
    return Page("comm", "tensor-parallel", title, PURPOSE, table([titles, *body], left=3), READING, LIMITS)


if __name__ == "__main__":
    sys.exit(main())
