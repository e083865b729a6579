"""An application of Ray Serve whose replicas are whole clusters: `serve run tllm.cli.ray_serve:app model=ORG/NAME`.

A replica is an actor that runs `tllm serve` as its child and passes on to it what Serve gives it, replies as streams
included. So a route, an option or a reply is what it is without Ray. Run as a program (`python -m tllm.cli.ray_serve`)
this is that child: it ends when its stdin closes, as it does when the actor has ended, in whatever way.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import tllm
from tllm.cli.arguments.options import API_KEY_VARIABLE
from tllm.cli.arguments.parser import option_of
from tllm.cli.main import main
from tllm.core.errors import ClusterError, ConfigError

LOOPBACK = "127.0.0.1"
SERVING = re.compile(r"^serving .* at (http://\S+)/v1$")
OURS = ("host", "port", "on")
"""Options of `tllm serve` that a replica gives itself."""

ON_BY_ITSELF = ("enable_prefix_caching",)
"""Those that are on unless they are told otherwise, for which false says something."""

ON_RAY = ("--on", "ray")
TAIL_LINES = 20
LINE_BYTES = 2**24
HEALTH_SECONDS = 10.0
END_SECONDS = 40.0
"""`tllm serve` lets requests end for 30 s, and then its nodes."""

ONGOING = 1024
"""Requests that Serve gives to a replica at once: how many are computed, wait or are refused is decided there."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
"""Headers that are of one connection only (RFC 9110, 7.6.1)."""


def app(args: Mapping[str, Any]) -> Any:
    """The application, as `serve run` and a config file of Serve ask for it, with their arguments.

    `model` is needed. `replicas` (1), `num_cpus` and `num_gpus` are Serve's: how many clusters, and how many processors
    and GPUs of Ray each takes on the node of its actor. Each other argument is an option of `tllm serve`, in its words:
    `plan="pp=2"`, `max_model_len=4096`, true for one without a value, a list for one that may be repeated. With `nodes`
    the ranks of each replica run on as many nodes of the Ray cluster (`--on ray`), and its actor takes no processor;
    without, on the actor's node. ConfigError for arguments that do not go together, or where ray[serve] is not
    installed.
    """
    try:
        serve: Any = importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(
            f"an application of Ray Serve needs ray[serve], and it cannot be loaded: {error}",
            'pip install "together-llm[ray-serve]"',
        ) from error
    words = serve_words(args)
    deployment = serve.deployment(
        ServedCluster,
        name="tllm",
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=END_SECONDS + 5,
        health_check_timeout_s=HEALTH_SECONDS + 5,
        ray_actor_options={
            "num_cpus": float(args.get("num_cpus", 0 if "nodes" in args else 1)),
            "num_gpus": float(args.get("num_gpus", 0)),
        },
    )
    return deployment.bind(words, bool(os.environ.get(API_KEY_VARIABLE)))


def serve_words(args: Mapping[str, Any]) -> list[str]:
    """The words after `tllm serve` that an application's arguments mean."""
    if not args.get("model"):
        raise ConfigError("the application has no model", "serve run tllm.cli.ray_serve:app model=ORG/NAME")
    if given := [name for name in OURS if name in args]:
        raise ConfigError(
            f"{given[0]} is what a replica gives itself",
            "Ray Serve has its own host and port; with nodes the ranks run on nodes of the Ray cluster",
        )
    if "api_key" in args:
        raise ConfigError(
            "api_key would stand in lists of processes and in Serve's config",
            f"give api_keys_file, or {API_KEY_VARIABLE} in the environment of Ray's nodes",
        )
    words = [str(args["model"])]
    for name, value in args.items():
        if name in ("model", "replicas", "num_cpus", "num_gpus"):
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True or one == "true":
                words.append(option_of(name))
            elif one is False or one == "false":
                words += [option_of(f"no_{name}")] if name in ON_BY_ITSELF else []
            else:
                words += [option_of(name), json.dumps(one) if isinstance(one, Mapping) else str(one)]
    return [*words, *ON_RAY] if "nodes" in args else words


class ServedCluster:
    """One cluster, which answers HTTP on this machine alone, and what Serve asks of it."""

    async def __init__(self, words: Sequence[str], has_key: bool = False) -> None:  # type: ignore[misc]  # awaited
        """ClusterError with its last words where it ends before it serves. ConfigError where the application `has_key`
        from its environment and this process, which has that of its node, has none."""
        if has_key and not os.environ.get(API_KEY_VARIABLE):
            raise ConfigError(
                f"{API_KEY_VARIABLE} is set where the application was made, and not on this node of Ray",
                "set it where `ray start` runs, or by a runtime_env, or give api_keys_file",
            )
        httpx: Any = importlib.import_module("httpx2")
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        source = str(Path(tllm.__file__).parents[1])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tllm.cli.ray_serve", *words, "--host", LOOPBACK, "--port", "0"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES,
            env={**os.environ, "PYTHONPATH": path, **_own_cluster(words)},
        )
        self._watch = asyncio.create_task(self._follow(), name="tllm serve")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)  # how many there are Serve decides
        self._client = httpx.AsyncClient(base_url=await self._serving, timeout=None, limits=limits, trust_env=False)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its reply back as it comes; a client that goes away ends it there too."""
        scope = request.scope
        path = quote(scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")))
        asked = self._client.build_request(
            request.method,
            path,
            params=request.query_params.multi_items(),
            headers=_end_to_end(request.headers.raw),
            content=await request.body(),
        )
        reply = await self._client.send(asked, stream=True)
        passed = StreamingResponse(_pieces(reply), reply.status_code)
        passed.raw_headers = _end_to_end(reply.headers.raw)
        return passed

    async def check_health(self) -> None:
        """ClusterError where the cluster has ended, or does not answer, or has work in hand and takes no step: Serve
        then puts another replica in this one's place."""
        if self._process.returncode is not None:
            raise self._ended()
        reply = await self._client.get("/health/progress", timeout=HEALTH_SECONDS)
        if reply.status_code != 200:
            raise ClusterError(f"tllm serve is not well: {reply.text}", "see the log of this replica")

    async def __del__(self) -> None:
        """Let it end in order; Serve has let requests end before."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_SECONDS):
                await asyncio.shield(self._watch)
        except TimeoutError:
            self._process.kill()

    async def _follow(self) -> None:
        """Read what it prints, into the log of the replica, until it ends."""
        assert self._process.stdout is not None
        while line := await self._next_line(self._process.stdout):
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            print(text, file=sys.stderr, flush=True)
            if (found := SERVING.match(text)) and not self._serving.done():
                self._serving.set_result(found[1])
        await self._process.wait()
        if not self._serving.done():
            self._serving.set_exception(self._ended())

    async def _next_line(self, stdout: asyncio.StreamReader) -> bytes:
        while True:
            with contextlib.suppress(ValueError):  # longer than any line of ours: the reader has dropped it
                return await stdout.readline()

    def _ended(self) -> ClusterError:
        last = next((line for line in reversed(self._tail) if line), "it said nothing")
        how = f"tllm serve ended with exit code {self._process.returncode}"
        return ClusterError(f"{how}: {last}", "\n".join(self._tail))


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in HOP_BY_HOP]


async def _pieces(reply: Any) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(reply):
        async for piece in reply.aiter_raw():
            yield piece


def _own_cluster(words: Sequence[str]) -> dict[str, str]:
    """Which Ray cluster the ranks are to be placed in: this actor's."""
    if tuple(words[-len(ON_RAY) :]) != ON_RAY or "--ray-address" in words:
        return {}
    ray: Any = importlib.import_module("ray")
    return {"RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1024):  # past the buffer, which Python wants for itself at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
