"""Which files make up a GGUF model: one, or the pieces `NAME-00001-of-0000N.gguf` of a split one; and reading them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tllm.core.disk import READABLE
from tllm.core.errors import WeightsError
from tllm.core.gguf_header import GgufHeader, GgufTensor, Value, read_gguf_header
from tllm.core.partial_gguf_files import as_floats, check_floats, rest_of

SUFFIX = ".gguf"
PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PROJECTOR = "mmproj"
"""How the files of vision encoders, which lie beside the model, begin."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX and not path.is_dir()


def gguf_files(names: Iterable[str], wanted: str | None = None) -> list[str]:
    """The files of the GGUF model among the names of a folder's files; those of the file `wanted` if it is given.

    None for a folder with safetensors, whose GGUF files are another form of the same model. WeightsError where there
    are several models, or where a piece of a split one is missing.
    """
    listed = set(names)
    if wanted is None:
        if any(name.endswith(".safetensors") for name in listed):
            return []
        models = sorted({pieces(name)[0] for name in listed if name.endswith(SUFFIX) and PROJECTOR not in name})
        if not models:
            return []
        if len(models) > 1:
            others = f" and {len(models) - 3} others" if models[3:] else ""
            raise WeightsError(f"there are several GGUF files: {', '.join(models[:3])}{others}", "give the path of one")
        wanted = models[0]
    files = pieces(wanted)
    for name in files:
        if name not in listed:
            raise WeightsError(f"{name} is missing", "copy the whole model, every piece of it" if files[1:] else "")
    return files


def read_gguf(names: list[str], size: Callable[[str], int], read: Callable[[str, int, int], bytes]) -> GgufHeader:
    """The header of a model: the first file's metadata, and the tensors of all its files."""
    headers = [read_gguf_header(name, size(name), partial(read, name)) for name in names]
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if count != len(names) and (count, len(names)) != (0, 1):
        raise WeightsError(
            f"{first.file}: the model is in {count} files and {len(names)} have such names",
            "give the pieces the names that they were made with, NAME-00001-of-0000N.gguf",
        )
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        if header.metadata.get("split.no", number) != number:
            raise WeightsError(f"{header.file} says that it is piece {header.metadata['split.no']}, counted from 0")
        for name in header.tensors.keys() & tensors.keys():
            raise WeightsError(f"{header.file}: tensor {name!r} is in {tensors[name].file} too")
        tensors.update(header.tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(names) > 1 and total != len(tensors):
        raise WeightsError(f"{first.file}: the model has {total} tensors and its files hold {len(tensors)}")
    return GgufHeader(first.file, first.metadata, tensors)


@dataclass(frozen=True)
class GgufFile:
    """A model's header, and the folder that its files lie in. `known`: numbers of tensors that are not in these files,
    of which only the heads are here."""

    folder: Path
    header: GgufHeader
    known: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Value]:
        return self.header.metadata

    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of the tensors of each type, the most first."""
        total: Counter[str] = Counter()
        for tensor in self.header.tensors.values():
            total[tensor.type.name] += tensor.stop - tensor.start
        return dict(total.most_common())

    def floats(self, name: str) -> tuple[float, ...]:
        """The numbers of a small tensor of float32."""
        if name in self.known:
            return self.known[name]
        tensor = self.header.tensors[name]
        check_floats(tensor.file, name, tensor.type.name, tensor.stop - tensor.start)
        return as_floats(read_range(self.folder / tensor.file, tensor.start, tensor.stop))


def open_gguf(path: Path) -> GgufFile | None:
    """The GGUF model that a path stands for: a file, or a folder that holds one. None where it stands for none."""
    wanted = path.name if is_gguf(path) else None
    folder = path.parent if wanted else path
    if not folder.is_dir():
        return None
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    except OSError as error:
        raise WeightsError(f"cannot read the folder {folder}: {error.strerror}", READABLE) from error
    files = gguf_files(names, wanted)
    if not files:
        return None
    rests = {name: rest for name in files if (rest := rest_of(folder / name)) is not None}
    header = read_gguf(
        files,
        lambda name: rests[name].size if name in rests else (folder / name).stat().st_size,
        lambda name, start, stop: read_range(folder / name, start, stop),
    )
    return GgufFile(folder, header, {name: numbers for rest in rests.values() for name, numbers in rest.floats.items()})


def pieces(name: str) -> list[str]:
    """All files of the model that a file belongs to."""
    match = PIECE.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file. WeightsError where it ends before."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}", READABLE) from error
    if len(data) != stop - start:
        raise WeightsError(f"{path} ends before byte {stop}", "the file changed while it was read; copy it again")
    return data
