"""A running cluster over HTTP, for the commands that ask it: the options that say where, and what it answers."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tllm.cli.arguments.options import API_KEY_VARIABLE, add_api_key, api_key
from tllm.cli.arguments.parser import address, port
from tllm.core.errors import AuthError, ClusterError, TllmError

SECONDS = 10.0
STATUS = "/v1/cluster"
WHERE = "give HOST:PORT as `tllm serve` has printed it"
MOST_BYTES = 64 << 20
"""Of an answer, as whoever answers may be no server of ours. That of 10,000 nodes has 10 MB."""


def add_running_cluster(parser: argparse._ActionsContainer, when: str = "") -> None:
    """Where its server is; `when` says in the help with which option that is asked. Without it the address may also
    stand alone, as `tllm serve` prints it."""
    if not when:
        parser.add_argument(
            "server", nargs="?", type=server_address, metavar="HOST:PORT", help="of the server (127.0.0.1:8000)"
        )
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=f"{when}of the server (%(default)s)")
    parser.add_argument("--port", type=port, default=8000, metavar="PORT", help=f"{when}of the server (%(default)s)")
    add_api_key(parser)


def server_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or the server's whole URL."""
    is_url = text.startswith("http://")
    return address(urllib.parse.urlsplit(text).netloc if is_url else text)


def fetch(args: argparse.Namespace, path: str = STATUS) -> dict[str, Any]:
    """What a path answers. ClusterError where nobody answers, or another program; AuthError for a wrong key or none."""
    host, number = getattr(args, "server", None) or (args.host, args.port)
    where = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    key = api_key(args)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"http://{where}{path}", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as reply:
            body = reply.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(where, key, error) from error
    except TimeoutError as error:
        raise _silent(where) from error
    except http.client.HTTPException as error:  # including that it closed without a word
        raise _another(where, "it does not speak HTTP") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise _silent(where) from error
        if isinstance(reason, ConnectionResetError):
            raise _another(where, "it does not speak HTTP") from error
        raise ClusterError(f"no server at {where}: {getattr(reason, 'strerror', None) or reason}", WHERE) from error
    try:
        found = json.loads(body)
    except ValueError as error:
        raise _another(where, f"it answers {path} with something else than JSON") from error
    if not isinstance(found, dict) or (path == STATUS and "ready" not in found):
        raise _another(where, f"it answers {path} with {_shown(found)}")
    return found


def _refusal(where: str, key: str | None, error: urllib.error.HTTPError) -> TllmError:
    """What an answer other than 200 means."""
    try:
        said = json.loads(error.read(1 << 16))
        message = said["error"]["message"] if isinstance(said, dict) else None
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        message = None
    if error.code == 401:
        hint = f"give one with --api-key, or better in the variable {API_KEY_VARIABLE}"
        if key is None:
            return AuthError(f"the server at {where} asks for an API key, and none was given", hint)
        return AuthError(f"the server at {where} does not take the API key that was given", hint)
    if error.code == 404 or not isinstance(message, str):
        return _another(where, f"it answers {error.code} {error.reason}")
    if error.code == 403:
        return AuthError(f"the server at {where} refuses: {message}")
    return ClusterError(f"the server at {where} answers {error.code}: {message}", "see its log")


def _silent(where: str) -> ClusterError:
    return ClusterError(
        f"{where} did not answer within {SECONDS:g} s",
        "see whether a firewall lies between, whether that machine is well, and whether the address is right",
    )


def _another(where: str, why: str) -> ClusterError:
    return ClusterError(f"{where} is no HTTP server of tllm: {why}", f"{WHERE}, not that of `tllm join`")


def _shown(found: object) -> str:
    text = json.dumps(found)
    return text if len(text) <= 60 else text[:60] + "…"
