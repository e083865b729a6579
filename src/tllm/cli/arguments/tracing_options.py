"""`--otlp-endpoint`: where the traces of requests go, and the variables of OpenTelemetry that say it too."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from tllm.core.errors import ConfigError
from tllm.server.tracing.tracing import OpenTracing, Tracing, no_tracing

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def add_tracing(group: argparse._ActionsContainer) -> None:
    """Where traces go."""
    group.add_argument(
        "--otlp-endpoint",
        "--otlp-traces-endpoint",
        metavar="URL",
        default=default_endpoint(os.environ),
        help="send a trace of each request to an OpenTelemetry collector: http://HOST:4318 "
        f"(the variable {ENDPOINT}, or none)",
    )


def default_endpoint(variables: Mapping[str, str]) -> str:
    """What the variables say, "" for nothing. A base has the path of OTLP put behind its own, as they define it."""
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if whole := variables.get(TRACES_ENDPOINT):
        return whole
    base = variables.get(ENDPOINT, "")
    return base.rstrip("/") + "/v1/traces" if base else ""


def check_tracing(endpoint: str) -> None:
    """ConfigError where traces cannot be sent there."""
    if not endpoint:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint {endpoint!r} is no URL of a collector", "give one as http://HOST:4318")
    try:
        import tllm.server.tracing.otlp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry's packages, and {error.name} is not installed",
            'pip install "together-llm[otel]"',
        ) from error


def tracing_at(endpoint: str) -> OpenTracing:
    """How traces are sent to this collector, or to none."""
    if not endpoint:
        return no_tracing
    from tllm.server.tracing.otlp import OtlpTraces

    return lambda model, spans_of: Tracing(OtlpTraces(endpoint, model), spans_of)
