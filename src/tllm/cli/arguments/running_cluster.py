"""A running cluster over HTTP, for the commands that ask it: the options that say where, and what it answers."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from tllm.cli.arguments.options import add_api_key, api_key
from tllm.cli.arguments.parser import port
from tllm.core.errors import AuthError, ClusterError

SECONDS = 10.0
STATUS = "/v1/cluster"


def add_running_cluster(parser: argparse._ActionsContainer, when: str = "") -> None:
    """Where its server is; `when` says in the help with which option that is asked."""
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=f"{when}of the server (%(default)s)")
    parser.add_argument("--port", type=port, default=8000, metavar="PORT", help=f"{when}of the server (%(default)s)")
    add_api_key(parser)


def fetch(args: argparse.Namespace, path: str = STATUS) -> dict[str, Any]:
    """What a path answers. ClusterError where nobody answers, AuthError where the key is wrong."""
    host, key = args.host, api_key(args)
    where = f"[{host}]:{args.port}" if ":" in host else f"{host}:{args.port}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"http://{where}{path}", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise AuthError(
                f"the server at {where} wants another API key", "give --api-key, or TLLM_API_KEY"
            ) from error
        raise ClusterError(f"the server at {where} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise ClusterError(f"no server at {where}: {reason}", "give --host and --port of `tllm serve`") from error
    if not isinstance(found, dict) or (path == STATUS and "ready" not in found):
        raise ClusterError(
            f"the server at {where} is no tllm: {path} answers {str(found)[:60]}",
            "give --host and --port of `tllm serve`",
        )
    return found
