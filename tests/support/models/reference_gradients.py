"""Gradients of every tensor of a checkpoint, by `transformers`' own model and by ours under any plan in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.slow_load import slices, slow_load, text_tensors_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import Transformer, build
from tllm.parallel.cross_entropy import IGNORED, cross_entropy
from tllm.parallel.mesh import mesh_of
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.sequence_parallel import slice_counts
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Plan
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens

Gradients = dict[str, Tensor]
Mutation = Callable[[int, Transformer], None]


def packed(lengths: list[int], vocab: int = 101) -> Tokens:
    """Documents of random tokens; each learns its next ones, and here and there one is not learned."""
    chance = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, vocab, (length,), generator=chance) for length in lengths]
    labels = [torch.cat((ids[1:], torch.tensor([IGNORED]))) for ids in documents]
    for part in labels:
        part[3::7] = IGNORED
    places = [torch.arange(length) for length in lengths]
    return Tokens(torch.cat(documents), torch.cat(labels), torch.cat(places), lengths)


def apart(got: Gradients, want: Gradients, floor: float = 1e-3) -> dict[str, float]:
    """For each tensor |got - want| / |want|; a gradient below `floor` is nothing but rounding and counts as that."""
    assert got.keys() == want.keys(), f"tensors with a gradient differ: {sorted(got.keys() ^ want.keys())}"
    return {
        name: float((got[name].double() - want[name].double()).norm() / want[name].double().norm().clamp(min=floor))
        for name in want
    }


def true_gradients(model: transformers.PreTrainedModel, tokens: Tokens, folder: Path) -> tuple[Tensor, Gradients]:
    """The mean loss and its gradients by `transformers`, a document at a time, in float64 throughout.

    They are named as in the checkpoint by letting it save them as if they were weights.
    """
    total = torch.zeros((), dtype=torch.float64)
    with in_float64(model):
        for ids, labels in zip(tokens.ids_T.split(tokens.lengths), tokens.labels_T.split(tokens.lengths), strict=True):
            logits_TV = model(ids[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits_TV, labels, reduction="sum", ignore_index=IGNORED)
        loss = total / tokens.predicted
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        forget_corrections(model)
    model.save_pretrained(folder)
    return loss.detach(), text_tensors_of(folder)


def forget_corrections(model: transformers.PreTrainedModel) -> None:
    """A router's correction bias and a layer's scale are saved and have no gradient: 0 in ours."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer.zero_()


def gradients_under(
    folder: Path,
    plan_text: str,
    tokens: Tokens,
    dtype: torch.dtype,
    sequence: bool = False,
    mutate: Mutation = lambda rank, model: None,
) -> tuple[Tensor, Gradients]:
    """The mean loss and its gradients under a plan, put together from the pieces of all ranks.

    An element that several ranks hold must have the same gradient on each, to the bit.
    """
    spec = spec_of(folder)
    plan = Plan.parse(plan_text, spec.num_layers)
    ranks: list[_Rank] = []
    for stage in plan.stages:
        for tp in local_groups(stage.tp):
            model = build(spec, mesh_of(spec, plan, len(ranks), tp, sequence), dtype)
            slow_load(model, folder)
            mutate(len(ranks), model.requires_grad_(True))
            ranks.append(_Rank(model, tp, tokens))
    stages = [[ranks[r] for r in plan.ranks(stage)] for stage in range(plan.pp)]
    sent: list[Tensor] = [tokens.ids_T] * len(stages[0])
    for stage in stages:
        sent = _resliced(sent, len(stage), tokens, sequence) if stage is not stages[0] else sent
        sent = in_threads([partial(rank.forward, x) for rank, x in zip(stage, sent, strict=True)])
    assert all(torch.equal(sent[0], loss) for loss in sent), "ranks must agree on the loss to the bit"
    back: list[Tensor | None] = [None] * len(sent)
    for stage in reversed(stages):
        if back[0] is not None:
            back = list(_resliced([x for x in back if x is not None], len(stage), tokens, sequence))
        back = in_threads([partial(rank.backward, x) for rank, x in zip(stage, back, strict=True)])
    groups = local_groups(plan.world_size)
    in_threads([partial(sum_partial, list(r.model.parameters()), g) for r, g in zip(ranks, groups, strict=True)])
    return sent[0].detach(), put_together([rank.model for rank in ranks], folder)


@dataclass
class _Rank:
    model: Transformer
    tp: Group
    tokens: Tokens
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    out: Tensor = field(default_factory=lambda: torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """This stage's hidden state, or on the last stage the mean loss."""
        tokens = self.tokens
        self.x = x if self.model.is_first else x.detach().requires_grad_()
        attend = TrainAttend(self.model.attention_specs(), tokens)
        self.out = self.model(self.x, tokens.positions_T, attend, lengths_T=tokens.lengths_T)
        if self.model.is_last:
            logits_TV = self.model.logits(self.out, len(tokens.ids_T))
            loss_T = cross_entropy(logits_TV, tokens.labels_T, self.model.vocab, self.tp)
            self.out = loss_T.sum() / tokens.predicted
        return self.out.detach()

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        self.out.backward(gradient)
        return self.x.grad


def _resliced(parts: list[Tensor], ranks: int, tokens: Tokens, sequence: bool) -> list[Tensor]:
    """What the ranks of the next stage take: all of it each, or its slice of the tokens."""
    if not sequence:
        assert all(torch.equal(parts[0], part) for part in parts), "ranks of a stage must agree to the bit"
        return [parts[0]] * ranks
    whole = torch.cat(parts) if len(parts[0]) < len(tokens.ids_T) else parts[0]
    return list(whole.split(slice_counts(len(whole), ranks)))


def put_together(models: list[Transformer], folder: Path) -> Gradients:
    shapes = {name: tensor.shape for name, tensor in text_tensors_of(folder).items()}
    whole: Gradients = {}
    for model in models:
        for parameter in model.parameters():
            assert parameter.grad is not None
            for piece in shard_of(parameter).pieces:
                if piece.name not in whole:
                    whole[piece.name] = torch.full(shapes[piece.name], float("nan"), dtype=parameter.dtype)
                place = whole[piece.name][slices(piece.source)]
                mine = parameter.grad[slices(piece.target)].reshape(place.shape)
                known = ~place.isnan()
                assert torch.equal(place[known], mine[known]), f"ranks differ on the gradient of {piece.name}"
                place.copy_(mine)
    assert not any(tensor.isnan().any() for tensor in whole.values()), "an element has no gradient"
    return whole


class _Float64(TorchFunctionMode):
    """What asks for float32 gets float64, so that the reference is not itself rounded in its norms and softmaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on:
            args = [torch.float64 if a is torch.float32 else a for a in args]
            kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in kwargs.items()}
            func = torch.Tensor.double if func is torch.Tensor.float else func
        if func is torch.polar:  # which rounds its cosines and sines otherwise than torch.cos and torch.sin do
            length, angle = args
            return torch.complex(length * angle.cos(), length * angle.sin())
        return func(*args, **kwargs)


@contextmanager
def in_float64(model: transformers.PreTrainedModel) -> Iterator[None]:
    """The model becomes one of float64, all of it; but rotary angles stay float32, as in ours and in training."""
    model.double().config._experts_implementation = "eager"  # the default multiplies in float32 or less
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    mode = _Float64()
    hooks = []
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            hooks.append(module.register_forward_pre_hook(lambda *_: setattr(mode, "on", False)))
            hooks.append(module.register_forward_hook(lambda *_: setattr(mode, "on", True)))
    with mode:
        yield
    for hook in hooks:
        hook.remove()


def sum_partial(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """After a backward pass: complete `.grad` of what ranks of the group computed in part. No gradient is a zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ReplicatedParameters(parameters, group).sum_partial([p.grad for p in parameters if p.grad is not None])
