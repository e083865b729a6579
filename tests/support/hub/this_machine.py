"""What a process has of the Hugging Face hub, ollama and LM Studio, in folders of a test alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hub.fake_hub import FakeHub


def environment(home: Path, hub: FakeHub | None, token: str = "") -> dict[str, str]:
    """Variables for a process that has this home and, without a hub, may ask none."""
    return {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0" if hub else "1",
        "HF_TOKEN": token,
    }


def use_hub(monkeypatch: pytest.MonkeyPatch, home: Path, hub: FakeHub, token: str = "") -> None:
    """The same for this process, whose library has read its variables already."""
    from huggingface_hub import constants

    for name, value in environment(home, hub, token).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "hf" / ".agent_harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
