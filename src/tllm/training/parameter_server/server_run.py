"""`ParameterServerRun`: the rank of one parameter server in a run. It serves the replicas' steps, and saves when they
do."""

from __future__ import annotations

from pathlib import Path

from tllm.comm.collectives.group import solo
from tllm.parallel.mesh import mesh_of
from tllm.spec.process_groups import computing
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.gradients.bucket_layout import lay_out
from tllm.training.optim.optimizer import optimizer_of
from tllm.training.parameter_server.connections import lines_of
from tllm.training.parameter_server.segments import row_table, segments
from tllm.training.parameter_server.server import ParameterServer
from tllm.training.parameter_server.server_state import ServerState
from tllm.training.report.events import IsStopped, OnEvent, TrainerReady
from tllm.training.step.model_chunks import build_chunks, parameters_of
from tllm.training.step.rank_groups import RankConfig
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import Progress


class ParameterServerRun:
    """In the place of a `RankTrainer`: `prepare`, then `run`. It holds its segments of the weights, and no model."""

    compute_seconds = 0.0

    def __init__(self, config: RankConfig) -> None:
        job, plan, groups = config.job, config.plan, config.groups
        self._config = config
        replica = mesh_of(config.spec, plan, 0, solo())
        chunks = build_chunks(config.spec, replica, plan.runs, torch_dtype(job.dtype), "meta")
        parameters = parameters_of(chunks)
        buckets, table = lay_out(parameters), row_table(chunks[0], parameters)
        server = config.rank - len(computing(plan))
        held = segments(buckets, parameters, table, server, plan.servers)
        self._state = ServerState(parameters, buckets, held, optimizer_of(job), job.weight_decay)
        self._server = ParameterServer(self._state, lines_of(groups.to, groups.back), job.max_staleness)
        self._saves: AsyncSaves | None = None
        self._step = 0

    def prepare(self, progress: Progress | None = None) -> TrainerReady:
        """Take this server's part of the last save of the run, if there is one; else rank 0 gives its weights."""
        job = self._config.job
        self._saves = AsyncSaves(Path(job.output_dir), self._config.groups.save, job.save_total_limit)
        if self._saves.latest is not None:
            opened = self._saves.restore(self._state.blocks(), progress=progress)
            self._step = opened.step
            self._server.resume(opened.step, opened.facts.get("updates", opened.step))
        return TrainerReady(self._step, self._state.weight_bytes, self._state.state_bytes)

    def run(self, on_event: OnEvent, is_stopped: IsStopped = lambda: False) -> None:
        """Serve until every replica has said farewell, and take part in saves. Replicas say when to stop."""
        assert self._saves is not None, "prepare comes before run"
        self._saves.missing_room(self._state.blocks(), 0)  # which rank 0 tells, of all ranks
        self._server.run(self._save)
        self._saves.wait()
        if self._step == self._config.job.max_steps:  # then rank 0 asks for all of the model
            self._saves.open_model(is_here=False)

    def close(self) -> None:
        """End the threads of this rank, once its links are closed or the run has ended."""
        if self._saves is not None:
            self._saves.close()

    def _save(self, step: int) -> None:
        """Save this server's part after a step; every replica waits, and makes the same call."""
        assert self._saves is not None
        self._step = step
        self._saves.save(step, self._state.blocks(), {})
