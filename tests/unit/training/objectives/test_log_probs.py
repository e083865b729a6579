"""Log-probabilities of documents, over every way to cut a model, equal to plain softmax on one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.training.training_step import (
    Layout,
    Named,
    Rank,
    close,
    furthest,
    gather,
    random_tokens,
    ranks_of,
    saved,
)
from tllm.model.transformer import Transformer
from tllm.spec.pipeline_schedule import forward_only
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.objectives.log_probs import TokenLosses, document_sums
from tllm.training.objectives.objective import MetricSum, MicrobatchLoss
from tllm.training.step.pipeline_step import run_forward, run_schedule

LAYOUTS = {
    "one": Layout(),
    "pp 2, tp 2, sequence": Layout(stages=2, shares=((1, 1),), sequence=True),
    "cp 2": Layout(cp=2),
    "cp 2, tp 2": Layout(cp=2, shares=((1, 1),)),
    "pp 2, chunks 2": Layout(stages=2, order="interleaved", chunks=2),
}


class SquaredSums:
    """The sum of squares of the documents' log-probabilities: each gradient needs a whole document."""

    metric_names = ("least",)

    def __init__(self, rank: Rank) -> None:
        self.losses, self.cp = TokenLosses(rank.mesh), rank.cp
        self.sums: list[Tensor] = []

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        sums_N = document_sums(self.losses.log_probs(model, x_TD, tokens), tokens, self.cp)
        self.sums.append(sums_N.detach())
        loss = (sums_N**2).sum()
        return MicrobatchLoss(loss, loss * (self.cp.rank == 0), {"least": MetricSum(float(sums_N.detach().min()), 1.0)})


def wanted(rank: Rank, microbatches: list[Tokens], folder: Path) -> tuple[list[Tensor], Named]:
    """The same by torch's log_softmax, and the gradients by the checkpoint's names."""
    (model,) = rank.chunks
    sums = []
    rank.buckets.begin(len(microbatches))
    for tokens in microbatches:
        x_TD = model(tokens.ids_T, tokens.positions_T, TrainAttend(model.attention_specs(), tokens), tokens.lengths_T)
        chances_TV = model.logits(x_TD).log_softmax(-1)
        of_label_T = chances_TV.gather(1, tokens.labels_T.clamp(min=0)[:, None])[:, 0] * (tokens.labels_T != IGNORED)
        sums.append(torch.stack([part.sum() for part in of_label_T.split(tokens.lengths)]))
        (sums[-1] ** 2).sum().backward()
    rank.buckets.finish()
    return [sum_N.detach() for sum_N in sums], _gradients([rank], folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_have_the_sums_of_plain_softmax(name: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    microbatches = random_tokens(3)
    (alone,) = ranks_of(tmp_path, Layout(), torch.float64)
    sums, gradients = wanted(alone, microbatches, tmp_path)
    close([alone])

    def run(rank: Rank) -> None:
        mine = [cut_tokens(tokens, rank.cp.rank, rank.cp.size) for tokens in microbatches]
        stage = rank.stage(SquaredSums(rank))
        found = run_forward(forward_only(rank.layout.stages, 3, rank.layout.chunks), stage, mine)
        trained = SquaredSums(rank)
        rank.buckets.begin(3)
        after = run_schedule(rank.layout.schedule(3), rank.stage(trained), mine, 1.0)
        rank.buckets.finish()
        assert (found.loss_sum, found.metrics) == (after.loss_sum, after.metrics)
        if rank.mesh.stage == rank.layout.stages - 1:
            for sum_N, want_N in zip(trained.sums, sums, strict=True):
                torch.testing.assert_close(sum_N, want_N, rtol=1e-10, atol=0)
            assert found.metrics["least"].count == 3
            if rank.cp.rank == 0:
                assert found.loss_sum == pytest.approx(sum(float((want_N**2).sum()) for want_N in sums), rel=1e-12)

    ranks = ranks_of(tmp_path, LAYOUTS[name], torch.float64)
    in_threads([partial(run, rank) for rank in ranks])
    far, where = furthest(_gradients(ranks, tmp_path), gradients)
    assert far < 1e-12, where
    close(ranks)


def _gradients(ranks: list[Rank], folder: Path) -> Named:
    return gather(ranks, lambda rank, index: rank.buckets.accumulator.view(index).clone(), saved(folder))
