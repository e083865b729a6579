"""Reference log-probabilities: one forward pass of the initial weights over the rows of a run, before its first step.

They are what TRL's `precompute_ref_log_probs` computes. No second model is held, under any plan; the weights are read
before the run's own are restored. Under an adapter that begins at zero the initial weights are those of its base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batches import Batches
from tllm.training.data.packing import PackedRow, RowPiece, put_together
from tllm.training.evaluation.document_results import PLACE, results_by_place
from tllm.training.evaluation.forward_rows import MICROBATCHES, ForwardFeed
from tllm.training.evaluation.reference_file import FILE, ReferenceFile, ReferenceTable, read_reference
from tllm.training.objectives.reply_log_probs import ReplyLogProbs
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel


def prepare_reference(
    config: RankConfig,
    reference: ReferencePass,
    initialize: Callable[[], None],
    data: Mapping[str, Batches] | None,
    run: str = "",
) -> None:
    """Give each row of the data its reference: from the run's file, or after `initialize` gave the initial weights.

    Every rank calls it; `data` are the rows by name, on rank 0. `run` names the run, unlike any other.
    """
    folder, world = Path(config.job.output_dir), config.groups.world
    facts = reference_facts(config, data, run) if data is not None else {}
    kept = None if data is None else kept_reference(folder, facts)
    is_due = (
        world.broadcast_bytes(b"due" if kept is None else b"kept") if world.rank == 0 else world.broadcast_bytes(None)
    )
    if is_due == b"due":
        initialize()
        if data is None:
            for _ in range(1 + bool(config.job.eval_files)):
                reference.follow()
        else:
            kept = ReferenceFile(
                {name: reference.over(batches, _rows(folder, name, batches, config)) for name, batches in data.items()},
                facts,
            )
            kept.write(folder)
    for name, batches in (data or {}).items():
        assert kept is not None
        batches.values_of = kept.tables[name].of


class ReferencePass:
    """Computes the log-probabilities of rows with the weights that the model has now. Every rank makes the same calls.

    `log_probs` are those of the job's objective: what it compares with the reference is computed alike.
    """

    def __init__(self, config: RankConfig, model: RankModel, log_probs: ReplyLogProbs) -> None:
        self._groups, self._model, self._log_probs = config.groups, model, log_probs
        self._feed = ForwardFeed(config.plan, config.groups.data, config.job.microbatch_size, MICROBATCHES)

    def over(self, batches: Batches, rows: Iterable[int]) -> ReferenceTable:
        """On rank 0: the table of these rows of the data."""
        ordered = sorted(rows)
        size = self._feed.rows_at_once
        chunks = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        parts = [part for some in chunks for part in self._part(batches, some)]
        self._feed.end()
        return ReferenceTable(np.array(ordered, dtype=np.int64), np.stack(parts))

    def follow(self) -> None:
        """On another rank: what `over` asks for."""
        for batch in self._feed.receive():
            self._computed(batch)

    def _part(self, batches: Batches, rows: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        packed: list[PackedRow] = []
        first = 1
        for row in rows:
            packed.append(_row_of(batches, row, first))
            first += len(packed[-1].lengths)
        found = self._computed(self._feed.send(packed))
        for one in packed:
            yield found[one.of_documents[PLACE]].numpy()

    def _computed(self, batch: ReplicaBatch) -> Tensor:
        """The log-probability of each place, alike on every rank."""
        return results_by_place(self._model, self._groups, batch, self._log_probs)


def reference_facts(config: RankConfig, data: Mapping[str, Batches], run: str) -> dict[str, Any]:
    """What the tables of a run hang on, as JSON holds it."""
    job = config.job
    return {
        "run": run,
        "data": {name: batches.identity for name, batches in data.items()},
        "dtype": job.dtype,
        "task": job.task,
        "ld_alpha": job.dpo.ld_alpha if job.dpo else 1.0,
        "max_steps": job.max_steps,
        "global_batch_size": job.global_batch_size,
    }


def kept_reference(folder: Path, facts: Mapping[str, Any]) -> ReferenceFile | None:
    """The tables that the run has already, if they are of what `facts` say, or of more steps."""
    kept = read_reference(folder)
    if kept is None:
        return None
    same = {name: value for name, value in kept.facts.items() if name != "max_steps"}
    wanted = {name: value for name, value in facts.items() if name != "max_steps"}
    return kept if same == wanted and kept.facts["max_steps"] >= facts["max_steps"] else None


def _rows(folder: Path, name: str, batches: Batches, config: RankConfig) -> Iterable[int]:
    """Rows that the run reads: those of its steps; or all, where they are held out, or an earlier start read others."""
    if name == "eval" or (folder / FILE).is_file():
        return range(batches.row_count)
    return batches.row_numbers(config.job.max_steps)


def _row_of(batches: Batches, row: int, first: int) -> PackedRow:
    """One row of the data alone, its documents numbered from `first`."""
    document = batches.document(row)
    parts = len(document.parts or (1,))
    numbers = {PLACE: np.arange(first, first + parts, dtype=np.int32)}
    numbered = document._replace(values={**document.values, **numbers})
    return put_together(0, (RowPiece(row, 0, len(document.ids)),), lambda _: numbered)
