"""`ReplicaLocal`: state that belongs to one replica alone, its name, and what becomes of it when a run goes on with
more or fewer replicas.

Only snapshots in memory hold such states. A save holds what all replicas agree on, under the state's plain name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SUMMED, TAKEN = "+", "@"
"""How a state is dealt out anew: only its sum over replicas counts; or one replica takes it, whichever."""

_NAME = re.compile(r"([^/]+)([+@])(\d+)of(\d+)/(.+)")


class ReplicaLocal(NamedTuple):
    """Replica `replica` of `replicas` has this of `parameter`. As text: `residual+1of4/model.norm.weight`."""

    state: str
    deal: str
    replica: int
    replicas: int
    parameter: str

    def __str__(self) -> str:
        return f"{replica_local_state(*self[:4])}/{self.parameter}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """What it is, whichever replica has it."""
        return self.state, self.deal, self.parameter

    def sources(self, before: int) -> list[ReplicaLocal]:
        """Which replicas' states this one is made of, where there were `before` replicas: with as many, its own alone.

        Of a sum each part goes to one of the present replicas. A taken state of a replica that is gone is dropped; a
        new replica takes a copy of another's.
        """
        sources = range(self.replica, before, self.replicas) if self.deal == SUMMED else [self.replica % before]
        return [self._replace(replica=source, replicas=before) for source in sources]


def replica_local_state(state: str, deal: str, replica: int, replicas: int) -> str:
    """The name of a replica's own state, before that of the parameter."""
    return f"{state}{deal}{replica}of{replicas}"


def read_replica_local(name: str) -> ReplicaLocal | None:
    """What the name of a block says; None where all replicas have the same."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    state, deal, replica, replicas, parameter = match.groups()
    return ReplicaLocal(state, deal, int(replica), int(replicas), parameter)
