"""What a user calls a model that is no path: `org/name` on the Hugging Face hub, or a name of ollama or LM Studio."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tllm.core.errors import ConfigError

Store = Literal["hub", "ollama", "lmstudio"]

WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,95})"
NAME = re.compile(
    rf"(?:(?P<store>ollama|lmstudio):)?(?P<repo>{WORD}(?:/{WORD}){{0,3}})(?:@(?P<revision>[\w./-]{{1,200}}))?"
    rf"(?::(?P<tag>{WORD}))?",
    re.ASCII,
)
SHAPES = (
    "give a folder with a config.json, a GGUF file, or a name: ORG/NAME of the Hugging Face hub (with @REVISION, or "
    "with :Q4_K_M for one of its GGUF files), ollama:NAME or lmstudio:PUBLISHER/NAME"
)

ADDRESS = re.compile(rf"(?:https?://[^/]+/|hf://|hf\.co/|huggingface\.co/)(?P<repo>{WORD}/{WORD})(?:/.*)?", re.ASCII)


@dataclass(frozen=True)
class ModelName:
    """`repo` has parts joined by slashes, none of which leads out of a folder. `revision` is of the hub alone, "" for
    none; `tag` is ollama's tag, or a GGUF file by its quantisation, "" for none."""

    store: Store
    repo: str
    revision: str = ""
    tag: str = ""

    def __str__(self) -> str:
        store = "" if self.store == "hub" else f"{self.store}:"
        return f"{store}{self.repo}{self.revision and '@'}{self.revision}{self.tag and ':'}{self.tag}"


def parse_name(text: str, revision: str | None = None) -> ModelName | None:
    """The name that a text is, with the revision that was asked for beside it; None if it is no name of a model.

    ConfigError where two revisions are asked for, or one of a store that has none.
    """
    match = NAME.fullmatch(text)
    if match is None or any(bad in text for bad in ("..", "//")) or text.endswith(("/", ".", ".gguf")):
        return None
    store: Store = "hub" if match["store"] is None else match["store"]  # type: ignore[assignment]
    if store in ("hub", "lmstudio") and match["repo"].count("/") != 1:
        return None
    own = match["revision"] or ""
    if own and revision and own != revision:
        raise ConfigError(f"{text} names the revision {own}, and --revision is {revision}", "give one of them")
    wanted = own or revision or ""
    if wanted and store != "hub":
        raise ConfigError(f"{text} is not on the Hugging Face hub and has no revision {wanted}", "leave it out")
    if wanted and not is_revision(wanted):
        raise ConfigError(f"{wanted[:80]!r} is not a branch, tag or commit", "such as main, v1.0 or a commit's hash")
    return ModelName(store, match["repo"], wanted, match["tag"] or "")


def meant(text: str) -> str:
    """The hint for a text that is no name: what it was meant to be, or what names look like."""
    if address := ADDRESS.fullmatch(text):
        return f"give {address['repo']}, the model's name"
    name = NAME.fullmatch(text)
    if name and name["store"] is None and "/" not in text:
        return f"{SHAPES}; ollama:{text} is what ollama has pulled"
    return SHAPES


def is_revision(text: str) -> bool:
    """Whether a text can be the name of a branch or tag, or a commit, and leads out of no folder."""
    return re.fullmatch(r"\w[\w./-]{0,199}", text, re.ASCII) is not None and ".." not in text and "//" not in text


def is_commit(text: str) -> bool:
    """Whether a revision is a whole commit hash, which never changes what it stands for."""
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None
