"""What is sent by each way to cut a model among the ranks of `tp`: `tllm train --dry-run` and `tllm plan` show which
sends least."""

from __future__ import annotations

import msgspec

from tllm.cli.display.tables import table
from tllm.core.errors import PlanError
from tllm.core.memory import amount
from tllm.planner.cost.messages.layer_traffic import LayerSent, Sent, layer_sent
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.planner.cost.tensor_parallel.serving_traffic import StageSums
from tllm.spec.cut import stage_cuts
from tllm.spec.grid.grid_shape import MODES, TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.job import Job

MORE_SUMS = "; a layer waits for more sums on a grid, so that over slow links 1d may be faster all the same"


def show_tensor_modes(job: Job, plan: Plan, spec: ModelSpec) -> str:
    """A table of 1D tensor parallelism and the grids that so many ranks form for this job; "" where they form none."""
    modes = [mode for mode in MODES if _can_train(job, plan, spec, mode)]
    if len(modes) == 1:
        return ""
    ranks, tokens = plan.stages[0].tp, job.microbatch_size * job.seq_len
    sent = {mode: layer_sent(spec, mode, ranks, tokens, ITEM_BYTES[job.dtype]) for mode in modes}
    rows = [["tensor", "grid", "forward", "backward", "a step", "messages"]]
    rows += [[mode, str(grid_shape(mode, ranks) or ranks), *_cells(one, ranks)] for mode, one in sent.items()]
    microbatches = -(-job.global_batch_size // (job.microbatch_size * plan.replicas))
    least = min(sent, key=lambda mode: _bytes_of_step(sent[mode], microbatches))
    return (
        f"what each of {ranks} ranks sends for one layer and a microbatch of {tokens:,} tokens:\n\n{table(rows)}\n\n"
        f"tensor={least} sends the fewest bytes in a step; where links answer slowly, messages count for more"
    )


def show_serving_modes(spec: ModelSpec, plan: Plan, dtype: str, tokens: int) -> str:
    """A table of 1D tensor parallelism and the grids that the ranks of a plan's largest stage form, for batches that
    are served: of one token, and of so many; "" where they form none."""
    sent = {mode: batches_sent(spec, plan, mode, dtype, tokens) for mode in serving_modes(spec, plan)}
    if len(sent) < 2:
        return ""
    ranks = max(stage.tp for stage in plan.stages)
    rows = [["tensor", "grid", "a token", "messages", f"{tokens:,} tokens", "messages"]]
    for mode, batches in sent.items():
        cells = [text for one in batches for text in (amount(one.bytes // ranks), f"{one.messages / ranks:.0f}")]
        rows.append([mode, str(grid_shape(mode, ranks) or ranks), *cells])
    few, many = (min(sent, key=lambda mode: sent[mode][place].bytes) for place in (0, 1))
    least = (
        f"tensor={few} sends the fewest bytes"
        if few == many
        else (f"tensor={few} sends the fewest bytes for a token, tensor={many} for {tokens:,}")
    )
    return (
        f"what each of {ranks} ranks of a stage sends for a batch that is served, in the mean:\n\n{table(rows)}\n\n"
        f"{least}{'' if few == many == '1d' else MORE_SUMS}"
    )


def serving_modes(spec: ModelSpec, plan: Plan) -> list[TensorMode]:
    """The ways in which a plan's model can be cut among as many ranks for serving."""
    return [mode for mode in MODES if _can_serve(spec, msgspec.structs.replace(plan, tensor=mode))]


def batches_sent(spec: ModelSpec, plan: Plan, mode: TensorMode, dtype: str, tokens: int) -> tuple[Sent, Sent]:
    """What the ranks of the largest stage send for one token, and for so many tokens of one prompt."""
    stage = max(plan.stages, key=lambda stage: stage.tp)
    sums, layers = StageSums(spec, grid_shape(mode, stage.tp), stage.tp), range(stage.start, stage.stop)
    one, many = (sums.sent(layers, count, 1, ITEM_BYTES[dtype]) for count in (1, tokens))
    return one, many


def _can_serve(spec: ModelSpec, plan: Plan) -> bool:
    try:
        plan.check(spec.num_layers)
        for stage in range(plan.pp):
            stage_cuts(spec, plan, stage)
    except PlanError:
        return False
    return True


def _can_train(job: Job, plan: Plan, spec: ModelSpec, mode: TensorMode) -> bool:
    from tllm.training.job.combinations import check_combination  # which loads torch

    try:
        check_combination(job, msgspec.structs.replace(plan, tensor=mode), spec)
    except PlanError:
        return False
    return True


def _bytes_of_step(sent: LayerSent, microbatches: int) -> int:
    return microbatches * (sent.forward.bytes + sent.backward.bytes) + sent.step_bytes


def _cells(sent: LayerSent, ranks: int) -> list[str]:
    """Means over ranks."""
    nbytes = (sent.forward.bytes, sent.backward.bytes, sent.step_bytes)
    messages = (sent.forward.messages + sent.backward.messages) / ranks
    return [*(amount(one // ranks) for one in nbytes), f"{messages:.0f}"]
