"""A forward pass keeps what the planner says, for every family, cut, dtype and way to keep less."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.models.families import TRAINABLE, UNLIKE, save_model
from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.live_tensors import Live
from tests.support.selection import EACH_PART, in_turn, soak_but
from tllm.comm.collectives.group import Group, local_groups
from tllm.parallel.mesh import Mesh
from tllm.parallel.sequence_parallel import slice_counts
from tllm.planner.cost.activations import Microbatch, logits_bytes, recomputed_bytes, run_bytes
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Recompute
from tllm.training.attention import attention_dtype
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.attention.ring_attention import RingAttention
from tllm.training.data.batch_tensors import PROMPT_LENGTH, Tokens
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.step.model_chunks import build_chunks
from tllm.training.step.recompute import recompute

Kept = tuple[int, int]
"""(measured, planned) bytes."""


def documents(lengths: list[int], ignored: float) -> Tokens:
    ids_T = torch.arange(sum(lengths)) % 101
    labels_T = ids_T.clone()
    labels_T[: int(len(ids_T) * ignored)] = -100
    return Tokens(ids_T, labels_T, torch.cat([torch.arange(n) for n in lengths]), lengths)


def kept(
    spec: ModelSpec,
    tokens: Tokens,
    layers: range,
    sequence: bool,
    how: Recompute,
    dtype: torch.dtype,
    tp: Group,
    cut: Cut,
) -> Kept:
    """Of one rank's run. The groups' own buffers are there before: a pass is made that does not count."""
    stages = [run for run in (range(layers.start), layers, range(layers.stop, spec.num_layers)) if run]
    mesh = Mesh(stages.index(layers), len(stages), range(0), tp, cut, sequence)
    (model,) = build_chunks(spec, mesh, stages, dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    make = recompute(how, [model], TrainAttend)
    here = len(tokens.ids_T)
    rows = slice_counts(here, tp.size)[tp.rank] if sequence else here
    before = [0 if prefix is None else tokens.lengths[prefix] for prefix in tokens.prefixes]
    batch = Microbatch(tokens.lengths, here, rows, tokens.predicted, dtype.itemsize, before=before)

    def forward() -> object:
        x = tokens.ids_T if model.is_first else torch.ones(rows, spec.hidden_size, dtype=dtype).requires_grad_()
        out = model(x, tokens.positions_T, make(model.attention_specs(), tokens), tokens.lengths_T)
        return NextTokenLoss(mesh)(model, out, tokens).loss if model.is_last else out

    forward()
    tp.barrier()
    with Live() as live:
        graph = forward()
        tp.barrier()
        gc.collect()  # what is only in a circle is kept by nothing
        measured = live.now
    assert graph is not None
    return measured, run_bytes(spec, layers, cut, batch, how) + (logits_bytes(spec, cut, batch) if model.is_last else 0)


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """The collector has only to look at what the test makes."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def attention_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned: an earlier test may have trained in 16 bits and found float32 faster, which keeps copies."""
    monkeypatch.setattr(attention_dtype, "_chosen", {})


SAME_BUT_FOR_ANGLES = ("llama_linear", "llama_dynamic", "llama_yarn", "llama3", "qwen2", "qwen3_moe", "qwen3_vl")

GRID: list[tuple[tuple[int, ...], bool, range, list[int], float]] = [
    ((1,), False, range(4), [64], 0.0),
    ((1,), False, range(2), [64, 64], 0.0),
    ((1,), False, range(2, 4), [60, 33, 33], 0.1),
    ((1, 2, 1), False, range(4), [70], 0.0),
    ((1, 1), True, range(1, 3), [61, 40], 0.1),
    ((1, 1), True, range(2, 4), [61, 40], 0.1),
]


CASES = [case for case in TRAINABLE if case not in SAME_BUT_FOR_ANGLES]
PARTS = [case for case in (*UNLIKE, "deepseek_v2_moe", "exaone4", "gemma4", "arcee") if case in CASES]
"""Beside those with orders of their own a latent without one for queries, rope in some layers, another MLP."""

WAYS: tuple[Recompute, ...] = ("none", "selective", "layer")


@EACH_PART
@pytest.mark.parametrize("case", soak_but(PARTS, CASES))
def test_kept_bytes_are_planned_bytes(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_of(tmp_path)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for number, (shares, sequence, layers, lengths, ignored) in enumerate(GRID):
        tokens = documents(lengths, ignored)
        ways = WAYS[number % 3 :] + WAYS[: number % 3]
        for how in in_turn(ways, case, [*PARTS, *CASES], part, count=1):
            dtype = dtypes[(number + WAYS.index(how)) % 3]
            of_rank = partial(kept, spec, tokens, layers, sequence, how, dtype)
            pairs = zip(local_groups(len(shares)), cut_stage(spec, shares), strict=True)
            for measured, planned in in_threads([partial(of_rank, *pair) for pair in pairs]):
                assert planned == pytest.approx(measured, rel=0.01), (number, how, dtype)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_oss_moe"])
def test_a_prompt_that_is_shared_is_kept_with_the_keys_of_each_run(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec, lengths = spec_of(tmp_path), [60, 33, 33, 9]
    (cut,) = cut_stage(spec, (1,))
    prompt = {PROMPT_LENGTH: torch.full((4,), 61)}
    tokens = replace(documents(lengths, 0.4), prefixes=(None, 0, 0, 0), of_documents=prompt)
    for how in WAYS[:2]:
        measured, planned = kept(spec, tokens, range(4), False, how, torch.float32, local_groups(1)[0], cut)
        assert planned == pytest.approx(measured, rel=0.01), how


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_a_ring_keeps_its_part(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec, tokens = spec_of(tmp_path), documents([101, 60], 0.0)
    (cut,) = cut_stage(spec, (1,))

    def of_rank(cp: Group) -> Kept:
        model = build_chunks(
            spec, Mesh(0, 2, range(0), local_groups(1)[0], cut), [range(2), range(2, 4)], torch.float32
        )[0]
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        mine, ring = cut_tokens(tokens, cp.rank, cp.size), RingAttention(cp)
        count = len(mine.ids_T)
        with Live() as live:
            out = model(mine.ids_T, mine.positions_T, ring(model.attention_specs(), mine), mine.lengths_T)
            cp.barrier()
            measured = live.now
        ring.close()
        assert out.requires_grad
        batch = Microbatch(tokens.lengths, count, count, mine.predicted, 4, cp=True)
        return measured, run_bytes(spec, range(2), cut, batch, "none")

    for measured, planned in in_threads([partial(of_rank, cp) for cp in local_groups(3, name="cp")]):
        assert planned == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("case", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_graph_holds_what_was_made_again(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Between the two halves of a backward pass everything is there that a run without recomputation keeps."""
    save_model(case, tmp_path)
    spec, tokens = spec_of(tmp_path), documents([64], 0.0)
    (cut,) = cut_stage(spec, (1,))
    mesh = Mesh(1, 2, range(0), local_groups(1)[0], cut)
    (model,) = build_chunks(spec, mesh, [range(2), range(2, 4)], dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    make: Callable[..., object] = recompute("layer", [model], TrainAttend)
    assert make is TrainAttend
    batch = Microbatch(tokens.lengths, 64, 64, 64, dtype.itemsize)
    with Live() as live:
        x = torch.ones(64, spec.hidden_size, dtype=dtype).requires_grad_()
        out = model(x, tokens.positions_T, TrainAttend(model.attention_specs(), tokens), tokens.lengths_T)
        before = live.now
        of_x = torch.autograd.grad(out.sum(), x, retain_graph=True)
        after = live.now - of_x[0].nbytes
    again = sum(recomputed_bytes(spec, number, cut, batch, "layer") for number in (2, 3))
    assert after - before == pytest.approx(again, rel=0.01)
