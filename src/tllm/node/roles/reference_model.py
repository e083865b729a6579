"""The undivided model over one prompt, layer by layer, so that memory for a single layer is enough."""

from __future__ import annotations

from pathlib import Path

import torch

from tllm.comm.collectives.group import solo
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.positions import lengths, positions
from tllm.engine.schedule.batch import PLAIN_GREEDY, Batch, BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.model.transformer import Transformer, build
from tllm.node.roles.comparison_record import Record, write_rows
from tllm.parallel.mesh import mesh_of
from tllm.planner.cost.cache_room import MAX_NUM_BATCHED_TOKENS, PAGE_SIZE
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load
from tllm.weights.manifest import checked

DECODED = 4
"""The last tokens of a prompt are computed one at a time, as tokens are that a model makes itself."""


def limits_for(spec: ModelSpec, count: int) -> Limits:
    """Sizes for one sequence of so many tokens."""
    return Limits(
        num_pages=-(-count // PAGE_SIZE),
        vocab_size=spec.vocab_size,
        max_model_len=count,
        page_size=PAGE_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        num_state_slots=1 if spec.delta else 0,
    )


def batches_of(token_ids: tuple[int, ...], limits: Limits) -> list[Batch]:
    """The prompt in as few batches as may be, but for its last tokens; each ends in logits for its last place."""
    prompt = max(1, len(token_ids) - DECODED)
    starts = [*range(0, prompt, limits.max_num_batched_tokens), *range(prompt, len(token_ids))]
    table = ((0, limits.num_pages),)
    return [
        Batch(
            number=number,
            entries=(
                BatchEntry(
                    key=1,
                    start=start,
                    count=stop - start,
                    prompt_length=prompt,
                    page_table=table,
                    sampling=PLAIN_GREEDY,
                ),
            ),
            token_ids=token_ids[start:stop],
        )
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(token_ids)], strict=True))
    ]


@torch.inference_mode()
def write_reference(
    folder: Path, out: Path, spec: ModelSpec, dtype: torch.dtype, batches: list[Batch], limits: Limits
) -> None:
    """Write what each part of the model gives for these batches into `out`, for `comparison_record.compare`."""
    source = checked(LocalFiles(folder))
    index = open_index(source, read_config(folder))
    plan = Plan.parse(f"pp={spec.num_layers}", spec.num_layers)
    rows = [torch.tensor(batch.token_ids) for batch in batches]
    for layer in range(spec.num_layers):
        model = build(spec, mesh_of(spec, plan, layer, solo()), dtype, "meta")
        load(model, index, source, dtype)
        record = Record(model)
        cache = KVCache(model.attention_specs(), limits, dtype, model.state_shapes())
        rows = [_through(model, cache, x, batch, spec) for x, batch in zip(rows, batches, strict=True)]
        for what, seen in record:
            write_rows(out, what, seen)


def _through(model: Transformer, cache: KVCache, x: torch.Tensor, batch: Batch, spec: ModelSpec) -> torch.Tensor:
    lengths_T = lengths(batch) if spec.scales_by_length else None
    ids_T, attend = torch.tensor(batch.token_ids), PagedAttend(cache, batch.entries)
    x_TD: torch.Tensor = model(x, positions(batch), attend, lengths_T, ids_T=ids_T)
    if model.is_last:
        model.logits(x_TD[-1:])  # which the record keeps
    return x_TD
