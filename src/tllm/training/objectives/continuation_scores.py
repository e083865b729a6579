"""`ContinuationScores`: the log-probability of each document's labels, and how many are not the likeliest token."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import gathered, measured_cross_entropy
from tllm.parallel.mesh import Mesh
from tllm.spec.cut import Range
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.objectives.log_probs import TokenLosses, document_sums


class ContinuationScores:
    """(model, hidden_TD, tokens) -> log p(labels) and the labels that are not the likeliest, both [documents].

    Every rank of cp gets them all. Nothing is learned from them.
    """

    def __init__(self, mesh: Mesh, cp: Group) -> None:
        self._losses, self._cp = TokenLosses(mesh, precise=True), cp

    @torch.no_grad()
    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        labels_T, tp = tokens.labels_T, self._losses.tp
        learned_T = None if self._losses.sliced else tokens.learned_T
        if learned_T is not None:
            x_TD, labels_T = x_TD.index_select(0, learned_T), labels_T.index_select(0, learned_T)
        logits_TV = self._losses.logits(model, x_TD, len(labels_T))
        is_other_T = (labels_T != IGNORED) & ~is_likeliest(logits_TV, labels_T, model.vocab, tp)
        log_probs_T = -measured_cross_entropy(logits_TV, labels_T, model.vocab, tp)
        return self._sums(log_probs_T, tokens, learned_T), self._sums(is_other_T.to(x_TD.dtype), tokens, learned_T)

    def _sums(self, x_T: Tensor, tokens: Tokens, places_T: Tensor | None) -> Tensor:
        """Over documents, of numbers of these places; of all where it is None."""
        if places_T is not None:
            x_T = x_T.new_zeros(len(tokens.labels_T)).index_copy(0, places_T, x_T)
        return document_sums(x_T, tokens, self._cp)


def is_likeliest(logits_TV: Tensor, labels_T: Tensor, vocab: Range, tp: Group) -> Tensor:
    """Whether the label is the likeliest token, the first of those that are equal, from this rank's columns [vocab) of
    the logits."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)  # it holds every id
    mine_2T = torch.stack((logits_TV.amax(-1).to(dtype), (logits_TV.argmax(-1) + vocab[0]).to(dtype)))
    largest_PT, token_PT = gathered(mine_2T, tp).unbind(1)
    return token_PT.gather(0, largest_PT.argmax(0, keepdim=True))[0] == labels_T
