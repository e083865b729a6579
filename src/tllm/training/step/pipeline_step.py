"""The forward and backward passes of one pipeline stage: its list of a schedule (GPipe, 1F1B, …), executed op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.parallel.quantized_weight import stands_for
from tllm.spec.pipeline_schedule import Kind, Op, Schedule, StageChunk
from tllm.training.attention.packed_attention import MakeAttend, TrainAttend
from tllm.training.data.batch_tensors import Tokens, sent_to_host
from tllm.training.gradients.accumulation_order import exact_sum
from tllm.training.lora.trained_adapter import MakeAdapt, as_it_is
from tllm.training.objectives.hidden_state_loss import HiddenStateLoss, observed
from tllm.training.objectives.objective import MetricSum, MicrobatchLoss, Objective, all_joined
from tllm.training.step.pipeline_wires import Mail, Wires
from tllm.training.step.split_backward import input_half


@dataclass(frozen=True)
class TrainStage:
    """What one rank computes with: its place among the stages, its chunks of layers in order, its links to the others.

    `make_attend` gives the attention of each microbatch, `make_adapt` what is added to its linears; `objective` is used
    on the last stage. `of_states` gives the losses of hidden states before its layers, if any is learned from.
    """

    index: int
    chunks: Sequence[Transformer]
    wires: Wires
    objective: Objective
    make_attend: MakeAttend = TrainAttend
    make_adapt: MakeAdapt = as_it_is
    of_states: HiddenStateLoss | None = None


@dataclass(frozen=True)
class StepResult:
    """`loss_sum` over `tokens` predicted tokens of this replica, and `metrics`: each known on the stage that has it.

    Where context-parallel ranks share the tokens, both are of the tokens on this rank. `waited`: seconds in which this
    stage had no work. `loss_rest` is the rounding error of `loss_sum`: summed together over ranks (`exact_sum`), the
    total is the same to the bit for every number of ranks.
    """

    loss_sum: float
    tokens: int
    waited: float = 0.0
    loss_rest: float = 0.0
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)


@dataclass
class _LivePass:
    """One microbatch on one chunk, from its forward pass to its last gradient.

    `weight_backward` computes the weights' gradients, where the schedule separates them from those of the input.
    """

    x: Tensor
    out: Tensor
    weight_backward: Callable[[], None] | None = None


@dataclass
class _ScheduleExecutor:
    """The state of a stage while it executes its list: the live passes and the losses so far. One method a kind of op.

    `live` is keyed by (microbatch, chunk).
    """

    schedule: Schedule
    stage: TrainStage
    microbatches: Sequence[Tokens]
    mail: Mail
    loss_scale: float
    losses: list[Callable[[], float]] = field(default_factory=list)
    metrics: list[Mapping[str, MetricSum]] = field(default_factory=list)
    live: dict[tuple[int, int], _LivePass] = field(default_factory=dict)

    def forward(self, op: Op) -> None:
        x, out = self._passed(op)
        self.live[op.microbatch, op.chunk] = _LivePass(x, out)

    @torch.no_grad()
    def forward_only(self, op: Op) -> None:
        self._passed(op)

    def _passed(self, op: Op) -> tuple[Tensor, Tensor]:
        """A chunk's input and its output, which on the last chunk is the loss."""
        model, tokens = self.stage.chunks[op.chunk], self.microbatches[op.microbatch]
        incoming = self.schedule.receives(self.stage.index, op)
        x = tokens.ids_T if incoming is None else self.mail.receive(incoming)
        x.requires_grad_(self.schedule.wants_input_gradient(StageChunk(self.stage.index, op.chunk)))
        attend = self.stage.make_attend(model.attention_specs(), tokens)
        adapt = self.stage.make_adapt(op.chunk, tokens)
        observe = observed(self.stage.of_states, tokens, self._told)
        lengths_T = tokens.lengths_T if model.scales_by_length else None
        out = model(x, tokens.positions_T, attend, lengths_T, adapt, observe=observe)
        outgoing = self.schedule.sends(self.stage.index, op)
        if outgoing is not None:
            self.mail.send(outgoing, out)
            return x, out
        return x, self._told(self.stage.objective(model, out, tokens))

    def _told(self, found: MicrobatchLoss) -> Tensor:
        """What a microbatch's loss adds to that of the step, once it is noted what is told of it."""
        reported = found.loss if found.reported is None else found.reported
        self.losses.append(sent_to_host(reported.detach()))
        self.metrics.append(found.metrics)
        return found.loss * self.loss_scale

    def backward(self, op: Op) -> None:
        live = self.live.pop((op.microbatch, op.chunk))
        _learn(live.out, self._output_gradient(op))
        self._send_input_gradient(op, live.x.grad)

    def backward_input(self, op: Op) -> None:
        live = self.live[op.microbatch, op.chunk]
        gradient = self._output_gradient(op)
        if self.schedule.sends(self.stage.index, op) is None:  # where learning begins: its input takes no gradient
            live.weight_backward = partial(_learn, live.out, gradient)
            return
        input_gradient, weight_half = input_half(live.out, gradient, live.x)
        live.weight_backward = weight_half.run
        self._send_input_gradient(op, input_gradient)

    def backward_weight(self, op: Op) -> None:
        weight_backward = self.live.pop((op.microbatch, op.chunk)).weight_backward
        assert weight_backward is not None
        weight_backward()

    def _output_gradient(self, op: Op) -> Tensor | None:
        """The gradient of an op's output, from the chunk above; None on the last chunk, whose output is the loss."""
        incoming = self.schedule.receives(self.stage.index, op)
        return None if incoming is None else self.mail.receive(incoming)

    def _send_input_gradient(self, op: Op, gradient: Tensor | None) -> None:
        outgoing = self.schedule.sends(self.stage.index, op)
        if outgoing is not None:
            assert gradient is not None
            self.mail.send(outgoing, gradient)


def _learn(out: Tensor, gradient: Tensor | None) -> None:
    """The backward pass from a chunk's output, unless nothing that is learned is behind it."""
    if out.requires_grad:
        torch.autograd.backward(out, gradient)


def run_schedule(
    schedule: Schedule, stage: TrainStage, microbatches: Sequence[Tokens], loss_scale: float
) -> StepResult:
    """Run a stage's list over the microbatches of its replica, which every stage of the replica must be given alike.

    The loss is the sum over tokens times `loss_scale`, usually one over the predicted tokens of the global batch. Its
    gradients are added up by the hooks of `GradientBuckets` on the parameters.
    """
    executor = _executor(schedule, stage, microbatches, loss_scale)
    ops: dict[Kind, Callable[[Op], None]] = {
        "forward": executor.forward,
        "backward": executor.backward,
        "backward_input": executor.backward_input,
        "backward_weight": executor.backward_weight,
    }
    for op in schedule.lists[stage.index]:
        ops[op.kind](op)
    assert not executor.live
    return _result(executor)


def run_forward(schedule: Schedule, stage: TrainStage, microbatches: Sequence[Tokens]) -> StepResult:
    """The forward passes alone, by a schedule of `forward_only`: nothing is kept for a backward pass."""
    executor = _executor(schedule, stage, microbatches, 1.0)
    for op in schedule.lists[stage.index]:
        executor.forward_only(op)
    return _result(executor)


def _executor(
    schedule: Schedule, stage: TrainStage, microbatches: Sequence[Tokens], loss_scale: float
) -> _ScheduleExecutor:
    chunks = stage.chunks
    assert len(microbatches) == schedule.microbatches and len(chunks) == schedule.chunks
    width, dtype = chunks[0].spec.hidden_size, stands_for(next(chunks[0].parameters()))[1]
    shapes = [(chunks[0].seam.own_count(len(microbatch.ids_T)), width) for microbatch in microbatches]
    mail = Mail(schedule, stage.index, stage.wires, shapes, dtype, next(chunks[0].parameters()).device)
    return _ScheduleExecutor(schedule, stage, microbatches, mail, loss_scale)


def _result(executor: _ScheduleExecutor) -> StepResult:
    tokens = sum(microbatch.predicted for microbatch in executor.microbatches)
    loss_sum, rest = exact_sum([loss() for loss in executor.losses])
    return StepResult(loss_sum, tokens, executor.mail.waited, rest, all_joined(executor.metrics))
