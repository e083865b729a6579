"""Give this machine to a cluster: run the line that `tllm serve --nodes N` printed, and leave it running.

It gets its part of the model assigned, reads only the bytes of that part, and computes until the cluster ends. Bytes
that it lacks come from the Hugging Face hub, if the model was given by its name there, else from whichever node has
them. They are kept in a folder for the next time and for other nodes. If the coordinator's process dies, this node may
take its place (`--replicas-of-coordinator` of `tllm serve` and `tllm train`). A training run is then followed from
here: its lines come on this terminal, with --page PORT on a page too, and the first Ctrl-C saves and ends it. Where the
run's job says so (`teacher_nodes`, `rollout_nodes`), the node teaches or samples and has no part of the model that is
trained.

The exit code is 0 when the work has come to its end, and 130 where it goes on another time: a training run was told to
end before its last step.

Ctrl-C or SIGTERM: the node takes no new HTTP requests, lets those in hand end, and leaves; the others go on. The exit
code is then 0 with an HTTP server, and 130 without one. A second one ends it at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tllm.cli.arguments.http_options import add_http, http_settings
from tllm.cli.arguments.model_argument import CACHE_BYTES, add_weights_cache, size_or_none
from tllm.cli.arguments.node_sources import TOKEN_VARIABLE, given_token
from tllm.cli.arguments.options import add_device
from tllm.cli.arguments.parser import address, count, size, user_path_text, whole
from tllm.cli.arguments.run_page_options import add_page, page_settings
from tllm.cli.arguments.tracing_options import add_tracing, check_tracing, tracing_at
from tllm.cli.display.logs import start_log
from tllm.cli.planning.followed_run import successors
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed
from tllm.core.cache_folder import cache_folder
from tllm.core.errors import INTERRUPTED, ConfigError
from tllm.node.front_end.departure import Departure
from tllm.node.front_end.server_loop import ServerLoop
from tllm.node.machine.process_facts import WILDCARDS
from tllm.node.replication.known_replicas import REPLICAS_FILE
from tllm.server.http.settings import ServerSettings
from tllm.server.run import bind
from tllm.server.tracing.tracing import no_tracing

if TYPE_CHECKING:
    from tllm.node.replication.coordinated_elsewhere import RunningCluster

SECRET_VARIABLE = "TLLM_SECRET"
REJOIN_SECONDS = 300
"""More than a home router or a machine takes to start again, which is one to three minutes."""

NOTHING_ASKED = ServerSettings(version="")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("coordinator", type=address, metavar="HOST:PORT", help="where the coordinator listens")
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"the join token (- reads it from stdin; or the variable {TOKEN_VARIABLE}, or {SECRET_VARIABLE})",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="of this node (made from the machine's name)")
    parser.add_argument(
        "--listen", default="", metavar="HOST", help="address of this machine that other nodes reach (found out)"
    )
    parser.add_argument("--threads", type=whole, default=0, metavar="N", help="to compute with (all cores)")
    parser.add_argument(
        "--wait",
        type=whole,
        default=0,
        metavar="SECONDS",
        help="for a coordinator that does not listen yet, at most so long (%(default)s)",
    )
    parser.add_argument(
        "--rejoin",
        type=count,
        default=REJOIN_SECONDS,
        metavar="SECONDS",
        help="look for a coordinator that is lost for so long, keeping the weights (%(default)s)",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="that the cluster may use of this machine's: 12GiB (all of it)"
    )
    add_device(parser)
    parser.add_argument(
        "--cache-dir",
        type=user_path_text,
        default=str(cache_folder("pages")),
        metavar="FOLDER",
        help="keep pages of the cache there, where the server was told to keep them on disk (%(default)s)",
    )
    parser.add_argument(
        "--cache-dir-size", type=size_or_none, default=CACHE_BYTES, metavar="SIZE", help="of these, at most (32GiB)"
    )
    add_weights_cache(parser, "weights that come from other nodes or the hub, to pass them on,")
    http = parser.add_argument_group("HTTP")
    http.add_argument("--serve", action="store_true", help="answer HTTP requests here too, as the first machine does")
    add_http(http)
    add_tracing(http)
    add_page(parser.add_argument_group("page"), "of a training run, if this node comes to coordinate one,")
    parser.add_argument(
        "--quiet", action="store_true", help="only warnings and errors on stderr; no line for each step"
    )


def run(args: argparse.Namespace) -> int:
    token = given_token(args)
    if not token and not os.environ.get(SECRET_VARIABLE):
        raise ConfigError("there is no join token", "copy the whole line that the coordinator printed")
    http, page = _http(args), page_settings(args)
    if page is not None:
        page.check()
        bind(page.host, page.port).close()
    start_log(args.debug, args.quiet)
    from tllm.cluster.certificates import Identity
    from tllm.cluster.join_token import JoinToken
    from tllm.comm.c10d.secret import secret_from_environment

    if token:
        JoinToken.parse(token)
    # Loads torch, so it waits until the line is known to make sense.
    from tllm.node.replication.replica_host import JoinedReplica
    from tllm.node.worker import WorkerSettings, work

    every, training = successors(page, args.quiet)

    def make_replica(identity: Identity, host: str) -> JoinedReplica:
        return JoinedReplica(identity, host, every, (args.weights_cache, args.weights_cache_size))

    host, port = args.coordinator
    if not token:
        secret = secret_from_environment(os.environ)
        assert secret is not None, "there is one"
        token = str(JoinToken.of_secret(secret))
    settings = WorkerSettings(
        host=host,
        port=port,
        token=token,
        node=args.name,
        listen=args.listen,
        threads=args.threads,
        wait=args.wait,
        rejoin=args.rejoin,
        weights_cache=args.weights_cache,
        weights_cache_bytes=args.weights_cache_size,
        memory=args.memory,
        cache_dir=args.cache_dir,
        cache_dir_size=args.cache_dir_size,
        device=args.device,
    )
    departure = Departure(http, training.stop, tracing_at(args.otlp_endpoint))
    return 0 if departure.run(lambda: work(settings, departure.front_end, make_replica)) else INTERRUPTED


def join_again(
    args: argparse.Namespace, http: ServerSettings | None, page: ServerSettings | None, **own: Any
) -> int | None:
    """Be a node of the cluster that this command (`tllm serve` or `train` with --cluster-folder) began before and that
    another machine coordinates now, to its end: the exit code, None where there is none. `own` are fields of
    `WorkerSettings`."""
    if not (args.cluster_folder / REPLICAS_FILE).exists():
        return None
    start_log(args.debug, args.quiet)
    from tllm.comm.c10d.secret import secret_from_environment
    from tllm.node.replication.coordinated_elsewhere import running_cluster

    cluster = running_cluster(args.cluster_folder, secret_from_environment(os.environ))
    if cluster is None:
        return None
    return _be_node(args, cluster, (args.cluster_host, args.cluster_port), (http, page), own)


def join_successor(
    args: argparse.Namespace,
    deposed: Deposed,
    http: ServerSettings | None,
    page: ServerSettings | None,
    loop: ServerLoop | None = None,
    **own: Any,
) -> int:
    """Be a node of the cluster that this command began, after it was deposed by the machine that coordinates it now, to
    its end: the exit code. Raises the error again where no such machine was found. With a `loop` the HTTP server goes
    on in that of the one before it, and `own` are fields of `WorkerSettings`."""
    from tllm.node.replication.coordinated_elsewhere import Succeeded

    if not isinstance(deposed, Succeeded):
        raise deposed
    return _be_node(args, deposed.cluster, deposed.door, (http, page), own, loop)


def _be_node(
    args: argparse.Namespace,
    cluster: RunningCluster,
    door: Address,
    pages: tuple[ServerSettings | None, ServerSettings | None],
    own: Mapping[str, Any],
    loop: ServerLoop | None = None,
) -> int:
    """Be a node of a cluster that runs, with an HTTP server and a page of a run, each if there are settings for it;
    whoever comes to join at `door` is sent on."""
    from tllm.node.replication.rejoin import rejoin

    http, page = pages
    here = "" if args.cluster_host in WILDCARDS else args.cluster_host
    settings = dict(own, listen=here, threads=args.threads or 0, rejoin=REJOIN_SECONDS, memory=args.memory)
    every, training = successors(page, args.quiet)
    tracing = tracing_at(args.otlp_endpoint) if http is not None else no_tracing
    departure = Departure(http, training.stop, tracing, loop)
    return 0 if rejoin(cluster, door, departure, every, settings) else INTERRUPTED


def _http(args: argparse.Namespace) -> ServerSettings | None:
    """The settings of this node's HTTP server, if it is to have one; every fault in them shows here."""
    settings = http_settings(args)
    if args.serve:
        settings.check()
        check_tracing(args.otlp_endpoint)
        bind(settings.host, settings.port).close()
        return settings
    key = () if args.page is not None or not args.api_key else (args.api_key,)
    if dataclasses.replace(settings, api_keys=key, version="") != NOTHING_ASKED:
        raise ConfigError("options of an HTTP server are given, and this node is to have none", "add --serve")
    return None
