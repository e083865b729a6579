"""Reading what a running cluster answers over HTTP, for the commands that ask it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from tllm.core.errors import AuthError, ClusterError

SECONDS = 10.0


def fetch(host: str, port: int, key: str | None, path: str = "/v1/cluster") -> dict[str, Any]:
    """What a path answers. ClusterError where nobody answers, AuthError where the key is wrong."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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
        raise ClusterError(f"no server at {where}: {reason}", "give --host and --port of `tllm serve`") from error
    assert isinstance(found, dict)
    return found
