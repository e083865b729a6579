"""`final/`: the trained model as a Hugging Face folder, made from the last save."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tllm.ground.errors import WeightsError
from tllm.train.checkpoint import Checkpoint, export_checkpoint

FOLDER = "final"


def write_final(checkpoint: Checkpoint, run: Path, config: Mapping[str, Any], companions: Sequence[Path]) -> Path:
    """Write the model of a save into the run's `final/`, in the place of an earlier one, which stays until it is there.

    Should the machine fail between the two renames, the new model lies complete in `final.new`.
    """
    final, new, old = run / FOLDER, run / f"{FOLDER}.new", run / f"{FOLDER}.old"
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        export_checkpoint(checkpoint, new, config, others=companions)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise WeightsError(f"cannot write {final}: {error.strerror or error}", "see that the disk has room") from error
    return final
