"""Serve a model over HTTP with an OpenAI-compatible interface, from this machine or from several together.

--plan alone starts what it needs here. With --nodes N this machine is one of N: it prints the `tllm join` line that
each other one runs, and waits for them. --local N starts N worker processes here that act as N machines. Without --plan
the machines that came are measured, and the plan with which they are predicted to serve fastest is taken. Under srun
the first task is this machine, and the other tasks join it by themselves. With --on ray the ranks run on nodes of a Ray
cluster, and this process only brings them together and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tllm.api.engine_options import EngineOptions, check_device, read_spec
from tllm.api.open_engine import cluster_options, open_nodes
from tllm.cli.arguments.http_options import add_http, add_keep_streams, add_replies, http_settings
from tllm.cli.arguments.lora_arguments import adapters_of, add_lora, check_loras, served_loras
from tllm.cli.arguments.model_argument import add_weights_cache, resolve_model
from tllm.cli.arguments.node_sources import (
    add_on,
    be_first,
    from_elsewhere,
    from_ray,
    joining,
    launched_here,
)
from tllm.cli.arguments.options import (
    add_allow_mixed,
    add_cluster_address,
    add_engine,
    add_link,
    add_local,
    add_lost_after,
    add_memory,
    add_narrow_wire,
    add_on_loss,
    add_spare_nodes,
    engine_options,
    even_plan,
)
from tllm.cli.arguments.parser import user_path, whole
from tllm.cli.arguments.replica_count import add_replicas, replica_count
from tllm.cli.arguments.server_limits import add_server_limits, server_limits
from tllm.cli.arguments.survey_settings import serving_facts
from tllm.cli.arguments.tracing_options import add_tracing, check_tracing, tracing_at
from tllm.cli.commands.join import REJOIN_SECONDS, join_again, join_successor
from tllm.cli.display.logs import start_log
from tllm.cli.display.progress import ShowProgress, loading
from tllm.cli.planning.best_plans import add_load
from tllm.cli.planning.outcome import conclude_serving
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.cli.planning.serving_watch import ServingWatch
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.http_messages import ServedModel
from tllm.core.disk import print_line
from tllm.core.errors import ConfigError, PlanError, counted
from tllm.core.model_folders import model_name
from tllm.core.tasks import background, end_tasks, work_beside
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.front_end.lasting_engine import LastingEngine
from tllm.node.front_end.remote_engine import RemoteEngine, RemoteStreamStore
from tllm.node.front_end.server_loop import ServerLoop
from tllm.node.machine.launcher_env import Launched
from tllm.server.app import App, build_app
from tllm.server.http.auth import keys_of
from tllm.server.http.settings import ServerSettings
from tllm.server.latency import TimedEngine
from tllm.server.run import OpenReplies, bind, serve_http
from tllm.server.stored.stream_store import LocalStreamStore
from tllm.server.tracing.tracing import NodeSpan
from tllm.spec.lora.lora_config import ServedLoras
from tllm.text.chat_template import ChatTemplate
from tllm.text.generation_config import NOTHING, OWN, GenerationConfig
from tllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm.node.coordinator.coordinator import Coordinator
    from tllm.node.serve.serving import Serving

log = logging.getLogger("tllm.model")

TOLD_SECONDS = 1.0
"""How long requests have to end with what the cluster failed of, before those that wait for more are broken off."""

ALONE = "only this process answers HTTP, and Slurm or Ray ends the nodes with it"
"""Why no node of theirs could take over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    add_lora(parser.add_argument_group("LoRA adapters"))
    where = parser.add_argument_group("machines")
    number = where.add_mutually_exclusive_group()
    number.add_argument("--nodes", type=whole, metavar="N", help="serve from N machines, this one included")
    add_local(number)
    add_on(where)
    add_spare_nodes(where, ": in reserve for a loss, or only to answer HTTP")
    add_allow_mixed(where)
    add_narrow_wire(where)
    add_link(where)
    add_cluster_address(where)
    where.add_argument(
        "--cluster-folder",
        type=user_path,
        metavar="DIR",
        help="keep the cluster's authority, what was measured and who else knows its state: the same command finds its "
        "nodes again, or joins them where another machine coordinates meanwhile (no)",
    )
    where.add_argument(
        "--leave-out",
        choices=("auto", "never"),
        default="auto",
        help="without --plan: nodes with which it would be slower, or none (%(default)s)",
    )
    add_on_loss(where)
    add_lost_after(where)
    add_replicas(where, "the cluster")
    where.add_argument(
        "--replan",
        action="store_true",
        help="move to a plan that is faster when machines or links change; streams go on",
    )
    add_memory(where)
    add_weights_cache(where, "the parts that workers here fetched from the hub")
    add_load(parser)
    http = parser.add_argument_group("HTTP")
    add_http(http)
    add_replies(http)
    add_tracing(http)
    add_keep_streams(http)
    add_server_limits(parser)
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    settings.check()
    tasks = _tasks(args)
    is_first = tasks is None or tasks.rank == 0
    check_tracing(args.otlp_endpoint)
    if args.on != "ray":  # whose machines compute, and not this one
        check_device(args.device, tasks.local_rank if tasks is not None else 0)
    if is_first:
        # A busy port and a wrong file of keys show now, not when the model is fetched or loaded.
        bind(settings.host, settings.port).close()
        keys_of(settings)
    kept = dict(
        weights_cache=args.weights_cache,
        weights_cache_bytes=args.weights_cache_size,
        cache_dir=args.cache_dir or "",
        cache_dir_size=args.cache_dir_size,
        device=args.device,
    )
    may_return = tasks is None and args.nodes and args.cluster_folder
    if may_return and (code := join_again(args, settings, None, **kept)) is not None:
        return code
    ray, adapters = from_ray(args, args.spare_nodes), served_loras(args)
    resolve_model(args, "ranges" if args.nodes or args.local else "whole")
    options = _options(args)
    options.pooling()  # what is wrong with it shows now, and with adapters
    check_loras(adapters, options.spec)
    settings = dataclasses.replace(settings, generation_config=options.generation_config)
    start_log(args.debug, args.quiet)
    if options.generation_config.given:
        log.info("%s", _taken(args, options.generation_config))
    if tasks is not None and not is_first:
        _work(args, tasks)
        return 0
    tokenizer = Tokenizer.from_folder(args.model)
    template = _template(args, tokenizer)
    loop = ServerLoop()
    opening = _opening(args, options, (_served_model(options, settings, template), adapters), tasks, ray)
    try:
        return loop.runner.run(_serve(args, options, settings, (tokenizer, template), opening, loop))
    except Deposed as deposed:
        return join_successor(args, deposed, settings, None, loop, **kept)
    finally:
        loop.close_unless_taken()


class _Opening(NamedTuple):
    """How the cluster is opened, which may be of one rank, and what chooses its plan."""

    chooser: ServingChooser | None
    open: Callable[[ShowProgress], AbstractAsyncContextManager[Serving]]


def _opening(
    args: argparse.Namespace,
    options: EngineOptions,
    served: tuple[ServedModel, ServedLoras | None],
    tasks: Launched | None,
    ray: Mapping[str, Any] | None,
) -> _Opening:
    to_join = from_elsewhere(args)
    others = to_join + args.spare_nodes
    address = (args.cluster_host, args.cluster_port) if others else LOOPBACK
    chooser = _chooser(args, options)
    if args.replan and chooser is None:
        raise ConfigError(
            "--replan compares plans by what machines were measured to do, and these are not measured",
            "serve from several (--nodes, --local), without --plan or with --keep DIR",
        )
    choice = chooser.choice() if chooser else None
    where = dict(
        **(ray or joining(tasks, _meeting_folder(args))),
        address=address,
        authority=args.cluster_folder,
        spare_nodes=args.spare_nodes,
        replicas=replica_count(args.replicas_of_coordinator, args.nodes or 1, ALONE if tasks or ray else ""),
        successor_seconds=REJOIN_SECONDS,
        served=served[0],
        adapters=served[1],
    )

    def opening(on_progress: ShowProgress) -> AbstractAsyncContextManager[Serving]:
        cluster = cluster_options(options, to_join, on_progress=on_progress, **where)
        return open_nodes(options, cluster, policy=args.on_loss, choice=choice)

    return _Opening(chooser, opening)


async def _serve(
    args: argparse.Namespace,
    options: EngineOptions,
    settings: ServerSettings,
    text: tuple[Tokenizer | None, ChatTemplate | None],
    opening: _Opening,
    loop: ServerLoop,
) -> int:
    chooser = opening.chooser
    async with loading(args.quiet, opening.open) as serving:
        assert serving.served is not None, "the cluster was opened with it"
        # Its requests go on when this process coordinates no more.
        lasting = LastingEngine(serving, RemoteEngine(loop.link, serving.served))
        timed = TimedEngine(lasting)
        adapters = adapters_of(args, serving)
        app = build_app(timed, *text, settings, adapters=adapters, pooling=options.pooling())
        serving.open_to_nodes(app.router, _store_of(app), adapters)

        async def node_spans(traces: Collection[int]) -> Iterable[NodeSpan]:
            return serving.node_spans(traces)

        app.tracing = tracing_at(args.otlp_endpoint)(serving.model_name, node_spans)
        watch = ServingWatch(chooser, serving, timed, args.replan) if chooser else None
        async with watch.looking() if watch else nullcontext():
            loop.replies = await _answer(serving, app, lasting, loop)
        if app.tracing is not None and loop.replies is None:
            await app.tracing.close()
        if app.router.leaving:
            await serving.hand_over()
        if chooser and watch and watch.is_planned:
            conclude_serving(chooser, timed, _most_memory(serving.status()))
    return 0


def _store_of(app: App) -> LocalStreamStore:
    assert isinstance(app.store, LocalStreamStore), "the first machine runs its replies itself"
    return app.store


async def _answer(serving: Serving, app: App, lasting: LastingEngine, loop: ServerLoop) -> OpenReplies | None:
    """Answer HTTP requests until a signal comes, or nothing is served from here any more. What is in hand then, if
    another machine can go on with it."""
    stop = asyncio.Event()
    ending = background(_stop_with_cluster(serving, app, lasting, loop, stop), "the end of the server")
    try:
        return await serve_http(
            app,
            lambda url: print_line(f"serving {serving.model_name} at {url}/v1"),
            stop,
            leaves=lambda: serving.can_hand_over,
            lingers=lambda: _is_succeeded(serving),
        )
    finally:
        await end_tasks(ending)


def _is_succeeded(serving: Serving) -> bool:
    """Whether this process was deposed, and knows who coordinates now."""
    return isinstance(serving.fault, Deposed) and serving.fault.successor is not None


async def _stop_with_cluster(
    serving: Serving, app: App, lasting: LastingEngine, loop: ServerLoop, stop: asyncio.Event
) -> None:
    """Once nothing is served from here any more, refuse what is asked, and set `stop`. A process that was deposed
    refuses it until it knows where to join its cluster again, and keeps what is in hand until then; unless it is told
    to end (`stop`), as it would go on as a node."""
    await serving.ended.wait()
    fault, served, store = serving.fault, serving.served, _store_of(app)
    try:
        assert fault is not None, "it is why nothing is served"
        assert served is not None, "the cluster was opened with it"
        if isinstance(fault, Deposed):
            lasting.refuse(fault)
            store.refuse(fault, RemoteStreamStore(loop.link, served).rest)
            await _find_successor(serving.coordinator, fault, stop)
        else:
            store.refuse(fault)
            await asyncio.sleep(TOLD_SECONDS)
        if not _is_succeeded(serving):
            app.stop()
    finally:
        stop.set()


async def _find_successor(coordinator: Coordinator, deposed: Deposed, told: asyncio.Event) -> None:
    """Look for the process that coordinates now, until this one is told to end."""
    deposed.was_sought = True  # whoever is told to end here does not look again when the cluster is closed
    if told.is_set():
        return
    ending = asyncio.create_task(told.wait())
    try:
        await work_beside(ending, coordinator.find_successor(deposed, REJOIN_SECONDS))
    finally:
        await end_tasks(ending)


def _served_model(options: EngineOptions, settings: ServerSettings, template: ChatTemplate | None) -> ServedModel:
    """What every HTTP server of the cluster serves. The cluster says how long a sequence may be."""
    return ServedModel(
        model_name=model_name(options.folder),
        max_model_len=0,
        chat_template=template.source if template is not None else None,
        tool_template=template.tool_source if template is not None else None,
        model_aliases=settings.model_aliases,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        generation_config=settings.generation_config,
        started=settings.started,
        fingerprint=settings.fingerprint,
        pooling=msgspec.json.encode(options.pooling()),
        max_sequences=settings.max_sequences,
        request_seconds=settings.request_seconds,
        keep_streams=settings.keep_streams,
        keep_streams_bytes=settings.keep_streams_bytes,
    )


def _tasks(args: argparse.Namespace) -> Launched | None:
    """The tasks of srun of which this process is one; the first gets what `--nodes` and its like would say."""
    here = launched_here(args)
    if here is None or not here.is_elastic:
        return None
    be_first(args, here, args.spare_nodes)
    return here


def _work(args: argparse.Namespace, tasks: Launched) -> None:
    """Be a task other than the first until the cluster ends."""
    from tllm.node.sources.launched_tasks import PLAIN, compute_on, work_launched

    settings = msgspec.structs.replace(
        PLAIN,
        threads=args.threads,
        memory=args.memory,
        weights_cache=args.weights_cache,
        weights_cache_bytes=args.weights_cache_size,
        device=args.device,
        place=tasks.local_rank,
    )
    work_launched(tasks, _meeting_folder(args), os.environ, settings, on_signal=compute_on)


def _meeting_folder(args: argparse.Namespace) -> Path:
    """Where tasks of srun find the first one."""
    return args.cluster_folder or Path.cwd()


def _chooser(args: argparse.Namespace, options: EngineOptions) -> ServingChooser | None:
    """Where no plan is given for several nodes, what chooses it; with --keep, what predicts the one that there is."""
    nodes, is_given = args.nodes or args.local or 1, args.plan or options.plan.world_size == 1
    if is_given and not args.keep:
        return None
    facts = serving_facts(args, options.spec, options.dtype)
    # What was measured goes with the cluster, so that one that is started again need not measure anew.
    folder, given = args.keep or args.cluster_folder, options.plan if is_given else None
    return ServingChooser(options, facts, folder, nodes, given, args.leave_out == "auto")


def _most_memory(status: Mapping[str, Any]) -> int | None:
    """That any rank has held, as they last said."""
    return max((node["peak_bytes"] for node in status.get("nodes", ()) if node["rank"] is not None), default=None)


def _options(args: argparse.Namespace) -> EngineOptions:
    """The engine's options. With --plan, --nodes and --local must agree; alone they mean a stage on each, which is only
    a beginning: what is chosen when the nodes are here takes its place."""
    wanted = args.nodes or args.local or 1
    options = engine_options(args, args.plan or even_plan(wanted, read_spec(args.model).num_layers))
    ranks = options.plan.world_size
    if ranks < wanted or ((args.local or args.on == "ray") and ranks != wanted):
        raise PlanError(
            f"the plan {options.plan} has {counted(ranks, 'rank')} and "
            f"{'--nodes' if args.nodes else '--local'} is {wanted}",
            "give a plan with a rank for each, or leave --plan out for a stage on each",
        )
    return options


def _taken(args: argparse.Namespace, defaults: GenerationConfig) -> str:
    """Which defaults requests get, and, where nobody here chose them, that they are the model's."""
    values = ", ".join(f"{name} {value}" for name, value in defaults.given.items())
    is_own = args.generation_config == OWN and args.override_generation_config is None
    origin = f" (the model's own; --generation-config {NOTHING} serves without)" if is_own else ""
    return f"where a request does not say: {values}{origin}"


def _settings(args: argparse.Namespace) -> ServerSettings:
    return dataclasses.replace(
        http_settings(args),
        model_aliases=tuple(args.served_model_name),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        keep_streams=args.keep_streams,
        keep_streams_bytes=args.keep_streams_size,
        started=int(time.time()),
        **server_limits(args),
    )


def _template(args: argparse.Namespace, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if args.chat_template is None:
        return ChatTemplate.from_folder(args.model, tokenizer)
    if tokenizer is None:
        raise ConfigError(f"--chat-template needs a tokenizer and {args.model} has none", "leave it out")
    return ChatTemplate.from_file(args.chat_template, tokenizer)
