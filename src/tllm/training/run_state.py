"""`RunState`: what outlives a step of a run: checkpoints on disk, and snapshots in other ranks' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from tllm.core.errors import CapacityError, ConfigError, counted, decoded
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import export_checkpoint, write_final
from tllm.training.checkpoint.commit import SaveResult
from tllm.training.checkpoint.retention import unknown
from tllm.training.data.feed import DataPosition
from tllm.training.evaluation.best_evaluation import FACT, BestEvaluation, Standing
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job_parts import is_snapshot_step
from tllm.training.lora.export_adapter import export_adapter
from tllm.training.lora.initial_adapter import adapter_filler
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.objectives.hidden_state_loss import with_projections
from tllm.training.report.events import Origin
from tllm.training.snapshot.replication import SnapshotReplicator
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.state.train_state import FlatMemory
from tllm.training.step.rank_groups import RankConfig
from tllm.training.sync.learner import LearnerState, state_place
from tllm.weights.export import with_dtype
from tllm.weights.load import Progress

Adapters = Sequence[TrainedAdapter]
"""What is learned of this rank's chunks beside a model that stays as it is; none where the model is learned."""


class _Position(msgspec.Struct, frozen=True):
    """What a snapshot keeps beside the tensors: where the data goes on, and how evaluations stood."""

    data: bytes
    evaluations: Standing


_POSITIONS = msgspec.msgpack.Decoder(_Position)


class FinalModel(NamedTuple):
    """A finished model's folder, "" but on rank 0, and the step whose weights it has; `choice` says why these."""

    folder: str
    step: int
    choice: str = ""


NO_MODEL = FinalModel("", 0)
"""Of a run that is not done."""


class RunState:
    """Restores a rank's state where a run goes on, and keeps it for the next time. Every rank makes the same calls.

    `learning_rate` gives the rate of a step, the first being 0. `initial_model` and `batches` are rank 0's, who alone
    reads the data; `replicator` keeps snapshots in memory, if the job asks for them. `restore` sets what is annotated.
    """

    _learner: LearnerState
    _saves: AsyncSaves

    def __init__(
        self,
        config: RankConfig,
        learning_rate: Callable[[int], float],
        initial_weights: InitialWeights,
        initial_model: InitialModel | None,
        batches: DataPosition | None,
        replicator: SnapshotReplicator | None,
    ) -> None:
        self._config, self._learning_rate, self._initial_weights = config, learning_rate, initial_weights
        self._beginning, self._batches, self._replicator = initial_model, batches, replicator
        self._saved_step = -1
        self._is_initial = False
        self.origin: Origin = "start"
        self._closing = ExitStack()
        if replicator is not None:
            self._closing.callback(replicator.close)

    @property
    def kept_memory(self) -> FlatMemory | None:
        """That of the weights and optimizer states of this rank's part before, if they are in memory still."""
        return None if self._replicator is None else self._replicator.kept_memory

    def fill_frozen(self, chunks: Sequence[nn.Module], progress: Progress | None = None) -> None:
        """Fill the model beside an adapter, at every start anew: it is not learned, and no save or snapshot has it."""
        job = self._config.job
        if job.lora is not None:
            self._initial_weights.fill_frozen(chunks, job.dtype, job.lora.few_bits, progress, self._config.device)

    def initialize(self, learner: LearnerState, adapters: Adapters = (), progress: Progress | None = None) -> None:
        """Fill the learner with the first weights, whatever memory or saves hold of later steps."""
        learner.initialize(self._filler(adapters, progress))
        self._is_initial = True

    def restore(
        self,
        learner: LearnerState,
        adapters: Adapters,
        best: BestEvaluation,
        progress: Progress | None = None,
    ) -> int:
        """Fill the learner from the last snapshot, else the last save, else with the first weights; the steps done.

        `best` takes up how evaluations stood then. ConfigError where the run has taken more steps than its job has.
        """
        config, replicator, self._learner = self._config, self._replicator, learner
        snapshot_step = None if replicator is None else replicator.find(learner.train_state())
        root, place = Path(config.job.output_dir), state_place(config)
        is_needed = snapshot_step is None
        keep, worth = config.job.save_total_limit, best.worth if config.job.load_best_model_at_end else unknown
        self._saves = AsyncSaves(root, config.groups.save, keep, None, is_needed, place, worth)
        self._closing.callback(self._saves.close)
        step, checkpoint_step, data_position = 0, self._saves.latest, b""
        # Rank 0 decides: from memory where the snapshot is no older than the last save.
        if replicator and snapshot_step is not None and replicator.agree(snapshot_step >= (checkpoint_step or 0)):
            self.origin, step = "memory", snapshot_step
            data_position = replicator.restore(progress)
            kept = decoded(data_position, _POSITIONS)
            best.take_up(kept.evaluations)
            self._restore_data(msgspec.msgpack.decode(kept.data))
            learner.snapshot_restored(step, self._learning_rate(step - 1))
            self._saved_step = step if checkpoint_step == step else -1
        elif checkpoint_step is not None:
            self.origin = "save"
            if replicator is not None:
                replicator.lose_live()
            opened = self._saves.restore(learner.checkpoint_blocks(), progress=progress)
            step = self._saved_step = opened.step
            learner.checkpoint_restored(step)
            best.take_up(msgspec.convert(opened.facts.get(FACT, {}), Standing))
            self._restore_data(opened.facts["data"] if self._batches is not None else {})
        elif not self._is_initial:
            self.initialize(learner, adapters, progress)
        if step > config.job.max_steps:
            raise ConfigError(
                f"max_steps is {config.job.max_steps} and the run in {root} has taken {counted(step, 'step')}",
                f"give max_steps = {step}, and the model of its last save is finished, or more; or another output_dir",
            )
        if replicator is not None:
            replicator.begin(step, data_position, is_restored=self.origin == "memory")
        return step

    def complete_restored_step(self, step: int, evaluations: Standing) -> None:
        """Save the step that a snapshot was restored of, if its save was due and is not whole on every rank."""
        if self.origin == "memory" and self.is_save_due(step):
            # The snapshot is as the learner was before the save, which brings outstanding updates to the weights.
            self._learner.prepare_checkpoint(step, self._learning_rate(step - 1))
            self.save(step, evaluations)

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint is made after this step: every `save_steps`, and after the last."""
        job = self._config.job
        return step > 0 and (step % job.save_steps == 0 or step == job.max_steps)

    def missing_room(self, step: int) -> str:
        """What to tell of disks that lack room for the saves after `step`, "" where none does. Every rank calls it."""
        most, every = self._config.job.max_steps, self._config.job.save_steps
        left = -(-most // every) - step // every if step < most else 0
        return self._saves.missing_room(self._learner.checkpoint_blocks(), left)

    def is_snapshot_due(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        return self._replicator is not None and is_snapshot_step(self._config.job, step)

    def save(self, step: int, evaluations: Standing) -> None:
        """Save the present step in the background, unless it is saved already."""
        if step == self._saved_step:
            return
        facts = self._learner.prepare_checkpoint(step, self._learning_rate(step - 1))
        self._saved_step = step
        if self._batches is not None:
            facts |= {"data": self._batches.state(step), "plan": str(self._config.plan)}
            facts |= {FACT: msgspec.to_builtins(evaluations)}
        self._saves.save(step, self._learner.checkpoint_blocks(), facts)

    def take_snapshot(self, step: int, data_position: bytes, evaluations: Standing) -> None:
        """Copy the state after this step, and let the copy travel while the next step is computed."""
        assert self._replicator is not None
        position = msgspec.msgpack.encode(_Position(data_position, evaluations)) if data_position else b""
        self._replicator.take(step, position)

    def flush_snapshot(self) -> None:
        """Return when the last snapshot is where it belongs: at the end, and before another one takes its place."""
        if self._replicator is not None:
            self._replicator.flush()

    def finished_saves(self) -> list[SaveResult]:
        """The saves that ended since the last call."""
        return self._saves.finished()

    def wait_for_saves(self) -> list[SaveResult]:
        """The same, once the save that runs has ended."""
        return self._saves.wait()

    def write_final_model(self, step: int, best: BestEvaluation) -> FinalModel:
        """Make the finished model or adapter, on rank 0, of the best save or that of `step`, the last. Every rank calls
        it. CapacityError where the last step could not be saved: its model is not that of a save before."""
        if self._saves.best is None and self._saves.latest != step:
            raise CapacityError(
                f"all {step} steps were taken, and the last could not be saved, so that there is no finished model",
                f"make room in {self._saves.root}; the same command then goes on from step {self._saves.latest or 0}",
            )
        opened = self._saves.open_model(is_here=self._beginning is not None, step=self._saves.best)
        beginning, config = self._beginning, self._config
        if beginning is None:
            return FinalModel("", opened.step)
        if config.job.lora is None:
            written = with_dtype(beginning.config, config.job.dtype)
            write = partial(export_checkpoint, opened, config=written, others=beginning.companions)
        else:
            write = partial(export_adapter, opened, beginning, config.job, config.spec)
        folder = str(write_final(Path(config.job.output_dir), write))
        return FinalModel(folder, opened.step, best.choice(opened.step, opened.facts))

    def close(self) -> None:
        """End the threads of saves and snapshots."""
        self._closing.close()

    def _filler(self, adapters: Adapters, progress: Progress | None) -> Callable[[nn.Module], object]:
        """What gives the parameters that are learned their first values."""
        job, spec = self._config.job, self._config.spec
        if job.lora is not None:
            return with_projections(adapter_filler(job.lora, spec, job.seed, adapters), job.seed)
        return with_projections(self._initial_weights.filler(spec, job.seed, job.dtype, progress), job.seed)

    def _restore_data(self, position: dict[str, Any]) -> None:
        if self._batches is not None:
            self._batches.restore(position)
