"""`VerifyRank`: one node's part in `tllm verify`. It computes one prompt as a serving rank does, and compares the
result with the reference."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tllm.cluster import messages
from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded
from tllm.cluster.settings import VerifySettings
from tllm.comm.links.connect import Listener
from tllm.engine.grid.divided_tokens import DividedRows
from tllm.engine.schedule.batch import Batch, StopRing
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import Transformer
from tllm.node.roles.comparison_record import Compared, HeldPart, Record, compare, fingerprints
from tllm.node.roles.control import Control
from tllm.node.roles.reference_model import batches_of, limits_for
from tllm.node.roles.role import Role
from tllm.node.roles.serving_rank import ServingRank
from tllm.parallel.mesh import Mesh
from tllm.weights.byte_source import Fetch
from tllm.weights.load import Progress


class VerifyRank(ServingRank):
    """A serving rank without the driver: every rank knows the batches."""

    outlives = False

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        assert isinstance(assign.settings, VerifySettings), "another part"
        self._asked = assign.settings
        self._record: Record | None = None
        super().__init__(msgspec.structs.replace(assign, settings=assign.settings.engine), identity, listener, fetch)

    def load(self, progress: Progress) -> Loaded:
        """Read this rank's weights; from then on what each part of the model gives is recorded."""
        loaded = super().load(progress)
        assert self._stage is not None, "it was made"
        self._stage.graphs = None  # a part of a model does not see the steps that are replayed
        self._record = Record(self._model)
        return loaded

    def run(self, control: Control) -> None:
        """Compute the prompt together, and report to the coordinator how far it is from the reference."""
        assert self._stage is not None and self._record is not None, "load comes before run"
        batches = batches_of(self._asked.token_ids, limits_for(self.spec, len(self._asked.token_ids)))
        if self.rank == 0:
            play(self._stage, batches)
        else:
            self._stage.serve()
        differences = compare(self._record, Path(self._asked.truth), held_part(self._mesh, self._model, batches))
        result = Compared(self.rank, differences, fingerprints(self._model))
        control.post(messages.News(msgspec.json.encode(result)))


def held_part(mesh: Mesh, model: Transformer, batches: list[Batch]) -> HeldPart:
    """What a rank has of the batches together: on a grid some columns, and of several squares some rows of each."""
    rows, at = list[int](), 0
    for batch in batches:
        tokens = len(batch.token_ids)
        rows += range(at, at + tokens)[DividedRows(tokens, mesh.copies).own]
        at += tokens
    return HeldPart(at, rows, mesh.hidden(model.spec.hidden_size).held, model.vocab)


def play(stage: PipelineStage, batches: list[Batch]) -> None:
    """On the first rank: one batch after another, then the ring's end."""
    for batch in batches:
        if stage.start(batch) is None:
            stage.finish(batch)
    stage.send_round(StopRing())
    if stage.ring is not None:
        stage.receive_round()
