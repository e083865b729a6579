"""The deterministic mode: weights, optimizer states, losses and norms are the same bits under every plan it allows."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.training.training_step import Layout, Rank, close, dealt, predicted, random_tokens, ranks_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import Transformer
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.accumulation_order import exact_sum
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.step.pipeline_step import StepResult, run_schedule

ONE = Layout(deterministic=True)
EVERY = {
    "dp 2, zero 1": replace(ONE, dp=(1, 1), zero=1),
    "dp 4, zero 2": replace(ONE, dp=(1,) * 4, zero=2),
    "dp 8": replace(ONE, dp=(1,) * 8),
    "dp 8, zero 3": replace(ONE, dp=(1,) * 8, zero=3),
    "stages": replace(ONE, stages=3, order="1f1b", depth=2),
    "unlike stages, zero bubble": replace(ONE, stages=2, order="zero_bubble", layers=(1, 3), dp=(1, 1), zero=2),
    "chunks": replace(ONE, stages=2, order="interleaved", chunks=2, dp=(1, 1), zero=1),
    "layers again, zero 3": replace(ONE, stages=2, dp=(1,) * 4, zero=3, recompute="layer"),
}
LIMIT = 0.5  # of the norm, so that every step is clipped


class Run:
    """A training run in parts, each under a layout of its own, over batches of `count` microbatches."""

    def __init__(self, model: Path, root: Path, count: int, dtype: torch.dtype, rule: Optimizer) -> None:
        self.model, self.root, self.count, self.dtype, self.rule = model, root, count, dtype, rule
        self.seen: list[tuple[float, float]] = []

    def go_on(self, layout: Layout, stop: int) -> str:
        """Train up to step `stop`; the digest of all that is then saved, and of the losses and norms so far."""
        ranks = ranks_of(self.model, layout, self.dtype, self.rule, weight_decay=0.1)
        groups = local_groups(len(ranks), name="saves")
        tasks = [partial(self._learn, rank, group, stop) for rank, group in zip(ranks, groups, strict=True)]
        steps = zip(*in_threads(tasks), strict=True)
        close(ranks)
        for of_ranks in steps:
            (norm,) = {norm for _, norm in of_ranks}
            parts = [part for result, _ in of_ranks for part in (result.loss_sum, result.loss_rest)]
            self.seen.append((exact_sum(parts)[0], norm))
        opened, digest = open_folder(self.root / f"step-{stop}"), hashlib.sha256(repr(self.seen).encode())
        for name in sorted(opened.shapes):
            digest.update(name.encode() + opened.whole(name).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _learn(self, rank: Rank, group: Group, stop: int) -> list[tuple[StepResult, float]]:
        checkpoints, done = AsyncSaves(self.root, group), 0
        if checkpoints.latest is not None:
            done = checkpoints.restore(rank.update.blocks()).step
        results = [self._step(rank, number) for number in range(done + 1, stop + 1)]
        checkpoints.save(stop, rank.update.blocks(), {})
        assert [result.error for result in checkpoints.wait()] == [""]
        checkpoints.close()
        return results

    def _step(self, rank: Rank, number: int) -> tuple[StepResult, float]:
        batch = random_tokens(self.count, seed=number)
        mine, objective = dealt(batch, rank.layout.dp)[rank.replica], NextTokenLoss(rank.mesh)
        rank.buckets.begin(len(mine))
        rank.gathering.begin(len(mine))
        schedule, scale = rank.layout.schedule(len(mine)), 1 / predicted(batch)
        result = run_schedule(schedule, rank.stage(objective), mine, scale)
        rank.buckets.finish()
        rank.gathering.finish()
        norm = rank.norm.clip(LIMIT)
        rank.update.apply(number, 1e-2)
        return result, norm


def digest_of(
    folder: Path,
    name: str,
    layouts: list[tuple[Layout, int]],
    count: int = 8,
    dtype: torch.dtype = torch.float32,
    rule: Optimizer | None = None,
) -> str:
    run = Run(folder / "model", folder / name, count, dtype, rule or AdamW())
    return [run.go_on(layout, stop) for layout, stop in layouts][-1]


@pytest.mark.slow
def test_every_plan_ends_with_the_same_bits(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    want = digest_of(tmp_path, "one", [(ONE, 2)])
    for name in EVERY:
        if name in ("dp 2, zero 1", "dp 8, zero 3"):  # the one is below, the other the first of these halves
            continue
        assert digest_of(tmp_path, name, [(EVERY[name], 2)]) == want, name
    assert digest_of(tmp_path, "halves", [(EVERY["dp 8, zero 3"], 1), (EVERY["chunks"], 2)]) == want


@pytest.mark.soak
@pytest.mark.parametrize("parts", [{"dp 8, zero 3": 30}, {"dp 4, zero 2": 15, "chunks": 30}], ids=["whole", "halves"])
def test_thirty_steps_do_too(parts: dict[str, int], tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    want = digest_of(tmp_path, "one", [(ONE, 30)])
    assert digest_of(tmp_path, "other", [(EVERY[name], stop) for name, stop in parts.items()]) == want


@pytest.mark.parametrize(
    ("case", "dtype", "count", "rule", "name"),
    [
        ("qwen3_moe", torch.float32, 8, AdamW(), "unlike stages, zero bubble"),
        ("gemma2", torch.float64, 8, SGD(nesterov=True), "dp 4, zero 2"),
        ("llama", torch.bfloat16, 8, AdamW(), "unlike stages, zero bubble"),
        ("llama", torch.float32, 12, SGD(), "dp 4, zero 2"),
    ],
)
def test_every_kind_of_model_does(
    case: str, dtype: torch.dtype, count: int, rule: Optimizer, name: str, tmp_path: Path
) -> None:
    save_model(case, tmp_path / "model", tie_word_embeddings=False)
    want = digest_of(tmp_path, "one", [(ONE, 2)], count, dtype, rule)
    assert digest_of(tmp_path, name, [(EVERY[name], 2)], count, dtype, rule) == want


def test_tied_tables_do_on_one_stage(tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path / "model")
    assert digest_of(tmp_path, "two", [(EVERY["dp 2, zero 1"], 2)]) == digest_of(tmp_path, "one", [(ONE, 2)])


def test_the_ordinary_mode_does_not(tmp_path: Path) -> None:
    """Else this file proves nothing: the same layouts without the mode end with other bits."""
    save_model("llama", tmp_path / "model")
    layouts = [ONE, EVERY["dp 4, zero 2"], EVERY["dp 8"]]
    plain = [replace(layout, deterministic=False) for layout in layouts]
    assert len({digest_of(tmp_path, str(i), [(layout, 2)]) for i, layout in enumerate(plain)}) == 3


def test_a_step_keeps_what_rounding_takes_from_its_loss(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (rank,) = ranks_of(tmp_path, ONE, torch.float64)
    batch, losses = random_tokens(8), list[float]()

    class Noted(NextTokenLoss):
        def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
            found = super().__call__(model, x_TD, tokens)
            losses.append(found.loss.item())
            return found

    rank.buckets.begin(8)
    result = run_schedule(ONE.schedule(8), rank.stage(Noted(rank.mesh)), batch, 1.0)
    close([rank])
    assert Fraction(result.loss_sum) + Fraction(result.loss_rest) == sum(map(Fraction, losses))
    assert result.loss_rest != 0, "these losses have more bits than one number holds"
