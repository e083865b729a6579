"""The loss of a student under every way to cut it, equal to the plain definition on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.training.training_step import (
    Layout,
    Named,
    Rank,
    close,
    dealt,
    furthest,
    gather,
    random_tokens,
    ranks_of,
    saved,
)
from tests.unit.parallel.test_divergence import buckets, plain
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.objectives.distillation import BYTES, IDS, LOG_PROBS, DistillationLoss
from tllm.training.step.pipeline_step import StepResult, run_schedule

LAYOUTS = {
    "one": Layout(),
    "dp 2": Layout(dp=(1, 2)),
    "pp 2, tp 2, sequence": Layout(stages=2, shares=((1, 1),), sequence=True),
    "cp 2, tp 2": Layout(cp=2, shares=((1, 2),)),
    "pp 2, chunks 2, recompute": Layout(stages=2, order="interleaved", chunks=2, recompute="layer"),
    "zero bubble": Layout(stages=2, order="zero_bubble"),
}
KEYS = {
    "forward": DistillationKeys("teacher", top_k=6),
    "reverse, warm, with the text": DistillationKeys("teacher", top_k=6, beta=1.0, temperature=2.0, alpha=0.25),
    "jsd of all tokens with the text": DistillationKeys("teacher", top_k=0, beta=0.5, alpha=0.5),
}
WANTED = ("divergence", "cross_entropy", "rest_mass", "teacher_bytes_per_token")


def taught(tokens: Tokens, k: int, vocab: int = 101) -> Tokens:
    """The tokens with what a teacher of random logits says of each."""
    dice = torch.Generator().manual_seed(len(tokens.ids_T))
    log_TV = torch.randn(len(tokens.ids_T), vocab, generator=dice, dtype=torch.float64).mul_(2).log_softmax(-1)
    of_documents = {BYTES: torch.tensor([40.0] * len(tokens.lengths))}
    if not k:
        return replace(tokens, of_tokens={LOG_PROBS: log_TV}, of_documents=of_documents)
    ids_TK = log_TV.topk(k).indices
    return replace(tokens, of_tokens={IDS: ids_TK.int(), LOG_PROBS: buckets(log_TV, ids_TK)}, of_documents=of_documents)


def wanted(rank: Rank, microbatches: list[Tokens], keys: DistillationKeys, folder: Path) -> tuple[list[float], Named]:
    """The sums of the loss and of each metric by plain torch, and the gradients by the checkpoint's names."""
    (model,) = rank.chunks
    sums = torch.zeros(5, dtype=torch.float64)
    rank.buckets.begin(len(microbatches))
    for tokens in microbatches:
        x_TD = model(tokens.ids_T, tokens.positions_T, TrainAttend(model.attention_specs(), tokens), tokens.lengths_T)
        logits_TV, asked_T = model.logits(x_TD), tokens.labels_T != IGNORED
        entropy = F.cross_entropy(logits_TV, tokens.labels_T, reduction="sum")
        log_q_TV = (logits_TV / keys.temperature).log_softmax(-1)
        if keys.top_k:
            log_q_TV = buckets(log_q_TV, tokens.of_tokens[IDS].long())
        log_p_TB = tokens.of_tokens[LOG_PROBS]
        divergence = plain(log_p_TB, log_q_TV, keys.beta)[asked_T].sum()
        loss = keys.alpha * entropy + (1 - keys.alpha) * divergence
        loss.backward()
        rest = log_p_TB[asked_T, -1].exp().sum() if keys.top_k else torch.zeros(())
        bytes_taken = torch.tensor(40.0 * len(tokens.lengths))
        sums += torch.stack([one.detach().double() for one in (loss, divergence, entropy, rest, bytes_taken)])
    rank.buckets.finish()
    return sums.tolist(), _gradients([rank], folder)


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_plan_learns_what_the_definition_says(name: str, keys: DistillationKeys, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    microbatches = [taught(tokens, keys.top_k) for tokens in random_tokens(4)]
    (alone,) = ranks_of(tmp_path, Layout(), torch.float64)
    sums, gradients = wanted(alone, microbatches, keys, tmp_path)
    close([alone])
    layout = LAYOUTS[name]

    def run(rank: Rank) -> StepResult:
        mine = [cut_tokens(one, rank.cp.rank, rank.cp.size) for one in dealt(microbatches, layout.dp)[rank.replica]]
        rank.buckets.begin(len(mine))
        stage = rank.stage(DistillationLoss(keys, rank.mesh, rank.cp))
        result = run_schedule(layout.schedule(len(mine)), stage, mine, 1.0)
        rank.buckets.finish()
        return result

    ranks = ranks_of(tmp_path, layout, torch.float64)
    results = in_threads([partial(run, rank) for rank in ranks])
    told = [r for r, rank in zip(results, ranks, strict=True) if rank.mesh.tp.rank == 0 and r.metrics]
    found = [sum(r.loss_sum for r in told), *(sum(r.metrics[metric].total for r in told) for metric in WANTED)]
    assert found == pytest.approx(sums, rel=1e-10)
    assert sum(r.metrics["divergence"].count for r in told) == sum(one.predicted for one in microbatches)
    far, where = furthest(_gradients(ranks, tmp_path), gradients)
    assert far < 1e-10, where
    close(ranks)


def test_experts_spread_over_replicas(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    keys = KEYS["forward"]
    microbatches = [taught(tokens, keys.top_k) for tokens in random_tokens(4)]
    found = {}
    for layout in (Layout(), Layout(dp=(1, 1), ep=2)):
        ranks = ranks_of(tmp_path, layout, torch.float64)

        def run(rank: Rank) -> None:
            mine = dealt(microbatches, rank.layout.dp)[rank.replica]
            rank.buckets.begin(len(mine))
            stage = rank.stage(DistillationLoss(keys, rank.mesh, rank.cp))
            run_schedule(rank.layout.schedule(len(mine)), stage, mine, 1.0)
            rank.buckets.finish()

        in_threads([partial(run, rank) for rank in ranks])
        found[layout.ep] = _gradients(ranks, tmp_path)
        close(ranks)
    far, where = furthest(found[2], found[1])
    assert far < 1e-10, where


def _gradients(ranks: list[Rank], folder: Path) -> dict[str, Tensor]:
    return gather(ranks, lambda rank, index: rank.buckets.accumulator.view(index).clone(), saved(folder))
