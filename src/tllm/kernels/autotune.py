"""`Autotuned`: the ways of one area that were found to be the fastest here, each measured once on a machine.

What was measured is kept in a file of this user's cache, and the next start on the same machine reads it and measures
nothing (docs/log/serving.md says when a measurement is kept). The variable TLLM_AUTOTUNE_CACHE turns that off.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tllm import __version__
from tllm.core.cache_folder import cache_folder
from tllm.core.errors import ConfigError
from tllm.core.processor import processor_name
from tllm.core.program import source_digest
from tllm.kernels.choice_file import ChoiceFile, MachineKey
from tllm.kernels.fastest import Choice
from tllm.kernels.instruction_sets import InstructionSet, flags_of_processor
from tllm.kernels.library import library, path_of

log = logging.getLogger("tllm.kernels")

VARIABLE = "TLLM_AUTOTUNE_CACHE"
MODES = {"on": "read and written", "off": "neither read nor written", "again": "written and not read"}
"""Values of the environment's variable, and what the file is then. Empty: `on`."""

FOLDER = "autotune"
HIDING = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Variables that hide instructions of the processor from torch's libraries."""

DIGITS = 16

Kind = TypeVar("Kind", bound=NamedTuple)


class Autotuned(Generic[Kind]):
    """The choices of one area. `known` are those of this process, by what is alike."""

    def __init__(self, area: str) -> None:
        self.area = area
        self.known: dict[Kind, Choice] = {}

    def choose(self, kind: Kind, names: Collection[str], measure: Callable[[], Choice]) -> Choice:
        """What is known of this kind, of this process or of an earlier one; else what `measure` finds among `names`.

        Ranks that are threads of one process measure one after another, and use what the first has found.
        """
        with _MEASURING:
            return self.kept(kind, names) or self.put(kind, measure())

    def kept(self, kind: Kind, names: Collection[str]) -> Choice | None:
        """What is known of this kind, of this process or of an earlier one, if anything is."""
        choice = self.known.get(kind)
        file = choice_file() if choice is None else None
        if file is not None:
            choice = file.get(self.area, in_words(kind), names)
            if choice is not None:
                self.known[kind] = choice
        return choice

    def put(self, kind: Kind, choice: Choice) -> Choice:
        """Let this be what is known of a kind, and keep it for later processes if it is sure."""
        self.known[kind] = choice
        file, words = choice_file(), in_words(kind)
        is_kept = file is not None and choice.is_sure
        log.debug("%s, %s: %s of %s%s", self.area, words, choice.name, choice.seconds, "" if is_kept else ", not kept")
        if file is not None and choice.is_sure:
            file.put(self.area, words, choice)
        return choice


_MEASURING = threading.RLock()


def in_words(kind: tuple[Any, ...]) -> str:
    """A kind by the names of its fields: `rows=4 outputs=4096 columns=4096 dtype=bfloat16 threads=1`."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return " ".join(f"{name}={value}" for name, value in zip(fields, kind, strict=True)).replace("torch.", "")


def choice_file() -> ChoiceFile | None:
    """Where choices are kept between starts; None where they are not. ConfigError for a mode that is none."""
    mode = os.environ.get(VARIABLE) or "on"
    if mode not in MODES:
        modes = "; ".join(f"{name}: the file is {what}" for name, what in MODES.items())
        raise ConfigError(f"{VARIABLE}={mode} is not known", modes)
    if mode == "off":
        return None
    try:
        return _opened(str(cache_folder(FOLDER)), mode == "again")
    except ConfigError:  # nobody's home
        return None


@functools.lru_cache(maxsize=8)
def _opened(folder: str, ignores: bool) -> ChoiceFile:
    return ChoiceFile(Path(folder), machine_key(), ignores)


@functools.cache
def machine_key() -> MachineKey:
    """This machine and program."""
    kernels = library()
    return MachineKey(
        processor=processor_name()[:300],
        instructions=_digest(" ".join(sorted(flags_of_processor())).encode()),
        kernels="off" if kernels is None else _kernels_in_words(kernels.instruction_set),
        torch=str(torch.__version__),
        capability=torch.backends.cpu.get_cpu_capability(),
        settings={name: os.environ[name][:300] for name in HIDING if name in os.environ},
        tllm=__version__,
        program=source_digest()[:DIGITS],
    )


def _kernels_in_words(instruction_set: InstructionSet) -> str:
    return f"{instruction_set.name} {_digest(path_of(instruction_set).read_bytes())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
