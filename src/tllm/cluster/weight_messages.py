"""Messages about weights that a node lacks, where they are to be had, and the bytes themselves; pages of caches too."""

from __future__ import annotations

from typing import Literal

import msgspec

from tllm.cluster.wire_message import Message
from tllm.hub.repository import Repository
from tllm.spec.process_groups import RoleName

READ_BYTES = 8 * 1024 * 1024
"""The most that one `ReadBytes` may ask for."""

Why = Literal["lacks", "broke", "lied"]
"""Why a node did not get a chunk: it is not there, whoever has it cannot be reached, or what came has another hash."""


class ModelFileFacts(Message, frozen=True):
    """A file of the model folder; `digest` is of samples of it, enough to tell two models apart."""

    name: str
    size: int
    digest: bytes


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """What a rank will hold of one tensor of the checkpoint: [start, stop) for each dim, () for all of it."""

    name: str
    source: tuple[tuple[int, int], ...] = ()
    replicated: bool = False


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter that the coordinator has: its id, the number of its loading, and the bytes of each of its files.

    A node reads them by `ReadBytes`, under the names that `adapter_file` gives.
    """

    lora: str
    number: int
    sizes: dict[str, int]


def adapter_file(lora: str, file: str) -> str:
    """What a file of an adapter is called among the files that nodes ask the coordinator for."""
    return f"lora/{lora}/{file}"


def role_file(role: RoleName, file: str) -> str:
    """What a file of a role's model is called among the files that nodes ask the coordinator for."""
    return f"{role}/{file}"


class ReadBytes(Message, frozen=True):
    """A node that lacks the model asks for bytes [start, stop) of one of its files."""

    answers = ("Bytes",)

    file: str
    start: int
    stop: int


class Bytes(Message, frozen=True):
    """What was asked for, with its SHA-256."""

    data: bytes
    digest: bytes


class HoldsChunks(Message, frozen=True):
    """Chunks of weights that a node can pass on, by their SHA-256. `files`: it has all of the model's files."""

    digests: tuple[bytes, ...] = ()
    files: bool = False


class LocateChunk(Message, frozen=True):
    """Asks which node has this chunk of a file. The answer is a stream: `Pending` while another node fetches it, then
    `ChunkFound`.

    `failed` names the node that was found before and did not give it, and `why`.
    """

    answers = ("Pending", "ChunkFound")

    epoch: int
    file: str
    number: int
    failed: str = ""
    why: Why = "lacks"


class Pending(Message, frozen=True):
    """Another node fetches the chunk, and will pass it on."""


class ChunkFound(Message, frozen=True):
    """The chunk's SHA-256, and who has it: a node, with the address of its chunk server, or the coordinator itself."""

    digest: bytes
    node: str
    host: str = ""
    port: int = 0


class ChunkReceived(Message, frozen=True):
    """A chunk came from `source` and has the right hash. If it is `kept`, the node can pass it on."""

    digest: bytes
    nbytes: int
    source: str
    kept: bool


class OpenChunkConnection(Message, frozen=True):
    """The first message of a connection on which a member fetches chunks of weights, and nothing else."""


class GetChunk(Message, frozen=True):
    """Give this chunk of a file, which has this SHA-256. The answer is a stream of `ChunkBytes`."""

    answers = ("ChunkBytes",)

    file: str
    number: int
    digest: bytes


class ListHubChunks(Message, frozen=True):
    """Asks a node what it has of a file of a repository on the hub. The answer is a stream of `ChunkBytes`: the SHA-256
    of each chunk, one after the other, zeros for one that it lacks."""

    answers = ("ChunkBytes",)

    repository: Repository
    file: str


class ChunkBytes(Message, frozen=True):
    """The next bytes of a chunk, or of what is listed."""

    data: bytes


# --- pages of the KV cache that a node lacks on its disk
class FindPages(Message, frozen=True):
    """Asks a node which files it has of these pages of a model. The answer is `PagesFound`."""

    answers = ("PagesFound",)

    model: str
    names: tuple[bytes, ...]


class PagesFound(Message, frozen=True):
    """For each page the boxes that files hold of it: layers [first, stop), kv heads [first, stop), and which part."""

    boxes: tuple[tuple[tuple[int, int, int, int, int], ...], ...]


class ListPages(Message, frozen=True):
    """Asks a node for the names of all pages of a model on its disk. The answer is a stream of `PageNames`."""

    answers = ("PageNames",)

    model: str


class PageNames(Message, frozen=True):
    """Some names."""

    names: tuple[bytes, ...]


class GetPage(Message, frozen=True):
    """Give the file that holds this box of a page. The answer is a stream of `ChunkBytes`."""

    answers = ("ChunkBytes",)

    model: str
    name: bytes
    box: tuple[int, int, int, int, int]


OfWeights = ReadBytes | HoldsChunks | LocateChunk | ChunkReceived | OpenChunkConnection | GetChunk
"""What a node sends about weights."""

ToWeights = Bytes | Pending | ChunkFound
"""What the coordinator answers about weights on the control wire."""
