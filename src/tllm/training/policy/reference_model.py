"""`ReferenceModel`: the model that a run began with, to which the KL penalty holds the policy.

Where the policy is an adapter, the reference is the model without it. Otherwise it takes as much memory as the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tllm.parallel.mesh import mesh_of
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.policy_gradient import KEPT, KeepLogProbs
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.weights.load import Progress


class ReferenceModel:
    """This rank's part of it, cut as the `policy` is. Every rank makes the same calls."""

    def __init__(self, config: RankConfig, temperature: float, policy: RankModel) -> None:
        self._is_beside = not policy.adapters
        self._model = RankModel(config) if self._is_beside else policy
        mesh = mesh_of(config.spec, config.plan, config.rank, config.groups.tp)
        self._objective = KeepLogProbs(mesh, temperature, policy.is_batch_invariant)
        self._job, self._spec, self._device = config.job, config.spec, config.device

    def fill(self, weights: InitialWeights, progress: Progress | None = None) -> None:
        """Give it the weights that the run began with, also where the run goes on."""
        if not self._is_beside:
            return
        fill = weights.filler(self._spec, self._job.seed, self._job.dtype, progress)
        for chunk in self._model.chunks:
            fill(chunk)

    def log_probs(self, microbatches: Sequence[Tokens], dtype: torch.dtype) -> list[Tensor]:
        """log p(label) of each token of each microbatch, [T], as ranks of the last stage find them; 0 elsewhere."""
        found = [torch.zeros(len(tokens.ids_T), dtype=dtype, device=self._device) for tokens in microbatches]
        self._model.forward_only(
            [
                replace(tokens, of_tokens={**tokens.of_tokens, KEPT: log_probs_T})
                for tokens, log_probs_T in zip(microbatches, found, strict=True)
            ],
            self._objective,
            adapted=False,
        )
        return found

    def close(self) -> None:
        if self._is_beside:
            self._model.close()
