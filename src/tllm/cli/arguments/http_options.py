"""Options of an HTTP server, the same for `tllm serve` and for a node that joins with `--serve`."""

from __future__ import annotations

import argparse

from tllm import __version__
from tllm.cli.arguments.options import add_api_key, add_generation_config, api_key
from tllm.cli.arguments.parser import count, port, size, user_path
from tllm.server.http.settings import ServerSettings
from tllm.server.reply.parser_choice import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS

DEFAULTS = ServerSettings()


def add_http(group: argparse._ActionsContainer) -> None:
    """Where it listens, and to whom it answers."""
    group.add_argument("--host", default=DEFAULTS.host, metavar="HOST", help="address to serve on (%(default)s)")
    group.add_argument(
        "--port", type=port, default=DEFAULTS.port, metavar="PORT", help="(%(default)s; 0: any free one)"
    )
    add_api_key(group)
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="one more name it is called by"
    )
    group.add_argument("--allow-origin", action="append", default=[], metavar="URL", help="a page that may call it")


def add_replies(group: argparse._ActionsContainer) -> None:
    """What the model is called, and what is made of its tokens."""
    group.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help="one more name for it")
    add_generation_config(group)
    group.add_argument("--chat-template", type=user_path, metavar="FILE", help="instead of the model's own")
    group.add_argument(
        "--pooler-config",
        metavar="JSON",
        help="how embeddings and scores are made, where the model's folder does not say or is wrong: "
        """'{"pooling_type": "MEAN", "normalize": true, "score_type": "embedding"}'""",
    )
    group.add_argument(
        "--tool-call-parser",
        default=AUTO,
        choices=(AUTO, NONE, *TOOL_PARSERS),
        metavar="NAME",
        help=f"how calls of tools are read: {', '.join(TOOL_PARSERS)}, {NONE}; {AUTO}: as the template has them",
    )
    group.add_argument(
        "--reasoning-parser",
        default=AUTO,
        choices=(AUTO, NONE, *REASONING_PARSERS),
        metavar="NAME",
        help=f"how reasoning is split off: {', '.join(REASONING_PARSERS)}, {NONE}, {AUTO} (%(default)s)",
    )


def add_keep_streams(group: argparse._ActionsContainer) -> None:
    """How long, and how much, is kept of replies that may be taken up again."""
    group.add_argument(
        "--keep-streams",
        type=count,
        default=int(DEFAULTS.keep_streams),
        metavar="SECONDS",
        help="keep replies that ask to be stored for so long after their end, to be taken up again (%(default)s; 0: "
        "keep none)",
    )
    group.add_argument(
        "--keep-streams-size",
        type=size,
        default=DEFAULTS.keep_streams_bytes,
        metavar="SIZE",
        help="of all of these together, at most (256MiB)",
    )


def http_settings(args: argparse.Namespace) -> ServerSettings:
    """What these options come to."""
    key = api_key(args)
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=(key,) if key else (),
        allowed_hosts=tuple(args.allow_host),
        allowed_origins=tuple(args.allow_origin),
        version=__version__,
    )
