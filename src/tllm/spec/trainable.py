"""What a plan, a model and a number of microbatches cannot be together in training, whatever the job."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.core.errors import PlanError, counted
from tllm.spec.cut import stage_cuts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import build
from tllm.spec.plan import Plan


def check_trainable(plan: Plan, spec: ModelSpec, counts: Sequence[int]) -> None:
    """PlanError for what cannot work. `counts[r]` are the microbatches of replica r in a step."""
    for count in sorted(set(counts) - {0}):
        build(plan.schedule, plan.pp, count, plan.depth, plan.chunks)
    if plan.ep > 1 and not any(layer.moe for layer in spec.layers):
        raise PlanError(f"ep={plan.ep} and the model has no experts", "leave ep out")
    check_lock_step(counts, plan.ep)
    if plan.grid is not None and len(plan.stages) > 1:
        raise PlanError(
            f"tensor={plan.tensor} and {len(plan.stages)} runs of layers: in training a grid has all layers",
            "leave pp out, and give tp all ranks of a replica",
        )
    for index in range(len(plan.stages)):
        stage_cuts(spec, plan, index)
    if plan.cp > 1 and spec.delta:
        raise PlanError(
            f"cp={plan.cp} and a {spec.family} model: its gated delta nets have a state that goes from each token "
            "to the next, and with cp the tokens of a document are on several ranks",
            "leave cp out; tp, pp, ep and sequence=true go with such layers",
        )
    if spec.per_layer_width or any(layer.shares_keys for layer in spec.layers):
        raise PlanError(
            f"a {spec.family} model whose layers have inputs of their own, or keys of earlier layers, is not trained",
            "E2B and E4B are served alone; gemma4 models of 12B, 26B and 31B parameters are trained too",
        )
    _check_sequence(plan)
    _check_gathered(plan, counts)
    _check_chunks(plan, spec)


def check_lock_step(microbatches: Sequence[int], ep: int) -> None:
    """Refuse, by PlanError, replicas that spread experts over each other and have unlike numbers of `microbatches`.

    `microbatches[r]` is the number of replica r in one step. A rank waits for the tokens of the others in each layer.
    """
    if ep < 1 or len(microbatches) % ep:
        raise PlanError(
            f"ep={ep} does not divide the {counted(len(microbatches), 'replica')}",
            "give dp as a multiple of ep: experts are spread over ep replicas in a row",
        )
    for first in range(0, len(microbatches), ep):
        counts = microbatches[first : first + ep]
        if len(set(counts)) > 1:
            raise PlanError(
                f"replicas {first} to {first + ep - 1} spread experts over each other (ep={ep}) "
                f"and have {', '.join(map(str, counts))} microbatches in a step",
                "give these replicas equal shares and a global batch whose rows divide among them, or ep=1",
            )


def _check_sequence(plan: Plan) -> None:
    tps = {stage.tp for stage in plan.stages}
    if plan.sequence and len(tps) > 1:
        raise PlanError(
            f"sequence=true with stages of tp={'+'.join(str(stage.tp) for stage in plan.stages[: plan.pp])}: "
            "each rank sends its slice of the tokens to one rank of the next stage, which has as many",
            "give all stages one tp, or leave sequence out",
        )


def _check_gathered(plan: Plan, counts: Sequence[int]) -> None:
    if plan.zero == 3 and len(set(counts)) > 1:
        raise PlanError(
            f"zero=3 gathers each layer's weights from all replicas at once, which have "
            f"{', '.join(map(str, counts))} microbatches",
            "give dp equal shares that divide the microbatches of a step, or take zero=2",
        )


def _check_chunks(plan: Plan, spec: ModelSpec) -> None:
    if plan.pp == 1 and plan.chunks > 1 and spec.tied:
        raise PlanError(
            f"one stage would hold the table of a tied model in 2 of its {plan.chunks} chunks",
            "give pp of 2 or more, or one chunk: on one stage there is nobody to interleave with",
        )
