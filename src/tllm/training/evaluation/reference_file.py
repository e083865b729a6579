"""Keeps the initial weights' log-probabilities of each reply in the run's folder, so that a resumed run need not
compute them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tllm.core.disk import whole_file
from tllm.core.errors import ConfigError, WeightsError, counted
from tllm.training.data.encoder import Values
from tllm.training.objectives.reply_log_probs import REFERENCE
from tllm.weights.byte_source import LocalFiles
from tllm.weights.safetensors_header import make_header, read_header
from tllm.weights.safetensors_index import Index

FILE = "reference.safetensors"
FACTS, DIGEST = "facts", "sha256"
"""Tensors of bytes: the facts as JSON, and the hash of all else."""


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
                f"row {row} of the data has no reference log-probability; {FILE} has those of "
                f"{counted(len(self.rows), 'row')}",
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
        arrays[DIGEST] = _digest(arrays)
        try:
            with whole_file(folder / FILE) as file:
                file.write(make_header((name, torch.from_numpy(x).dtype, x.shape) for name, x in arrays.items()))
                for array in arrays.values():
                    file.write(np.ascontiguousarray(array).tobytes())
        except OSError as error:
            raise ConfigError(
                f"cannot write {folder / FILE}: {error.strerror or error}", "see that the disk has room"
            ) from error

    def _arrays(self) -> dict[str, NDArray[Any]]:
        text = json.dumps(self.facts, sort_keys=True).encode()
        made: dict[str, NDArray[Any]] = {FACTS: np.frombuffer(text, dtype=np.uint8).copy()}
        for name, table in self.tables.items():
            made |= {f"{name}.rows": table.rows, f"{name}.log_probs": table.log_probs}
        return made


def read_reference(folder: Path) -> ReferenceFile | None:
    """The file of a run; None where it has none. WeightsError for one that is not as it was written."""
    path = folder / FILE
    if not path.is_file():
        return None
    source = LocalFiles(folder)
    try:
        index = Index(read_header(source, FILE))
        arrays = {name: index.slice(source, name).numpy() for name in index.entries}
    except WeightsError as error:
        raise _damaged(path, error.message) from error
    finally:
        source.close()
    written = arrays.pop(DIGEST, np.zeros(0, dtype=np.uint8))
    found = _digest(arrays)
    if not np.array_equal(written, found):
        raise _damaged(path, f"its sha256 is {_hex(found)} and was {_hex(written)} when it was written")
    facts = json.loads(arrays.pop(FACTS).tobytes())
    names = {name.partition(".")[0] for name in arrays}
    tables = {name: ReferenceTable(arrays[f"{name}.rows"], arrays[f"{name}.log_probs"]) for name in names}
    return ReferenceFile(tables, facts)


def _hex(digest: NDArray[Any]) -> str:
    return digest.tobytes().hex()[:12] or "not there"


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {why}", "delete it: it is then made anew from the initial weights")


def _digest(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8).copy()
