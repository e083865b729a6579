"""`HiddenStateLoss`: the distance of a student's hidden states, projected to the teacher's width, from the teacher's.

FitNets (1412.6550) has a student learn from what is in the middle of its teacher through a regressor that is learned
with it, TinyBERT (1909.10351, equation 7) from several layers by the mean square, DistilBERT (1910.01108) by the
cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.kernels.training.training_matmul import training_matmul
from tllm.model.layer import Observe, unobserved
from tllm.model.transformer import Transformer
from tllm.parallel.load_balance import with_loss
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter, shard_of
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.data.seeds import key_for
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.objectives.objective import MetricSum, MicrobatchLoss
from tllm.training.state.tensor_blocks import PROJECTION
from tllm.weights.dtypes import torch_dtype

STATES = "teacher_hidden_states."
"""What rows bring of the teacher's hidden states, with the layer's number as the job has it: [T, teacher's width], in
`hidden_state_dtype`, bfloat16 as int16. 0 where nothing is predicted."""

METRIC = "hidden_state_loss"


class HiddenStateProjection(nn.Module):
    """x_TD -> x W^T, of the teacher's width. Every rank that holds the layer has all of it."""

    def __init__(self, name: str, width: int, teacher_width: int, mesh: Mesh) -> None:
        super().__init__()
        shard = Shard((ShardPiece(name),), replicated=True, gradient=mesh.seam.gradient)
        self.weight = cut_parameter((teacher_width, width), shard)

    def forward(self, x_TD: Tensor) -> Tensor:
        return training_matmul(x_TD.to(self.weight.dtype), self.weight)


class HiddenStateLoss(nn.Module):
    """(number of a hidden state, its rows, tokens) -> its part of the loss; None for one that is in no pair.

    States are numbered as `ModelSpec.hidden_state` says. Of the job's pairs a rank has those whose student's state it
    computes, and their projections, which are learned, saved, and thrown away with the run.

    A pair's loss is the mean over the teacher's columns of the squares, or 1 - cosine, summed over the tokens whose
    label is not IGNORED; the pairs' mean times `hidden_state_loss_weight` is added to the loss of logits. The metric
    `hidden_state_loss` is the mean over tokens and pairs, without the weight.
    """

    def __init__(self, keys: DistillationKeys, mesh: Mesh, chunks: Iterable[Transformer], dtype: torch.dtype) -> None:
        super().__init__()
        self.keys, self.seam = keys, mesh.seam
        self.projections = nn.ModuleList()
        self._pairs: dict[int, list[tuple[HiddenStateProjection, str]]] = {}
        for model in chunks:
            held = {*map(int, model.layers), *([model.spec.num_layers] if model.is_last else [])}
            for student, teacher in keys.hidden_state_layers:
                number = model.spec.hidden_state(student)
                if number is not None and number in held:
                    assert keys.teacher_hidden_size is not None, "a job that names layers gives it"
                    name = f"{PROJECTION}{number}.{teacher}.weight"
                    one = HiddenStateProjection(name, model.spec.hidden_size, keys.teacher_hidden_size, mesh)
                    self.projections.append(one)
                    self._pairs.setdefault(number, []).append((one, f"{STATES}{teacher}"))
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_()

    def forward(self, number: int, x_TD: Tensor, tokens: Tokens, are_predicted: bool = False) -> MicrobatchLoss | None:
        """`x_TD` are the rows that this rank has outside the cut layers, or those of them that `are_predicted`."""
        pairs = self._pairs.get(number)
        if pairs is None:
            return None
        predicted_T = tokens.labels_T != IGNORED
        mine_T = self.seam.own(predicted_T)
        x_PD = x_TD if are_predicted else x_TD[mine_T]
        distances = [self._distance(p(x_PD), self.seam.own(tokens.of_tokens[told])[mine_T]).sum() for p, told in pairs]
        found = torch.stack(distances).sum()
        told = found.detach()
        if not self.seam.has_all_rows:  # of the ranks that have slices of these tokens, the first tells the loss
            told = self.seam.tp.all_reduce(told.reshape(1).cpu())[0]
        weight = self.keys.hidden_state_loss_weight / len(self.keys.hidden_state_layers)
        total = MetricSum(float(told), float(predicted_T.sum()) * len(pairs))
        return MicrobatchLoss(found * weight, told * weight, {METRIC: total})

    def _distance(self, projected_PD: Tensor, wanted_PD: Tensor) -> Tensor:
        """Of each token, in float32 at least."""
        x_PD = projected_PD.to(torch.promote_types(projected_PD.dtype, torch.float32))
        y_PD = (wanted_PD.view(torch.bfloat16) if wanted_PD.dtype == torch.int16 else wanted_PD).to(x_PD.dtype)
        if self.keys.hidden_state_loss == "cosine":
            return 1 - F.cosine_similarity(x_PD, y_PD, dim=-1)
        return (x_PD - y_PD).square().mean(-1)


def hidden_state_loss(
    job: Job, mesh: Mesh, chunks: Iterable[Transformer], device: torch.device
) -> HiddenStateLoss | None:
    """That of a job which names hidden states, in the dtype of what else is learned; None of any other."""
    if job.distill is None or not job.distill.hidden_state_layers:
        return None
    dtype = torch_dtype(job.dtype)
    learned = dtype if job.lora is None else torch.promote_types(dtype, torch.float32)
    return HiddenStateLoss(job.distill, mesh, chunks, learned).to(device)


def observed(of_states: HiddenStateLoss | None, tokens: Tokens, told: Callable[[MicrobatchLoss], Tensor]) -> Observe:
    """What a microbatch's hidden states go through before each layer; `told` gives a loss as the step learns it."""
    if of_states is None:
        return unobserved

    def observe(number: int, x_TD: Tensor) -> Tensor:
        found = of_states(number, x_TD, tokens)
        return x_TD if found is None else with_loss(x_TD, told(found))

    return observe


def with_projections(fill: Callable[[nn.Module], object], seed: int) -> Callable[[nn.Module], object]:
    """What fills a module's parameters, and projections among them: as `torch.nn.Linear` begins, uniform within
    1 / sqrt(D) for a student of width D, by the seed and the tensor's name, never by the layout."""

    def fill_both(module: nn.Module) -> None:
        names = {parameter: shard_of(parameter).pieces[0].name for parameter in module.parameters()}
        rest = [parameter for parameter, name in names.items() if not name.startswith(PROJECTION)]
        for parameter in names.keys() - set(rest):
            dice = torch.Generator().manual_seed(key_for("projection", seed, names[parameter]) >> 1)
            bound = parameter.shape[1] ** -0.5
            with torch.no_grad():
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=dice))
        if rest:
            fill(module if len(rest) == len(names) else nn.ParameterList(rest))

    return fill_both
