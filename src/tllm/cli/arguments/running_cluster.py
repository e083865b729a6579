"""A running cluster over HTTP, for the commands that ask it: the options that say where, and what it answers."""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tllm.cli.arguments.options import API_KEY_VARIABLE, add_api_key, api_key
from tllm.cli.arguments.parser import address, port
from tllm.core.errors import AuthError, ClusterError, ConfigError, TllmError
from tllm.server.http.opener import opener

SECONDS = 10.0
STATUS = "/v1/cluster"
HOST, PORT = "127.0.0.1", 8000
ALONE = "give HOST:PORT as `tllm serve` has printed it"
BY_OPTIONS = "give --host and --port as `tllm serve` has printed them"
"""What to do where the address may not stand alone."""

MOST_BYTES = 64 << 20
"""Of an answer, as whoever answers may be no server of ours. That of 10,000 nodes has 10 MB."""


def add_running_cluster(parser: argparse._ActionsContainer, when: str = "") -> None:
    """Where its server is; `when` says in the help with which option that is asked. Without it the address may also
    stand alone, as `tllm serve` prints it."""
    if not when:
        parser.add_argument(
            "server", nargs="?", type=server_address, metavar="HOST:PORT", help=f"of the server ({HOST}:{PORT})"
        )
    parser.add_argument("--host", metavar="HOST", help=f"{when}of the server ({HOST})")
    parser.add_argument("--port", type=port, metavar="PORT", help=f"{when}of the server ({PORT})")
    add_api_key(parser)


def server_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or the server's whole URL."""
    is_url = text.startswith("http://")
    return address(urllib.parse.urlsplit(text).netloc if is_url else text)


@dataclasses.dataclass(frozen=True)
class AskedServer:
    """The server that is asked, and how its address is given."""

    where: str
    hint: str

    def silent(self) -> ClusterError:
        """It says nothing."""
        return ClusterError(
            f"{self.where} did not answer within {SECONDS:g} s",
            "see whether a firewall lies between, whether that machine is well, and whether the address is right",
        )

    def closed(self) -> ClusterError:
        """It was there, and went away."""
        return ClusterError(
            f"{self.where} closed the connection without an answer",
            "it may have just ended, or be no HTTP server of tllm",
        )

    def another(self, why: str) -> ClusterError:
        """It is another program."""
        return ClusterError(f"{self.where} is no HTTP server of tllm: {why}", f"{self.hint}, not that of `tllm join`")


def asked_server(args: argparse.Namespace) -> AskedServer:
    """The one that the options name. ConfigError where they name two."""
    alone, host, number = getattr(args, "server", None), args.host, args.port
    if alone is not None and (host is not None or number is not None):
        raise ConfigError(
            "the server is given as HOST:PORT and by --host or --port, too", "leave out one of the two ways"
        )
    host, number = alone or (HOST if host is None else host, PORT if number is None else number)
    where = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    return AskedServer(where, ALONE if hasattr(args, "server") else BY_OPTIONS)


def fetch(args: argparse.Namespace, path: str = STATUS) -> dict[str, Any]:
    """What a path answers. ClusterError where nobody answers, or another program; AuthError for a wrong key or none."""
    server, key = asked_server(args), _sendable(api_key(args))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        url = f"http://{server.where}{path}"
        with opener(url).open(urllib.request.Request(url, headers=headers), timeout=SECONDS) as reply:
            body = reply.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(server, key, error) from error
    except TimeoutError as error:
        raise server.silent() from error
    except (http.client.RemoteDisconnected, http.client.IncompleteRead) as error:
        raise server.closed() from error
    except (http.client.InvalidURL, ValueError) as error:  # the key was looked at before
        raise ConfigError(f"{server.where!r} is no address of a server", server.hint) from error
    except http.client.HTTPException as error:
        raise server.another("it does not speak HTTP") from error
    except OSError as error:
        raise _unreached(server, error) from error
    try:
        found = json.loads(body)
    except ValueError as error:
        raise server.another(f"it answers {path} with something else than JSON") from error
    if not isinstance(found, dict) or (path == STATUS and "ready" not in found):
        raise server.another(f"it answers {path} with {_shown(found)}")
    return found


def _sendable(key: str | None) -> str | None:
    """A key, if a header of HTTP can hold it. The ConfigError does not show it."""
    if key is not None and not (key.isprintable() and all(ord(character) < 256 for character in key)):
        raise ConfigError(
            "the API key has a character that no HTTP header holds, such as an end of line",
            f"give the server's key alone in {API_KEY_VARIABLE} or with --api-key: Latin letters, digits and signs",
        )
    return key


def _unreached(server: AskedServer, error: OSError) -> ClusterError:
    """What it means that a connection failed."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return server.silent()
    if isinstance(reason, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        return server.closed()
    return ClusterError(f"no server at {server.where}: {getattr(reason, 'strerror', None) or reason}", server.hint)


def _refusal(server: AskedServer, key: str | None, error: urllib.error.HTTPError) -> TllmError:
    """What an answer other than 200 means."""
    try:
        said = json.loads(error.read(1 << 16))
        message = said["error"]["message"] if isinstance(said, dict) else None
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        message = None
    if error.code == 401:
        hint = f"give one with --api-key, or better in the variable {API_KEY_VARIABLE}"
        if key is None:
            return AuthError(f"the server at {server.where} asks for an API key, and none was given", hint)
        return AuthError(f"the server at {server.where} does not take the API key that was given", hint)
    if error.code >= 500 and not isinstance(message, str):
        return ClusterError(
            f"{server.where} answers {error.code} {error.reason}", "see its log, or that of a proxy before it"
        )
    if error.code == 404 or not isinstance(message, str):
        return server.another(f"it answers {error.code} {error.reason}")
    if error.code == 403:
        return AuthError(f"the server at {server.where} refuses: {message}")
    return ClusterError(f"the server at {server.where} answers {error.code}: {message}", "see its log")


def _shown(found: object) -> str:
    text = json.dumps(found)
    return text if len(text) <= 60 else text[:60] + "…"
