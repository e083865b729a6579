"""What a server says of its model to programs that take it for ollama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tllm.server.openai.engine_client import EngineClient
from tllm.server.openai.info import utc

SPOKEN = "0.12.0"
"""The version of ollama whose interface this is: programs refuse older ones."""

_FAR = "9999-12-31T00:00:00Z"


def listed(names: Sequence[str], client: EngineClient, started: int) -> dict[str, Any]:
    """`/api/tags`. Models have no time of change here: they are as old as the server, in Unix seconds."""
    return {"models": _models(names, client, modified_at=utc(started))}


def running(names: Sequence[str], client: EngineClient) -> dict[str, Any]:
    """`/api/ps`: the model is always loaded."""
    return {"models": _models(names, client, expires_at=_FAR, size_vram=0, context_length=client.max_model_len)}


def shown(client: EngineClient, template: str, has_tools: bool, reasons: bool, started: int) -> dict[str, Any]:
    """`/api/show`."""
    capabilities = ["completion", "embedding", *(["tools"] if has_tools else []), *(["thinking"] if reasons else [])]
    return {
        "modified_at": utc(started),
        "template": template,
        "details": _details(),
        "model_info": {"general.architecture": "tllm", "tllm.context_length": client.max_model_len},
        "capabilities": capabilities,
    }


def _models(names: Sequence[str], client: EngineClient, **more: Any) -> list[dict[str, Any]]:
    """An entry for each name of the one model, of which the cluster holds so many bytes."""
    held = sum(node.get("parameter_bytes", 0) for node in client.status().get("nodes", ()))
    of_all = {"size": held, "digest": "", "details": _details(), **more}
    return [{"name": name, "model": name, **of_all} for name in names]


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
