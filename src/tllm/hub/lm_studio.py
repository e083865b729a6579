"""LM Studio's folder of models: `PUBLISHER/NAME/FILE.gguf`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tllm.core.cache_folder import home
from tllm.core.errors import ConfigError
from tllm.hub.repository import gguf_choices


def lm_studio_folders() -> list[Path]:
    """Where LM Studio keeps models, in its newer versions and in its older ones."""
    return [home() / ".lmstudio" / "models", home() / ".cache" / "lm-studio" / "models"]


def find_lm_studio(name: str, tag: str) -> Path | None:
    """The GGUF file of `PUBLISHER/NAME` by its quantisation, or the only one; None where that is not one file."""
    found = [path for label, path in _choices(name).items() if label.upper() == (tag or label).upper()]
    return found[0] if len(found) == 1 else None


def lm_studio_file(name: str, tag: str) -> Path:
    """The same file. ConfigError, with those that there are, where there is none."""
    found = find_lm_studio(name, tag)
    if found is None:
        choices = _choices(name)
        if not choices:
            known = ", ".join(f"lmstudio:{known}" for known, _ in lm_studio_models()) or "none"
            raise ConfigError(f"LM Studio has no {name}", f"there are: {known}")
        what = f"no GGUF file of {tag}" if tag else f"{len(choices)} GGUF models"
        raise ConfigError(
            f"LM Studio has {what} for {name}",
            f"give one as lmstudio:{name}:QUANTISATION; there are: {', '.join(choices)}",
        )
    return found


def _choices(name: str) -> dict[str, Path]:
    """The first file of each GGUF model of `PUBLISHER/NAME`, by its quantisation."""
    choices: dict[str, Path] = {}
    for folder in lm_studio_folders():
        place = folder / name
        for label, files in gguf_choices(path.name for path in place.glob("*.gguf")).items():
            choices.setdefault(label, place / files[0])
    return choices


def lm_studio_models() -> Iterator[tuple[str, Path]]:
    """(name as `lmstudio:` takes it, file) of every GGUF model there."""
    for folder in lm_studio_folders():
        for place in sorted(path for path in folder.glob("*/*") if path.is_dir()):
            for label, files in gguf_choices(path.name for path in place.glob("*.gguf")).items():
                yield f"{place.parent.name}/{place.name}:{label}", place / files[0]
