"""`know_base`: an adapter is trained beside the weights that it began with, and not beside others of the same shape."""

from __future__ import annotations

from tllm.core.disk import whole_file
from tllm.core.errors import ConfigError
from tllm.training.job.initial_model import BASE, InitialModel
from tllm.training.job.job import Job
from tllm.weights.byte_source import LocalFiles
from tllm.weights.lora.sampled_digest import is_another, sampled_digest


def know_base(initial: InitialModel, job: Job) -> None:
    """Keep the digest of the weights beside an adapter where none is kept; ConfigError where they have another.

    Nothing where a job has no adapter, or no weights to begin with.
    """
    if job.lora is None or initial.weights is None:
        return
    found, path = sampled_digest(LocalFiles(initial.weights)), initial.folder / BASE
    if is_another(initial.base, found):
        raise ConfigError(
            f"the adapter in {job.output_dir} began beside other weights of this shape than {initial.weights} now has",
            f"give another output_dir, or the model that it began with; if it is intended, remove {path}",
        )
    if not initial.base:
        try:
            with whole_file(path) as file:
                file.write(found.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}", "give another output_dir") from error
