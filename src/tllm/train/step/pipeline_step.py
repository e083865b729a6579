"""One stage's part of a training step: `play` executes its list of a schedule, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tllm.model.attention import Attend, AttentionSpec
from tllm.model.transformer import Transformer
from tllm.parallel.sequence_parallel import SequenceParallelRegion, TensorParallelRegion, slice_counts
from tllm.spec.pipeline_schedule import Kind, Op, Schedule
from tllm.train.attention.packed_attention import TrainAttend
from tllm.train.data.batch_tensors import Tokens
from tllm.train.gradients.accumulation_order import exact_sum
from tllm.train.step.pipeline_wires import Mail, Wires
from tllm.train.step.split_backward import input_half

Objective = Callable[[Transformer, Tensor, Tokens], Tensor]
"""(last chunk's model, its hidden_TD, tokens) -> the sum of the losses of the microbatch's tokens, a number."""

MakeAttend = Callable[[dict[int, AttentionSpec], Tokens], Attend]
"""(how each layer attends, a microbatch) -> its attention, for one pass over the layers."""


@dataclass(frozen=True)
class StepResult:
    """`loss_sum` over `tokens` predicted tokens of this replica: known on its last stage, 0 elsewhere.

    Where cp ranks share the tokens, both are of those that are here. `waited` are seconds without work for this stage.
    `loss_rest` is what rounding took from `loss_sum`: with it, sums of these over ranks are the same however many.
    """

    loss_sum: float
    tokens: int
    waited: float = 0.0
    loss_rest: float = 0.0


@dataclass
class _Pass:
    """One microbatch on one chunk between its forward and its last gradient; `later` works out the weights' part."""

    x: Tensor
    out: Tensor
    later: Callable[[], None] | None = None


@dataclass
class _Player:
    """A stage's state while it plays: what is still needed, what the loss is so far. One method for each kind of op."""

    schedule: Schedule
    stage: int
    chunks: Sequence[Transformer]
    microbatches: Sequence[Tokens]
    mail: Mail
    objective: Objective
    scale: float
    make_attend: MakeAttend
    losses: list[Tensor] = field(default_factory=list)
    live: dict[tuple[int, int], _Pass] = field(default_factory=dict)

    def forward(self, op: Op) -> None:
        model, tokens = self.chunks[op.chunk], self.microbatches[op.microbatch]
        came = self.schedule.receives(self.stage, op)
        x = tokens.ids_T if came is None else self.mail.take(came).requires_grad_()
        attend = self.make_attend(model.attention_specs(), tokens)
        out = model(x, tokens.positions_T, attend, tokens.lengths_T)
        goes = self.schedule.sends(self.stage, op)
        if goes is not None:
            self.mail.send(goes, out)
        else:
            loss = self.objective(model, out, tokens)
            self.losses.append(loss.detach())
            out = loss * self.scale
        self.live[op.microbatch, op.chunk] = _Pass(x, out)

    def backward(self, op: Op) -> None:
        made = self.live.pop((op.microbatch, op.chunk))
        torch.autograd.backward(made.out, self._of_result(op))
        self._leave(op, made.x.grad)

    def backward_input(self, op: Op) -> None:
        made = self.live[op.microbatch, op.chunk]
        gradient = self._of_result(op)
        if self.schedule.sends(self.stage, op) is None:  # the model's start: token ids take no gradient
            made.later = partial(torch.autograd.backward, made.out, gradient)
            return
        of_x, half = input_half(made.out, gradient, made.x)
        made.later = half.run
        self._leave(op, of_x)

    def backward_weight(self, op: Op) -> None:
        later = self.live.pop((op.microbatch, op.chunk)).later
        assert later is not None
        later()

    def _of_result(self, op: Op) -> Tensor | None:
        """The gradient of an op's result, from the chunk above; None on the last, whose result is the loss."""
        came = self.schedule.receives(self.stage, op)
        return None if came is None else self.mail.take(came)

    def _leave(self, op: Op, gradient: Tensor | None) -> None:
        goes = self.schedule.sends(self.stage, op)
        if goes is not None:
            assert gradient is not None
            self.mail.send(goes, gradient)


def play(
    schedule: Schedule,
    stage: int,
    chunks: Sequence[Transformer],
    microbatches: Sequence[Tokens],
    wires: Wires,
    objective: Objective,
    scale: float,
    make_attend: MakeAttend = TrainAttend,
) -> StepResult:
    """Run this stage's list over the microbatches of its replica, which every stage must be given alike.

    `chunks` are this stage's runs of layers. Gradients of the sum of losses times `scale`, usually one over the
    predicted tokens of the global batch, are accumulated in the parameters, where `Buckets` takes them.
    """
    assert len(microbatches) == schedule.microbatches and len(chunks) == schedule.chunks
    width, dtype = chunks[0].spec.hidden_size, next(chunks[0].parameters()).dtype
    shapes = [(_rows(chunks[0].seam, len(microbatch.ids_T)), width) for microbatch in microbatches]
    mail = Mail(schedule, stage, wires, shapes, dtype)
    player = _Player(schedule, stage, chunks, microbatches, mail, objective, scale, make_attend)
    ops: dict[Kind, Callable[[Op], None]] = {
        "forward": player.forward,
        "backward": player.backward,
        "backward_input": player.backward_input,
        "backward_weight": player.backward_weight,
    }
    for op in schedule.lists[stage]:
        ops[op.kind](op)
    assert not player.live
    tokens = sum(microbatch.predicted for microbatch in microbatches)
    loss_sum, rest = exact_sum([float(loss) for loss in player.losses])
    return StepResult(loss_sum, tokens, mail.waited, rest)


def _rows(seam: TensorParallelRegion, tokens: int) -> int:
    """How many of a microbatch's tokens come to this rank from another stage."""
    return slice_counts(tokens, seam.tp.size)[seam.tp.rank] if isinstance(seam, SequenceParallelRegion) else tokens
