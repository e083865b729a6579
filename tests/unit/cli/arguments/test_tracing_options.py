"""Where traces go, by an option or by OpenTelemetry's variables."""

from __future__ import annotations

import sys

import pytest

from tllm.cli.arguments.tracing_options import check_tracing, default_endpoint
from tllm.core.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, "http://a:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a/prefix/"}, "http://a/prefix/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/own"}, "http://b/own"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_the_variables_mean_what_opentelemetry_says(variables: dict[str, str], endpoint: str) -> None:
    assert default_endpoint(variables) == endpoint


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://a:4317", "http://"])
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a collector"):
        check_tracing(endpoint)


def test_a_library_that_is_missing_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tllm.server.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="needs OpenTelemetry's packages") as caught:
        check_tracing("http://127.0.0.1:4318")
    assert caught.value.hint == 'pip install "together-llm[otel]"'
    check_tracing("")
