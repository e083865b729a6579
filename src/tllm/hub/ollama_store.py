"""ollama's store: `manifests/HOST/NAMESPACE/NAME/TAG` says which blob is the GGUF file of a model."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tllm.core.cache_folder import cache_folder, home
from tllm.core.errors import UNREADABLE, ConfigError

HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
MODEL = "application/vnd.ollama.image.model"
CHANGES = {"application/vnd.ollama.image.adapter": "an adapter"}
"""Layers that would change what the model computes, and are not read."""
MANIFEST_BYTES = 1_000_000
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class OllamaLayer(msgspec.Struct, frozen=True):
    """One blob of a model."""

    mediaType: str
    digest: str
    size: int = 0


class OllamaManifest(msgspec.Struct, frozen=True):
    """What a model of the store consists of."""

    layers: tuple[OllamaLayer, ...] = ()


def ollama_folder() -> Path:
    """OLLAMA_MODELS, else where ollama keeps its models."""
    return Path(os.environ.get("OLLAMA_MODELS") or home() / ".ollama" / "models")


def find_ollama(name: str, tag: str) -> Path:
    """The GGUF file of `NAME`, `NAMESPACE/NAME` or `HOST/NAMESPACE/NAME`, as a link with the ending that GGUF files
    have. ConfigError where it is not in the store; nothing is fetched."""
    parts = name.split("/")
    full = [*(HOST, NAMESPACE)[: max(0, 3 - len(parts))], *parts]
    manifest = ollama_folder().joinpath("manifests", *full, tag or TAG)
    if not manifest.is_file():
        known = ", ".join(f"ollama:{known}" for known in ollama_models()) or "none"
        raise ConfigError(
            f"ollama has no {name}:{tag or TAG} in {ollama_folder()}",
            f"`ollama pull {name}:{tag or TAG}` fetches it; there are: {known}",
        )
    return _link(_blob_of(manifest), f"{'-'.join(parts)}-{tag or TAG}")


def ollama_models() -> Iterator[str]:
    """The name as `ollama:` takes it of every model of the store."""
    root = ollama_folder() / "manifests"
    for manifest in sorted(root.glob("*/*/*/*")):
        if manifest.is_file():
            host, namespace, name, tag = manifest.relative_to(root).parts
            place = [] if (host, namespace) == (HOST, NAMESPACE) else [namespace] if host == HOST else [host, namespace]
            yield "/".join([*place, name]) + f":{tag}"


def _blob_of(manifest: Path) -> Path:
    """The GGUF file that a manifest names. ConfigError where there is none, or where it is not all of the model."""
    try:
        content: Any = manifest.read_bytes() if manifest.stat().st_size <= MANIFEST_BYTES else b""
        found = msgspec.json.decode(content, type=OllamaManifest)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{manifest} is not a manifest of ollama: {error}", "pull the model again") from error
    for layer in found.layers:
        if layer.mediaType in CHANGES:
            raise ConfigError(
                f"{manifest} adds {CHANGES[layer.mediaType]} to its model, which is not read",
                "give a model that has it merged in",
            )
    models = [layer for layer in found.layers if layer.mediaType == MODEL]
    if len(models) != 1:
        raise ConfigError(f"{manifest} has {len(models)} files of weights, and one is read", "give another model")
    digest = DIGEST.fullmatch(models[0].digest)
    if digest is None:
        raise ConfigError(f"{manifest} names a blob {models[0].digest[:80]!r}", "pull the model again")
    blob = ollama_folder() / "blobs" / f"sha256-{digest[1]}"
    size = blob.stat().st_size if blob.is_file() else -1
    if size != models[0].size:
        raise ConfigError(
            f"{blob} has {max(size, 0)} bytes, and ollama's manifest says {models[0].size}", "pull the model again"
        )
    return blob


def _link(blob: Path, name: str) -> Path:
    """A link to a blob, called as the model is."""
    link = cache_folder("ollama") / blob.name / f"{name}.gguf"
    try:
        if not link.is_symlink() or link.resolve() != blob.resolve():
            link.parent.mkdir(parents=True, exist_ok=True)
            beside = link.with_name(f"{link.name}.{secrets.token_hex(4)}")
            beside.symlink_to(blob.resolve())
            beside.replace(link)  # at once, as another program may read it now, or make it
    except OSError as error:
        raise ConfigError(f"cannot make {link}: {error.strerror}", "set XDG_CACHE_HOME to a writable folder") from error
    return link
