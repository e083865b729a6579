"""The application of a training run's page: it shows the run and takes nothing but questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from tllm.server.http.attended_request import Attended
from tllm.server.http.auth import PAGE_FILES, Guard, keys_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.query import number_of
from tllm.server.http.routed import Endpoint, json_reply, routed, routes
from tllm.server.http.settings import ServerSettings
from tllm.server.live.run_log import RunLog
from tllm.server.page.page_files import PageFiles


def build_run_app(log: RunLog, status: Callable[[], Mapping[str, Any]], settings: ServerSettings) -> ASGIApp:
    """`status` says how the cluster and the run are now, for `/v1/cluster`."""
    settings.check()

    async def cluster(http: HttpRequest) -> Response:
        return json_reply(status())

    async def live(http: HttpRequest) -> Response:
        return json_reply(log.report(number_of(http, "after"), number_of(http, "events_after")))

    async def health(http: HttpRequest) -> Response:
        return json_reply({"status": "ok"})

    page = PageFiles()
    get: dict[str, Endpoint] = {
        "/": page.index,
        PAGE_FILES + "{name}": page.file,
        "/health": health,
        "/v1/cluster": cluster,
        "/v1/training/live": live,
    }
    return Guard(Attended(routed(routes("GET", get)), settings), settings, Metrics("training"), keys_of(settings))
