"""Text to token ids and back, from a model folder's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from tllm.core.disk import LFS_HINT, LFS_POINTER, is_lfs_pointer
from tllm.core.errors import ConfigError, RequestError
from tllm.core.gguf_files import GgufFile, open_gguf
from tllm.core.gguf_vocabulary import stop_ids as gguf_stop_ids
from tllm.text.gguf_tokenizer import gguf_tokenizer, is_same_vocabulary
from tllm.text.token_bytes import TokenBytes

log = logging.getLogger("tllm.text")

_CONVERT_HINT = (
    "write a tokenizer.json once, with the `transformers` library: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER); token ids work without it"
)
_OTHER_FORMATS = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


MAX_UNPACKED_BYTES = 512 * 1024 * 1024

LONG = 20_000
"""Characters, or ids, that take milliseconds. While the library works on one text, no other thread of Python runs;
while it works on a batch, others do. So what is long is given to it as a batch of one."""


class PackedTokenizer(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tokenizer as it travels: the library's own JSON, tokenizer_config.json, and the tokens that end a reply."""

    inner: str
    config: bytes
    eos_ids: tuple[int, ...]


class Tokenizer:
    """A model's tokenizer. `encode` adds the tokens the model expects around a text; `eos_ids` end a reply."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        config = config or {}
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.config = config
        self.special_tokens = _special_tokens(config)
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_ids)))
        self._bytes = TokenBytes(inner)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has none at all (token ids still work).

        Of a GGUF model, the tokenizer.json beside it if that has the file's vocabulary, else what the file describes.
        """
        folder = Path(folder)
        gguf = open_gguf(folder)
        if gguf is not None:
            return cls._of_gguf(gguf)
        file = folder / "tokenizer.json"
        if not file.exists():
            found = [name for name in _OTHER_FORMATS if (folder / name).exists()]
            if found:
                raise ConfigError(
                    f"{folder} has {found[0]} but no tokenizer.json, the only form read here",
                    _CONVERT_HINT,
                )
            return None
        return cls(*_from_files(folder), eos_ids=stop_ids(folder))

    @classmethod
    def _of_gguf(cls, gguf: GgufFile) -> Tokenizer | None:
        ends = gguf_stop_ids(gguf.metadata)
        if (gguf.folder / "tokenizer.json").exists():
            inner, config = _from_files(gguf.folder)
            if is_same_vocabulary(inner, gguf.metadata):
                template = gguf.metadata.get("tokenizer.chat_template")
                if template is not None:
                    config.setdefault("chat_template", template)
                return cls(inner, config, ends)
            log.warning("%s/tokenizer.json is of another model than the GGUF file and is not used", gguf.folder)
        made = gguf_tokenizer(gguf.metadata)
        return None if made is None else cls(*made, ends)

    def to_bytes(self) -> bytes:
        """All that makes it, to be sent to another node."""
        packed = PackedTokenizer(self.inner.to_str(), msgspec.json.encode(self.config), self.eos_ids)
        return zlib.compress(msgspec.msgpack.encode(packed))

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """What `to_bytes` gave. ConfigError for anything else, or more than `MAX_UNPACKED_BYTES`."""
        inflate = zlib.decompressobj()
        try:
            packed = msgspec.msgpack.decode(inflate.decompress(data, MAX_UNPACKED_BYTES), type=PackedTokenizer)
            config = msgspec.json.decode(packed.config, type=dict[str, Any])
            inner = tokenizers.Tokenizer.from_str(packed.inner)
        except Exception as error:  # the library raises exactly this for every fault in the text
            raise ConfigError(f"{len(data)} bytes are no tokenizer: {str(error)[:300]}") from error
        return cls(inner, config, packed.eos_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, also the begin (and end) tokens that tokenizer.json declares.

        `add_bos_token` in tokenizer_config.json changes nothing: it was for tokenizers built from other files.
        """
        try:
            if len(text) < LONG:
                return self.inner.encode(text, add_special_tokens=add_special_tokens).ids
            [encoded] = self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoded.ids
        except (TypeError, UnicodeEncodeError) as error:  # the library calls a text it cannot encode no text
            raise RequestError(
                "the text holds half of a surrogate pair, which no UTF-8 has",
                param="prompt",
            ) from error

    def encode_cut(self, text: str, most: int) -> list[int]:
        """Token ids of `text` and what belongs around it, `most` of them: of a longer text the end is left out. What
        belongs after a text, as an end token of which an embedding is read, stays."""
        kept = (most + 1) * self.longest_piece  # the rest would be left out, but where characters are no tokens
        ids = self.encode(text[:kept])
        while len(ids) <= most and kept < len(text):
            kept *= 2
            ids = self.encode(text[:kept])
        if len(ids) <= most:
            return ids
        plain = self.encode(text[:kept], add_special_tokens=False)
        around = len(ids) - len(plain)
        after = next((around - at for at in range(around + 1) if ids[at : at + len(plain)] == plain), 0)
        return ids[: max(0, most - after)] + ids[len(ids) - after :]

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Token ids of two texts as one input, joined as tokenizer.json says."""
        try:
            [encoded] = self.inner.encode_batch_fast([(text, other)])
            return encoded.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("a text holds half of a surrogate pair, which no UTF-8 has", param="prompt") from error

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text, None where there is none."""
        return self.inner.token_to_id(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; an id outside the vocabulary gives nothing."""
        if len(ids) < LONG:
            return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        [text] = self.inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        return self._bytes(token_id)

    def token_label(self, token_id: int) -> str:
        """A name that no token of other bytes has: its text, or `bytes:\\xe2\\x82` for part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding with `skip_special_tokens` leaves this token out."""
        return token_id in self._special_ids

    @property
    def size(self) -> int:
        """How many ids there are, added ones included."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_piece(self) -> int:
        """Characters of the longest token: a text longer than this times the context cannot fit, whatever it says."""
        return max(
            (len(piece) for piece in self.inner.get_vocab(with_added_tokens=True)),
            default=1,
        )

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.inner.get_added_tokens_decoder().items() if token.special)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.inner.token_to_id(token)


def _from_files(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """What tokenizer.json, tokenizer_config.json and special_tokens_map.json say."""
    file = folder / "tokenizer.json"
    config = _read_json(folder / "tokenizer_config.json")
    for key, value in _read_json(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises exactly this for every fault in the file
        with contextlib.suppress(OSError), file.open("rb") as opened:
            if is_lfs_pointer(opened.read(8)):
                raise ConfigError(f"{file} {LFS_POINTER}", LFS_HINT) from error
        raise ConfigError(
            f"{file} cannot be read: {str(error)[:300]}", f"copy the file again, or {_CONVERT_HINT}"
        ) from error
    _add_missing(inner, config, file)
    return inner, config


def stop_ids(folder: Path | str) -> tuple[int, ...]:
    """The ids that generation_config.json (else config.json) says end a reply; chat models often have several."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(Path(folder) / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise ConfigError(
                    f"{Path(folder) / name}: eos_token_id is {value!r}",
                    "it must be an id or a list of ids",
                )
            return tuple(ids)
    return ()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "let this user read it") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}", "fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file} holds a {type(value).__name__}, not an object",
            "fetch the file again",
        )
    return value


def _content(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, by name, as chat templates see them."""
    named = {
        key: _content(value) for key, value in config.items() if key.endswith("_token") and not key.startswith("add_")
    }
    return {key: value for key, value in named.items() if value is not None}


def _add_missing(inner: tokenizers.Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Add the tokens that only tokenizer_config.json declares; their ids must come out as declared."""
    for key, entry in sorted(_declared(config).items()):
        if inner.id_to_token(key) == entry["content"]:
            continue
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
        (inner.add_special_tokens if token.special else inner.add_tokens)([token])
        given = inner.token_to_id(entry["content"])
        if given != key:
            raise ConfigError(
                f"tokenizer_config.json says {entry['content']!r} is id {key}, {file.name} makes it {given}",
                "the two files belong to different models: fetch both again",
            )
    # a token with a role is never cut into pieces, even where the vocabulary holds it as an ordinary one
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    for content in _special_tokens(config).values():
        if content not in added and inner.token_to_id(content) is not None:
            inner.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _declared(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """`added_tokens_decoder` of tokenizer_config.json: by id, each with its `content`."""
    declared = config.get("added_tokens_decoder") or {}
    is_right = isinstance(declared, dict) and all(
        key.isascii()
        and key.isdigit()
        and len(key) < 10
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        for key, entry in declared.items()
    )
    if not is_right:
        raise ConfigError(
            "tokenizer_config.json: added_tokens_decoder is no table of tokens by their ids", "fetch the file again"
        )
    return {int(key): entry for key, entry in declared.items()}
