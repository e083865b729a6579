"""References on disk: read as they were written, or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tllm.core.errors import ConfigError, WeightsError
from tllm.training.evaluation.reference_file import FILE, ReferenceFile, ReferenceTable, read_reference
from tllm.training.evaluation.reference_pass import kept_reference

TABLE = ReferenceTable(np.array([1, 4, 9]), np.array([[-1.5, -2.25], [-3.0, -4.0], [-5.0, -0.1]]))
FACTS = {"run": "a", "max_steps": 5, "data": {"train": ["x"]}}


def written(folder: Path) -> Path:
    ReferenceFile({"train": TABLE}, FACTS).write(folder)
    return folder / FILE


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written(tmp_path)
    found = read_reference(tmp_path)
    assert found is not None and found.facts == FACTS
    assert found.tables["train"].of(4)["reference_log_probs"].tolist() == [-3.0, -4.0]
    assert found.tables["train"].log_probs.dtype == np.float64
    assert read_reference(tmp_path / "elsewhere") is None
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("at", [9, 60, -1, -40])
def test_a_changed_byte_is_noticed(at: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="is damaged"):
        read_reference(tmp_path)


def test_a_torn_file_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="is damaged"):
        read_reference(tmp_path)


@pytest.mark.parametrize("row", [0, 5, 10])
def test_a_row_that_is_not_there_is_named(row: int) -> None:
    with pytest.raises(ConfigError, match=f"row {row} of the data"):
        TABLE.of(row)


def test_it_is_of_use_for_the_same_run_of_no_more_steps(tmp_path: Path) -> None:
    written(tmp_path)
    assert kept_reference(tmp_path, {**FACTS, "max_steps": 3}) is not None
    assert kept_reference(tmp_path, {**FACTS, "max_steps": 6}) is None
    assert kept_reference(tmp_path, {**FACTS, "run": "b"}) is None
