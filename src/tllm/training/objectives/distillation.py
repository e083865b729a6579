"""`DistillationLoss`: the objective of a student that learns from the distributions of a teacher."""

from __future__ import annotations

from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import cross_entropy, measured_cross_entropy
from tllm.parallel.divergence import NO_TOKEN, divergence_over_all, divergence_over_top
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.objectives.hidden_state_loss import METRIC, HiddenStateLoss
from tllm.training.objectives.objective import MetricSum, MicrobatchLoss

IDS, LOG_PROBS, BYTES, LOST = "teacher_ids", "teacher_log_probs", "teacher_bytes", "teacher_lost"
"""What rows bring of the teacher. Of each token: its K most likely next tokens, int32 [T, K], and the logarithms of
their probabilities, float32 [T, K + 1], of which the last is that of all others together; without ids those of all
tokens, [T, V]. Of each document: the bytes that it took on the way from and to a teacher elsewhere; and with a budget
the nats that are lost of what the teacher knows (`top_k_choice`), where an id may be NO_TOKEN."""


class DistillationLoss:
    """An `Objective`: alpha cross-entropy + (1 - alpha) divergence, over the tokens whose label is not IGNORED.

    The metrics are means over these tokens: `divergence`, `cross_entropy` of the text, `rest_mass` (the teacher's
    probability outside the top K), and `teacher_bytes_per_token`; with a budget `teacher_top_k`, the tokens that were
    sent, and `teacher_kl`, what is lost by it. The logits are held twice where alpha is above 0 or the temperature is
    not 1, else once. `of_states` adds its part for what the final norm gives, if the job asks for that.
    """

    def __init__(self, keys: DistillationKeys, mesh: Mesh, cp: Group, of_states: HiddenStateLoss | None = None) -> None:
        self.keys, self.tp, self.cp, self.of_states = keys, mesh.tp, cp, of_states
        of_budget = ("teacher_top_k", "teacher_kl") if keys.kl_budget else ()
        self._own_metrics = ("divergence", "cross_entropy", "rest_mass", "teacher_bytes_per_token", *of_budget)
        self.metric_names = (*self._own_metrics, *([METRIC] if keys.hidden_state_layers else []))
        self.sliced = not mesh.seam.has_all_rows

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        labels_T, log_p_TB, ids_TK = tokens.labels_T, tokens.of_tokens[LOG_PROBS], tokens.of_tokens.get(IDS)
        predicted_T = labels_T != IGNORED
        count = float(predicted_T.sum())
        if not self.sliced and count < len(labels_T):
            x_TD, labels_T, log_p_TB = x_TD[predicted_T], labels_T[predicted_T], log_p_TB[predicted_T]
            ids_TK = None if ids_TK is None else ids_TK[predicted_T]
            predicted_T = predicted_T[predicted_T]
        alpha, temperature = self.keys.alpha, self.keys.temperature
        normed_TD = model.normed(x_TD)
        logits_TV = model.lm_head(model.seam.enter(normed_TD, len(labels_T)))
        if not alpha:
            entropy_T = measured_cross_entropy(logits_TV, labels_T, model.vocab, self.tp)
        softened_TV = logits_TV / temperature if temperature != 1 else logits_TV.clone() if alpha else logits_TV
        if alpha:
            entropy_T = cross_entropy(logits_TV, labels_T, model.vocab, self.tp)
        divergence_T = self._divergence(softened_TV, ids_TK, log_p_TB, model).where(predicted_T, 0.0)
        loss = (1 - alpha) * divergence_T.sum() + (alpha * entropy_T.sum() if alpha else 0.0)
        rest = 0.0 if ids_TK is None else float((log_p_TB[:, -1].exp() * predicted_T).sum())
        totals = [float(divergence_T.detach().sum()), float(entropy_T.detach().sum()), rest, self._told(tokens, BYTES)]
        if self.keys.kl_budget:
            assert ids_TK is not None, "a budget is of top_k tokens"
            totals += [float(((ids_TK != NO_TOKEN).sum(-1) * predicted_T).sum()), self._told(tokens, LOST)]
        metrics = {name: MetricSum(total, count) for name, total in zip(self._own_metrics, totals, strict=True)}
        reported = loss.detach()
        if self.of_states is not None:
            found = self.of_states(model.spec.num_layers, normed_TD, tokens, are_predicted=not self.sliced)
            if found is not None and found.reported is not None:
                loss, reported, metrics = loss + found.loss, reported + found.reported, {**metrics, **found.metrics}
        return MicrobatchLoss(loss, reported, metrics)

    def _divergence(self, logits_TV: Tensor, ids_TK: Tensor | None, log_p_TB: Tensor, model: Transformer) -> Tensor:
        if ids_TK is None:
            return divergence_over_all(logits_TV, log_p_TB[:, slice(*model.vocab)], self.tp, self.keys.beta)
        return divergence_over_top(logits_TV, ids_TK, log_p_TB, model.vocab, self.tp, self.keys.beta)

    def _told(self, tokens: Tokens, name: str) -> float:
        """The sum over the documents of the whole microbatch, told by one of the ranks that share it."""
        of_documents = tokens.of_documents.get(name)
        return 0.0 if of_documents is None or self.cp.rank else float(of_documents.sum())
