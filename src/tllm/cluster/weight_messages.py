"""Messages about weights that a node lacks: where they are to be had, and the bytes themselves."""

from __future__ import annotations

from typing import Literal

from tllm.cluster.message import Message

READ_BYTES = 8 * 1024 * 1024
"""The most that one `ReadBytes` may ask for."""

Why = Literal["lacks", "broke", "lied"]
"""Why a node was not given a chunk: it is not there, there is no way to it, or what came has another hash."""


class ReadBytes(Message, frozen=True):
    """A node that lacks the model asks for bytes [start, stop) of one of its files."""

    file: str
    start: int
    stop: int


class Bytes(Message, frozen=True):
    """What was asked for, with its SHA-256."""

    data: bytes
    digest: bytes


class Holds(Message, frozen=True):
    """Chunks of weights that a node can pass on, by their SHA-256. `files`: it has all of the model's files."""

    digests: tuple[bytes, ...] = ()
    files: bool = False


class Seek(Message, frozen=True):
    """Where is this chunk of a file to be had? The answer is a stream: `Pending` while another brings it, then `Found`.

    `failed` names who was found before and did not give it, and `why`.
    """

    epoch: int
    file: str
    number: int
    failed: str = ""
    why: Why = "lacks"


class Pending(Message, frozen=True):
    """Another node brings it, and will pass it on."""


class Found(Message, frozen=True):
    """The chunk's SHA-256, and who has it: a node by the address that it lends at, or the coordinator itself."""

    digest: bytes
    node: str
    host: str = ""
    port: int = 0


class Came(Message, frozen=True):
    """A chunk came from `source` and has the right hash. If it is `kept`, the node can pass it on."""

    digest: bytes
    nbytes: int
    source: str
    kept: bool


class Borrow(Message, frozen=True):
    """The first message of a connection on which a member reads weights, and nothing else."""


class Lend(Message, frozen=True):
    """Give this chunk of a file, which has this SHA-256. The answer is a stream of `Lent`."""

    file: str
    number: int
    digest: bytes


class Lent(Message, frozen=True):
    """The next bytes of a chunk."""

    data: bytes


OfWeights = ReadBytes | Holds | Seek | Came | Borrow | Lend
"""What a node says."""

ToWeights = Bytes | Pending | Found
"""What it is answered on the control wire."""
