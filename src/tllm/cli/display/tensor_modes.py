"""What a layer sends by each way to cut it among the ranks of `tp`: `tllm train --dry-run` shows which sends least."""

from __future__ import annotations

import msgspec

from tllm.cli.display.tables import table
from tllm.core.errors import PlanError
from tllm.core.memory import amount
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.planner.cost.tensor_parallel.layer_traffic import LayerSent, layer_sent
from tllm.spec.grid.grid_shape import MODES, TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.job import Job


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
