"""`ParameterServerRun`: one server's rank of a run, which the replicas' ranks lead: as many steps and saves as they
come to."""

from __future__ import annotations

from pathlib import Path

from tllm.comm.collectives.group import solo
from tllm.parallel.mesh import mesh_of
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import computing
from tllm.train.checkpoint.async_saves import AsyncSaves
from tllm.train.gradients.bucket_layout import lay_out
from tllm.train.job.job import Job
from tllm.train.optim.optimizer import optimizer_of
from tllm.train.parameter_server.segments import row_table, segments
from tllm.train.parameter_server.server import ParameterServer, lines_of
from tllm.train.parameter_server.server_state import ServerState
from tllm.train.step.model_chunks import build_chunks, parameters_of
from tllm.train.step.rank_groups import Groups
from tllm.train.trainer import IsStopped, Ready, Tell
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import Progress


class ParameterServerRun:
    """What a `Trainer` is to a replica's rank: `prepare`, then `run`. It holds its segments and no model."""

    computing = 0.0

    def __init__(self, job: Job, plan: Plan, spec: ModelSpec, rank: int, groups: Groups) -> None:
        self._job, self._groups = job, groups
        replica = mesh_of(spec, plan, 0, solo())
        chunks = build_chunks(spec, replica, plan.runs, torch_dtype(job.dtype), "meta")
        parameters = parameters_of(chunks)
        buckets, table = lay_out(parameters), row_table(chunks[0], parameters)
        mine = segments(buckets, parameters, table, rank - len(computing(plan)), plan.servers)
        self._state = ServerState(parameters, buckets, mine, optimizer_of(job), job.weight_decay)
        self._server = ParameterServer(self._state, lines_of(groups.to, groups.back), job.max_staleness)
        self._saves: AsyncSaves | None = None
        self._step = 0

    def prepare(self, progress: Progress | None = None) -> Ready:
        """Take this server's part of the last save of the run, if there is one; else rank 0 gives its weights."""
        self._saves = AsyncSaves(Path(self._job.output_dir), self._groups.save, self._job.save_total_limit)
        if self._saves.latest is not None:
            opened = self._saves.restore(self._state.blocks(), progress=progress)
            self._step = opened.step
            self._server.resume(opened.step, opened.facts.get("updates", opened.step))
        return Ready(self._step, self._state.weight_bytes, self._state.state_bytes)

    def run(self, tell: Tell, is_stopped: IsStopped = lambda: False) -> None:
        """Serve until every replica said farewell, and take part in saves. Replicas say when to stop."""
        assert self._saves is not None, "prepare comes before run"
        self._server.run(self._save)
        self._saves.wait()
        if self._step == self._job.max_steps:  # then rank 0 asks for all of the model
            self._saves.open_model(is_here=False)

    def close(self) -> None:
        """End the threads of this rank, once its links are closed or the run has ended."""
        if self._saves is not None:
            self._saves.close()

    def _save(self, step: int) -> None:
        """Every replica waits, and makes the same call beside this."""
        assert self._saves is not None
        self._step = step
        self._saves.save(step, self._state.blocks(), {})
