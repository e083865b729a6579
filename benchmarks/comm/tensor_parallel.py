"""What 1D, 2D, 2.5D and 3D tensor parallelism send: `python -m benchmarks.comm.tensor_parallel`.

Bytes and messages of one layer's forward and backward pass, and of batches that are served, counted on the links of
ranks that are threads of this process, beside the planner's laws. Nothing is timed.
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
from tllm.engine.assembly import make_stage
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import Batch, BatchEntry, Sampling, encode
from tllm.engine.schedule.limits import Limits
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import Transformer, build
from tllm.parallel.grid.grid_mesh import GridMesh, grid_mesh_of, serving_mesh_of
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.planner.cost.messages.layer_traffic import LayerSent, Sent, layer_sent
from tllm.planner.cost.tensor_parallel.serving_traffic import StageSums
from tllm.spec.families import spec_from_config
from tllm.spec.grid.grid_shape import MODES, TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Stage
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens

RANKS = (4, 8, 9, 16)
WIDTH = 576
TOKENS = (1, 4, 16)
"""Tokens of a microbatch, in multiples of the width."""


SERVED = (1, 8, 144, 576, 2304)
"""Tokens of a batch that is served; so many rows get a token, but those of one prompt one."""

DECODED, COUNTED = 8, 576
"""Rows of the largest of these batches that decodes, and tokens of the largest that is counted."""

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
            served = {tokens: _served(spec, mode, ranks, tokens) for tokens in SERVED}
            rows.append(_row(spec, mode, ranks, law) | {"served": served})
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


def counted_batch(
    spec: ModelSpec, mode: TensorMode, ranks: int, tokens: int, rows: int, layers: range | None = None
) -> Sent:
    """What the ranks of a stage send each other for a batch of `rows` sequences with so many tokens in all, without the
    batch itself. Without `layers` the stage is the whole model; else it begins it, and hands on what it computes."""
    links = {(a, b): CountingLink(a, b) for a in range(ranks) for b in range(ranks) if a != b}
    stop = spec.num_layers if layers is None else layers.stop
    runs = (Stage(0, stop, (1,) * ranks), *((Stage(stop, spec.num_layers),) if layers is not None else ()))
    plan, each = Plan(runs, tensor=mode), tokens // rows
    limits = Limits(
        num_pages=rows * -(-each // 16), vocab_size=spec.vocab_size, max_model_len=4096, max_num_batched_tokens=4096
    )
    pages = -(-each // 16)
    entries = tuple(BatchEntry(n, 0, each, each, ((n * pages, pages),), Sampling()) for n in range(rows))
    batch = Batch(0, entries, (7,) * tokens)
    ends = LocalLink(1, 0), LocalLink(0, 1)
    ends[1].unbounded()
    ring = None if layers is None else RingLinks(*ends)
    stages = [_stage(spec, plan, rank, _group(rank, ranks, links), limits, ring) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda stage: _compute(stage, batch), stages))
    of_batch = Sent(len(encode(batch)) * (ranks - 1), ranks - 1)
    return _sent(links).plus(of_batch, -1)


def _stage(spec: ModelSpec, plan: Plan, rank: int, tp: Group, limits: Limits, ring: RingLinks | None) -> PipelineStage:
    mesh = serving_mesh_of(spec, plan, rank, tp)
    model = build(spec, mesh, torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return make_stage(model, mesh, plan, ring if rank == 0 else None, limits)


def _compute(stage: PipelineStage, batch: Batch) -> None:
    with torch.inference_mode():
        if stage.tp.rank == 0:
            stage.start(batch)
        else:
            stage.serve_one()


def _served(spec: ModelSpec, mode: TensorMode, ranks: int, tokens: int) -> dict[str, float]:
    """Of one layer and rank, in the mean; for the whole model counted as the law has it."""
    sums, rows = StageSums(spec, grid_shape(mode, ranks), ranks), tokens if tokens <= DECODED else 1
    layers = range(spec.num_layers)
    if tokens <= COUNTED:
        counted, law = counted_batch(spec, mode, ranks, tokens, rows), sums.sent(layers, tokens, rows, 4)
        assert counted == law, f"{mode} on {ranks} ranks, {tokens} tokens: {counted} is not {law}"
    one = sums.of_one_layer(spec.layers[1], tokens, 4)
    return {"kilobytes_a_rank": one.bytes / ranks / 1e3, "messages_a_rank": one.messages / ranks}


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
the planner's law (`planner/cost/messages/layer_traffic.py`) exactly; other columns are by the law. From some
multiple of D on a square sends less than 1d, as hidden states go along one of its sides only; with fewer tokens it
sends more, because weights travel too. A cube sends the wide activations of the MLP as well."""
LIMITS = """- Nothing is timed. The products of a grid are rounds of messages that wait for each other, more of them
  than the all-reduces of 1d take: over links that answer slowly this decides, and not bytes.
- Attention sends nothing on a grid, as each document is whole on a rank. Blocks of tokens are filled to one length,
  which the table does not show.
- A batch that is served waits for six sums in a layer of a grid, and for two with 1d: over links that answer slowly
  1d is faster, whatever it sends."""
SERVING = """## Serving

A grid that serves leaves its weights where they are, and activations travel: kB a rank for the same layer and one
batch, by its number of tokens, and messages of the smallest and the largest. Batches of 1 and 8 tokens decode that many
rows, others are one prompt. Embedding, layers, logits and the choice of a token were counted for up to 576 tokens, and
the run ends unless they are the law (`planner/cost/tensor_parallel/serving_traffic.py`) exactly; the last column is by
the law. For one token a grid sends less than 1d, whose short sums go to all other ranks at once: on 16 ranks a quarter
or less, in fewer messages. For many a single square or a cube sends more, as the wide sums into an MLP travel too;
several squares, which divide the tokens, send less from 8 ranks on.

"""


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
    tables = table([titles, *body], left=3) + "\n\n" + SERVING + _serving_table(rows)
    return Page("comm", "tensor-parallel", title, PURPOSE, tables, READING, LIMITS)


def _serving_table(rows: Sequence[dict[str, Any]]) -> str:
    titles = ["ranks", "tensor", "grid", *(f"T = {tokens:,}" for tokens in SERVED), "messages, few", "many"]
    body = []
    for row in rows:
        served = [row["served"][tokens] for tokens in SERVED]
        cells = [f"{one['kilobytes_a_rank']:.1f}" for one in served]
        messages = [f"{one['messages_a_rank']:.0f}" for one in (served[0], served[-1])]
        body.append([str(row["ranks"]), row["mode"], row["grid"], *cells, *messages])
    return table([titles, *body], left=3)


if __name__ == "__main__":
    sys.exit(main())
