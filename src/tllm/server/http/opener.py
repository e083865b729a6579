"""`opener`: what asks another HTTP server, and keeps the key that goes with a question from everybody else."""

from __future__ import annotations

import urllib.parse
import urllib.request

from tllm.server.http.settings import is_loopback


def opener(url: str) -> urllib.request.OpenerDirector:
    """What asks the server at `url`; ValueError for what is none. By the environment's proxy (`http_proxy`), unless it
    is on this machine, where a proxy would find itself, and see the key. It follows no redirect: urllib would take the
    key along, and leave what was asked behind."""
    is_here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
    found = urllib.request.OpenerDirector()
    found.add_handler(urllib.request.ProxyHandler({} if is_here else None))
    found.add_handler(urllib.request.HTTPHandler())
    found.add_handler(urllib.request.HTTPSHandler())
    found.add_handler(urllib.request.HTTPErrorProcessor())
    found.add_handler(urllib.request.HTTPDefaultErrorHandler())
    return found
