"""Rows of parquet files, through pyarrow where it is installed (the extra `data`)."""

from __future__ import annotations

import hashlib
import importlib
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tllm.ground.errors import ConfigError

INSTALL = "pip install 'together-llm[data]'"
GROUPS_KEPT = 4


class ParquetRows:
    """Rows of one parquet file; the row groups read last are kept, so order of the file is the fast order."""

    whole = True

    def __init__(self, path: Path) -> None:
        try:
            reader = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow, which is not installed", INSTALL) from error
        self.path = path
        try:
            with path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._file = reader.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own error for a torn file is a ValueError
            raise ConfigError(f"cannot read {path}: {error}", "check that the file is whole") from error
        metadata = self._file.metadata
        self.count: int = metadata.num_rows
        self._firsts = [0, *accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))]
        self._group = lru_cache(maxsize=GROUPS_KEPT)(self._file.read_row_group)

    def read(self, row: int) -> dict[str, Any]:
        """One row; columns without a value are left out."""
        group = bisect_right(self._firsts, row) - 1
        try:
            (values,) = self._group(group).slice(row - self._firsts[group], 1).to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.place(row)}: {error}", "check that the file is whole") from error
        return {key: value for key, value in values.items() if value is not None}

    def place(self, row: int) -> str:
        """Where a row stands, for messages; the first row is 1."""
        return f"{self.path}, row {row + 1}"

    def close(self) -> None:
        self._file.close()
