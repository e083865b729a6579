"""`Repository`: the files of a model on the Hugging Face hub at one commit, and which of them are ever fetched."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, WeightsError
from tllm.core.gguf_files import PIECE, PROJECTOR, SUFFIX, pieces
from tllm.hub.model_name import is_commit, parse_name

INDEX = "model.safetensors.index.json"
MANIFEST = "tllm.manifest.json"
POOLING = re.compile(r"\d+_(Pooling/config\.json|Dense/(config\.json|model\.safetensors))")
"""Where sentence-transformers says how prompts are pooled, and has the linears that follow."""
SMALL_SUFFIXES = (".json", ".txt", ".jinja", ".model")
SMALL_BYTES = 100_000_000
"""Of one of the files that are read whole by every process: config, tokenizer, template, index."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FILES_LIMIT, FILE_LIMIT = 100_000, 1 << 42
"""Files of a repository, and bytes of one: far more than a hub takes, and few enough to go through its chunks."""
FILE = re.compile(r"[\w+=,() -][\w.+=,() -]*(?:/[\w+=,() -][\w.+=,() -]*){0,7}", re.ASCII)
ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
QUANTISATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:IQ|Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)(?=[-./]|$)", re.IGNORECASE)


class HubFile(msgspec.Struct, frozen=True):
    """`etag` pins the content: the SHA-256 of a large file, the git hash of a small one."""

    name: str
    size: int
    etag: str

    @property
    def is_large(self) -> bool:
        """Whether the hub stores it apart, under its SHA-256."""
        return len(self.etag) == 64

    def hasher(self) -> hashlib._Hash:
        """What becomes the etag once it has had all bytes: SHA-256, of a small file the hash that git has of it."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


class Repository(msgspec.Struct, frozen=True):
    """What a repository holds at one commit, or those of its files that matter."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:8]}"

    @property
    def nbytes(self) -> int:
        """Of all the files."""
        return sum(file.size for file in self.files)

    def file(self, name: str) -> HubFile | None:
        """A file by its name; None where there is none."""
        return next((file for file in self.files if file.name == name), None)

    def of(self, names: Iterable[str]) -> Repository:
        """The same with these files alone."""
        wanted = set(names)
        return msgspec.structs.replace(self, files=tuple(file for file in self.files if file.name in wanted))


@dataclass(frozen=True)
class HubWeights:
    """A model whose weights each node fetches for itself, and where the nodes of this machine keep what came.

    cache: a folder, of which at most `cache_bytes` are used; "" keeps nothing.
    """

    repository: Repository
    cache: str
    cache_bytes: int


def usable_files(files: Iterable[HubFile]) -> tuple[HubFile, ...]:
    """Those with a name that stays in the folder that it is put into, with a size and a hash."""
    kept = [
        file
        for file in files
        if FILE.fullmatch(file.name) and 0 <= file.size <= FILE_LIMIT and ETAG.fullmatch(file.etag)
    ]
    if len(kept) > FILES_LIMIT:
        raise WeightsError(f"the repository has {len(kept)} files, and {FILES_LIMIT} are read at most")
    return tuple(sorted(kept, key=lambda file: file.name))


def check_repository(repository: Repository) -> None:
    """WeightsError unless a repository that another machine names has names and hashes that lead out of no folder, and
    sizes that files may have."""
    name = parse_name(repository.repo)
    is_named = name is not None and (name.store, name.repo) == ("hub", repository.repo)
    if not is_named or not is_commit(repository.commit):
        raise WeightsError(f"{repository.repo[:80]!r} at {repository.commit[:80]!r} is no commit of a model on the hub")
    if len(usable_files(repository.files)) != len(repository.files):
        raise WeightsError(f"{repository} is said to have files whose names, sizes or hashes are none")


def small_files(repository: Repository) -> Repository:
    """Config, tokenizer, chat template, index, how to pool: what every process reads whole."""
    return repository.of(
        file.name
        for file in repository.files
        if (POOLING.fullmatch(file.name) or ("/" not in file.name and file.name.endswith(SMALL_SUFFIXES)))
        and file.size <= SMALL_BYTES
    )


def safetensors_files(repository: Repository, index: bytes | None) -> Repository:
    """The weights that a loader reads: `model.safetensors`, else those that the index names, else all there are.

    Weights beside them under other names (`consolidated.safetensors`, other forms in sub-folders) are left alone.
    """
    found = [file.name for file in repository.files if file.name.endswith(".safetensors") and "/" not in file.name]
    named = set() if index is None else index_names(index)
    if "model.safetensors" in found:
        found = ["model.safetensors"]
    elif named:
        for name in sorted(named - set(found)):
            raise WeightsError(
                f"{INDEX} of {repository} names {name[:80]!r}, which the repository lacks", "give another revision"
            )
        found = sorted(named)
    return repository.of(found)


def index_names(index: bytes) -> set[str]:
    """The files that an index says the weights are in."""
    try:
        names = msgspec.json.decode(index, type=dict[str, msgspec.Raw]).get("weight_map", msgspec.Raw(b"{}"))
        return set(msgspec.json.decode(names, type=dict[str, str]).values())
    except UNREADABLE as error:
        raise WeightsError(f"{INDEX} cannot be read: {error}", "give another revision") from error


def gguf_choices(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among files, by their quantisation as their names have it, else by name; each with its pieces."""
    listed, found = sorted(names), dict[str, list[str]]()
    for name in listed:
        if not name.endswith(SUFFIX) or PROJECTOR in name.rpartition("/")[2]:
            continue
        match = PIECE.fullmatch(name)
        if match is not None and int(match["number"]) != 1:
            continue
        stem = match["stem"] if match is not None else name.removesuffix(SUFFIX)
        labels = QUANTISATION.findall(stem)
        label = labels[-1].upper() if labels else stem
        found[label if label not in found else stem] = pieces(name)
    return found


def gguf_files_of(repository: Repository, tag: str) -> Repository:
    """The files of the GGUF model with a quantisation, or of the only one. ConfigError lists those that there are."""
    choices = gguf_choices(file.name for file in repository.files)
    wanted = next((label for label in choices if label.upper() == tag.upper()), "")
    if not tag and len(choices) == 1:
        wanted = next(iter(choices))
    if not wanted:
        what = f"has no GGUF file of {tag}" if tag else f"has {len(choices)} GGUF models"
        known = ", ".join(choices) or "none"
        raise ConfigError(f"{repository} {what}", f"give one as {repository.repo}:QUANTISATION; there are: {known}")
    chosen = repository.of(choices[wanted])
    if len(chosen.files) != len(choices[wanted]):
        raise WeightsError(
            f"{repository} has {len(chosen.files)} of the {len(choices[wanted])} pieces of {wanted}",
            "give another quantisation or revision",
        )
    return chosen


def no_weights(repository: Repository) -> ConfigError:
    """What to say of a repository that has no weights which are read."""
    pickles = [file.name for file in repository.files if file.name.endswith(PICKLES)]
    if pickles:
        return ConfigError(
            f"{repository} has its weights only as pickle files ({pickles[0]}), which are never fetched or read",
            "opening one runs whatever code it holds: look for a revision or a repository with safetensors",
        )
    return ConfigError(
        f"{repository} has neither safetensors nor GGUF files", "give a repository that holds a model's weights"
    )
