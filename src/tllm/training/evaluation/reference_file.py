"""What the initial weights make of each reply, kept in the run's folder: a run that goes on does not ask them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tllm.core.errors import ConfigError, WeightsError
from tllm.training.data.encoder import Values
from tllm.training.objectives.reply_log_probs import REFERENCE

FILE = "reference.safetensors"


@dataclass(frozen=True)
class ReferenceTable:
    """Row `rows[i]` of the data, ascending, has the log-probabilities `log_probs[i]`, one for each of its documents."""

    rows: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    def of(self, row: int) -> Values:
        """Numbers of the documents of a row. ConfigError for a row that the table does not have."""
        at = int(np.searchsorted(self.rows, row))
        if at == len(self.rows) or self.rows[at] != row:
            raise ConfigError(
                f"row {row} of the data has no reference log-probability; {FILE} has those of {len(self.rows)} rows",
                f"delete {FILE} in the run's folder: it is then made anew from the initial weights",
            )
        return {REFERENCE: self.log_probs[at]}


@dataclass(frozen=True)
class ReferenceFile:
    """The tables of a run by name ("train", "eval"), and the `facts` that they hang on."""

    tables: Mapping[str, ReferenceTable]
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put the file into the run's folder, in the place of an earlier one."""
        arrays = self._arrays()
        metadata = {"facts": json.dumps(self.facts, sort_keys=True), "sha256": _digest(arrays)}
        beside = folder / f"{FILE}.tmp"
        try:
            save_file(arrays, beside, metadata)
            beside.replace(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write {folder / FILE}: {error}", "see that the disk has room") from error

    def _arrays(self) -> dict[str, NDArray[Any]]:
        made: dict[str, NDArray[Any]] = {}
        for name, table in self.tables.items():
            made |= {f"{name}.rows": table.rows, f"{name}.log_probs": table.log_probs}
        return made


def read_reference(folder: Path) -> ReferenceFile | None:
    """The file of a run; None where it has none. WeightsError for one that is not as it was written."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        facts = json.loads(metadata["facts"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    if metadata.get("sha256") != (found := _digest(arrays)):
        raise _damaged(path, f"its sha256 is {found[:12]} and was {str(metadata.get('sha256'))[:12]}")
    names = {name.partition(".")[0] for name in arrays}
    tables = {name: ReferenceTable(arrays[f"{name}.rows"], arrays[f"{name}.log_probs"]) for name in names}
    return ReferenceFile(tables, facts)


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {why}", "delete it: it is then made anew from the initial weights")


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
