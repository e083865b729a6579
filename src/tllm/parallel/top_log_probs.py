"""The most likely tokens and their log-probabilities, over a vocabulary that is cut between ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.parallel.cross_entropy import gathered
from tllm.parallel.embedding import ids_held
from tllm.spec.cut import Range


@torch.no_grad()
def top_log_probs(logits_TV: Tensor, k: int, vocab: Range, tp: Group) -> tuple[Tensor, Tensor]:
    """The `k` most likely tokens, int64 [T, k], and log-probabilities, [T, k + 1]: theirs, and of all others together.

    From this rank's columns [vocab) of the logits, which are changed; alike on every rank. `k` is less than the whole
    vocabulary. The rest is summed by itself and not as what is left of 1: it may be far smaller than a rounding error.
    """
    tokens, width = logits_TV.shape
    mine_TK, columns_TK = logits_TV.topk(min(k, width), -1)
    shapes = [(tokens, int(kept)) for kept in gathered(torch.tensor(mine_TK.shape[1]), tp)]
    tops_TN = torch.cat(tp.all_gather(mine_TK.cpu().contiguous(), shapes), -1)
    ids_TN = torch.cat(tp.all_gather((columns_TK + vocab[0]).cpu(), shapes), -1)
    top_TK, at_TK = tops_TN.topk(k, -1)
    ids_TK = ids_TN.gather(-1, at_TK)
    here_TK, column_TK = ids_held(ids_TK, vocab)
    taken_TK = torch.where(here_TK, -math.inf, math.inf).to(logits_TV.dtype)
    logits_TV.scatter_reduce_(-1, column_TK.to(logits_TV.device), taken_TK.to(logits_TV.device), "amin")
    rest_T = gathered(logits_TV.logsumexp(-1).cpu(), tp).logsumexp(0)
    return ids_TK, torch.cat((top_TK, rest_T[:, None]), -1).log_softmax(-1)
