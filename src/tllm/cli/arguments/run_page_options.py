"""`--page`: where a training run is shown while it runs."""

from __future__ import annotations

import argparse
from argparse import _ActionsContainer

from tllm.cli.arguments.options import api_key
from tllm.cli.arguments.parser import port
from tllm.server.http.settings import ServerSettings


def add_page(parser: _ActionsContainer, which: str) -> None:
    """The options of the page, without that of its key; `which` says of which run."""
    parser.add_argument("--page", type=port, metavar="PORT", help=f"show a page {which} there (no)")
    parser.add_argument("--page-host", default="127.0.0.1", metavar="HOST", help="address of the page (%(default)s)")


def page_settings(args: argparse.Namespace) -> ServerSettings | None:
    """The settings of the page's server, if there is to be one."""
    if args.page is None:
        return None
    key = api_key(args)
    return ServerSettings(host=args.page_host, port=args.page, api_keys=(key,) if key else ())
