"""A page of the KV cache as a file: what it holds of which layers and kv heads, and a hash of each part. No torch.

    magic (8 bytes) | bytes of the header (4, little-endian) | SHA-256 of the header (32) | header | pieces

The header is msgpack, decoded strictly. A piece is one layer's tensors one after another, of each the rows of its kv
heads. A rank of any plan reads the header and then only the pieces of its own layers. Nothing is allocated because a
file says so: the header must fit the file, and a piece must have the bytes that the reader works out for itself.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Annotated, BinaryIO

import msgspec

from tllm.core.errors import UNREADABLE, WeightsError
from tllm.engine.page_store.page_folder import Box, box_of
from tllm.engine.pages.page_messages import PageChain

MAGIC = b"TLLMKV01"
HEADER_LIMIT = 1 << 20
"""Bytes of a header: some hundred for each layer, and 4 for each token."""

START = len(MAGIC) + 4 + 32

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class TensorForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a layer, in a page: its dtype, and its shape for one kv head and one token."""

    dtype: str
    shape: tuple[Number, ...]


class LayerPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's kv heads [first_head, stop_head) of a page: its tensors, `nbytes` of them, with this SHA-256."""

    layer: Number
    first_head: Number
    stop_head: Number
    tensors: tuple[TensorForm, ...]
    nbytes: Number
    sha256: Digest


class PageIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a page is the page of: a model (with all else that its numbers follow from), and a prefix of tokens."""

    model: str
    name: Digest
    parent: Digest
    token_ids: bytes
    salt: Digest


class PageHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file's header."""

    identity: PageIdentity
    pieces: tuple[LayerPiece, ...]


_HEADERS = msgspec.msgpack.Decoder(PageHeader)


def identity_of(model: str, chain: PageChain, place: int) -> PageIdentity:
    """The identity of one page of a chain."""
    return PageIdentity(model, chain.names[place], chain.parent_of(place), chain.tokens_of(place), chain.salt)


def piece_of(
    layer: int, heads: tuple[int, int], tensors: tuple[TensorForm, ...], content: Sequence[memoryview]
) -> LayerPiece:
    """The piece that these bytes are: those of each tensor, in order."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return LayerPiece(layer, *heads, tensors, sum(len(part) for part in content), digest.digest())


def write_page(file: BinaryIO, header: PageHeader, content: Sequence[memoryview]) -> None:
    """Write a whole file: a header, and the bytes of its pieces one after another."""
    encoded = msgspec.msgpack.encode(header)
    file.write(MAGIC + len(encoded).to_bytes(4, "little") + hashlib.sha256(encoded).digest() + encoded)
    for part in content:
        file.write(part)


def file_bytes(header: PageHeader) -> int:
    """Bytes of a file with this header."""
    return START + len(msgspec.msgpack.encode(header)) + sum(piece.nbytes for piece in header.pieces)


def held_box(header: PageHeader) -> Box:
    """The box that a file with this header should be named by."""
    return box_of({piece.layer: (piece.first_head, piece.stop_head) for piece in header.pieces})


def check_file(content: bytes, model: str, page: bytes, box: Box, source: str) -> None:
    """WeightsError unless these bytes are a whole file of this box of a page of a model, every hash of it right."""
    file = io.BytesIO(content)
    header = read_header(file, len(content), source)
    if (header.identity.model, header.identity.name) != (model, page):
        raise WeightsError(f"{source} holds another page than was asked for")
    if (held := held_box(header)) != box:
        raise WeightsError(f"{source} holds layers and kv heads {held}, and {box} of that page were asked for")
    for piece in header.pieces:
        if hashlib.sha256(file.read(piece.nbytes)).digest() != piece.sha256:
            raise WeightsError(f"layer {piece.layer} in {source} has another hash than it should have")


def read_header(file: BinaryIO, size: int, name: str) -> PageHeader:
    """The header of a file of `size` bytes, which is then known to be right. WeightsError for what is no whole page."""
    start = file.read(START)
    length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 4], "little")
    if len(start) < START or start[: len(MAGIC)] != MAGIC:
        raise WeightsError(f"{name} is no page of a cache")
    if length > min(HEADER_LIMIT, size - START):
        raise WeightsError(f"{name} has {size} bytes and should have a header of {length}")
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != start[-32:]:
        raise WeightsError(f"the header of {name} has another hash than it should have")
    try:
        header = _HEADERS.decode(encoded)
    except UNREADABLE as error:
        raise WeightsError(f"the header of {name} is none: {error}") from error
    wanted = START + length + sum(piece.nbytes for piece in header.pieces)
    if size != wanted:
        raise WeightsError(f"{name} has {size} bytes and its header says {wanted}")
    return header


def read_pieces(file: BinaryIO, header: PageHeader, sizes: Mapping[int, int], name: str) -> dict[int, bytes]:
    """The pieces of some layers, by layer; `sizes` are the bytes that one kv head of each takes.

    `header` has just been read from `file`. WeightsError for a piece of another size, or with another hash.
    """
    at, pieces = file.tell(), dict[int, bytes]()
    for piece in header.pieces:
        if piece.layer in sizes:
            heads = piece.stop_head - piece.first_head
            if piece.nbytes != heads * sizes[piece.layer]:
                raise WeightsError(f"{name} has {piece.nbytes} bytes of {heads} heads of layer {piece.layer}")
            file.seek(at)
            content = file.read(piece.nbytes)
            if hashlib.sha256(content).digest() != piece.sha256:
                raise WeightsError(f"layer {piece.layer} in {name} has another hash than it should have")
            pieces[piece.layer] = content
        at += piece.nbytes
    return pieces
