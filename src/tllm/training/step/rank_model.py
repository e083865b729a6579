"""`RankModel`: the part of the model that one rank holds under the plan, with its forward and backward passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from tllm.devices.choose import CPU
from tllm.kernels.batch_invariant import is_batch_invariant
from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import check_labels
from tllm.parallel.grid.grid_mesh import GridMesh, grid_mesh_of
from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.spec.pipeline_schedule import Schedule, forward_only
from tllm.spec.pipeline_schedule import build as build_schedule
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.attention.grid_tokens import grid_tokens
from tllm.training.attention.invariant_attention import InvariantAttend
from tllm.training.attention.packed_attention import MakeAttend
from tllm.training.attention.ring_attention import RingAttention
from tllm.training.attention.varlen_attention import attention_on
from tllm.training.data.batch_tensors import Tokens
from tllm.training.job.job_parts import learns_from_own_tokens
from tllm.training.job.rollout_combinations import wants_batch_invariance
from tllm.training.job.target_modules import adapted_modules, lowest_learned_layer
from tllm.training.lora.trained_adapter import MakeAdapt, TrainedAdapter, as_it_is
from tllm.training.objectives.choose_objective import choose_objective
from tllm.training.objectives.hidden_state_loss import hidden_state_loss
from tllm.training.objectives.objective import Objective
from tllm.training.step.embedding_noise import with_noise
from tllm.training.step.invariant_layers import make_layers_invariant
from tllm.training.step.matmul_dtype import choose_matmul_dtype
from tllm.training.step.model_chunks import build_chunks, without_memory
from tllm.training.step.pass_threads import with_same_bits
from tllm.training.step.pipeline_step import StepResult, TrainStage, run_forward, run_schedule
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.recompute import recompute
from tllm.training.step.shared_prompts import as_computed
from tllm.weights.dtypes import torch_dtype


class RankModel:
    """The chunks of layers of one rank, without values until they are filled.

    With ZeRO-3 their parameters have no memory either, as no rank ever holds all that it computes with.
    """

    def __init__(self, config: RankConfig) -> None:
        plan, groups = config.plan, config.groups
        self._config = config
        self._balance = _load_balance(config)
        mesh = (
            mesh_of(config.spec, plan, config.rank, groups.tp, plan.sequence, groups.ep, self._balance)
            if plan.grid is None
            else grid_mesh_of(config.spec, plan, config.rank, groups.tp)
        )
        self.mesh: Mesh = mesh
        has_memory = plan.zero < 3 and config.job.lora is None  # a frozen model gets its own when it is read
        device = self._config.device if has_memory else "meta"
        self.chunks = build_chunks(config.spec, mesh, plan.runs, torch_dtype(config.job.dtype), device)
        invariant = wants_batch_invariance(config.job, config.spec) and config.device == CPU
        if invariant:
            make_layers_invariant(self.chunks)
        self.adapters = _adapters(config, self.chunks)
        self.trained: Sequence[nn.Module] = self.adapters or self.chunks
        """What is learned: the chunks, or an adapter of each."""
        of_states = hidden_state_loss(config.job, mesh, self.chunks, config.device)
        if plan.zero == 3:
            for model in (*self.chunks, *filter(None, [of_states])):
                without_memory(model, self._config.device)
        parameters = (parameter for model in self.chunks for parameter in model.parameters())
        fixed = config.job.deterministic or self._config.device != CPU  # only the processor has a choice
        self.products = choose_matmul_dtype(parameters, torch_dtype(config.job.dtype), fixed)
        """What its products are computed in, in words."""
        self._ring = RingAttention(groups.cp) if plan.cp > 1 else None
        of_whole: MakeAttend = InvariantAttend if invariant else attention_on(config.device)
        make_attend = recompute(plan.recompute, self.chunks, self._ring or of_whole)
        self.objective = choose_objective(config.job, mesh, groups.cp, invariant, of_states)
        adapt = with_noise(self._make_adapt(learns=True), config.job.neftune_noise_alpha * config.spec.noise_scale)
        self._stage = TrainStage(mesh.stage, self.chunks, groups.wires, self.objective, make_attend, adapt, of_states)
        self._schedules: dict[int, Schedule] = {}
        self.compute_seconds = 0.0
        """Of the last step's passes, without the time in which this stage waited for another."""

    @property
    def learned(self) -> Sequence[nn.Module]:
        """What is trained, and the projections of hidden states beside it, whose gradients come last."""
        return [*filter(None, [self._stage.of_states]), *self.trained]

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's numbers do not depend on what is computed beside it, and are the engine's to the bit."""
        return any(is_batch_invariant(parameter) for parameter in self.chunks[0].parameters())

    @property
    def load_balance_loss(self) -> float | None:
        """The mean load-balance loss of the last step, without its coefficient; None where the job asks for none."""
        return None if self._balance is None else self._balance.mean

    @with_same_bits
    def forward_backward(self, batch: Sequence[Tokens], global_microbatches: int, loss_scale: float) -> StepResult:
        """The passes over this replica's microbatches of a step, perhaps none; each rank computes its own tokens.

        `global_microbatches` are those of all replicas, whose mean the load-balance loss is where all learn together.
        """
        if self._balance is not None:
            learns_alone = learns_from_own_tokens(self._config.job, self._config.plan.servers)
            self._balance.begin(global_microbatches, len(batch) if learns_alone else None)
        microbatches = self._here(batch)
        if not microbatches:
            return StepResult(0.0, 0)
        start = time.monotonic()
        result = run_schedule(self._schedule(len(microbatches)), self._stage, microbatches, loss_scale)
        self.compute_seconds = time.monotonic() - start - result.waited
        return result

    @with_same_bits
    def forward_only(
        self, batch: Sequence[Tokens], objective: Objective | None = None, adapted: bool = True
    ) -> StepResult:
        """The losses of these microbatches, perhaps none, by the job's objective or another; nothing is learned.

        If not `adapted`, the model is taken without the adapter that the job trains: as it was when the run began.
        With experts spread over replicas, or ZeRO-3, every replica must be given as many.
        """
        microbatches = self._here(batch)
        if not microbatches:
            return StepResult(0.0, 0)
        schedule = forward_only(self._config.plan.pp, len(microbatches), self._config.plan.chunks)
        make_adapt = self._make_adapt(learns=False) if adapted else as_it_is
        stage = replace(self._stage, objective=objective or self.objective, make_adapt=make_adapt, of_states=None)
        return run_forward(schedule, stage, microbatches)

    def _here(self, batch: Sequence[Tokens]) -> list[Tokens]:
        """The tokens of each microbatch that this rank computes, on its device."""
        cp, device = self._config.groups.cp, self._config.device
        batch = as_computed(self._config, batch)
        if device != CPU:
            for tokens in batch:
                check_labels(tokens.labels_T, self._config.spec.vocab_size)
        if isinstance(self.mesh, GridMesh):
            return [grid_tokens(tokens, self.mesh.grid).to(device) for tokens in batch]
        return [cut_tokens(tokens, cp.rank, cp.size).to(device) for tokens in batch]

    def _make_adapt(self, learns: bool) -> MakeAdapt:
        """What linears add in a pass, in which something is learned or not."""
        if not self.adapters:
            return as_it_is
        return lambda chunk, tokens: self.adapters[chunk].of_microbatch(tokens, learns)

    def close(self) -> None:
        """End the thread of ring attention."""
        if self._ring is not None:
            self._ring.close()

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            plan = self._config.plan
            learns_from = plan.run_of(lowest_learned_layer(self._config.job, self._config.spec))
            self._schedules[microbatches] = build_schedule(
                plan.schedule, plan.pp, microbatches, plan.depth, plan.chunks, learns_from
            )
        return self._schedules[microbatches]


def _adapters(config: RankConfig, chunks: Sequence[Transformer]) -> list[TrainedAdapter]:
    """An adapter of each chunk, where the job trains these and not the model."""
    lora = config.job.lora
    if lora is None:
        return []
    modules, dtype = adapted_modules(lora, config.spec), torch_dtype(config.job.dtype)
    return [TrainedAdapter(model, modules, dtype, lora.lora_dropout, config.device) for model in chunks]


def _load_balance(config: RankConfig) -> LoadBalance | None:
    """The load-balance loss of the experts, if the job asks for it."""
    coefficient, groups = config.job.router_aux_loss_coef, config.groups
    layers = sum(layer.moe is not None for layer in config.spec.layers)
    return LoadBalance(coefficient, layers, groups.tp, groups.cp) if coefficient else None
