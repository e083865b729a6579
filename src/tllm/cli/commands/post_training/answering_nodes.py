"""`tllm teach` and `tllm rollout` over several machines, or over processes here: options, and the cluster for them."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm.cli.arguments.model_argument import add_weights_cache
from tllm.cli.arguments.node_sources import joining
from tllm.cli.arguments.options import (
    add_allow_mixed,
    add_cluster_address,
    add_local,
    add_lost_after,
    add_memory,
    add_on_loss,
    add_spare_nodes,
)
from tllm.cli.arguments.parser import user_path, whole
from tllm.cli.commands.post_training.answering_load import asked_load, named_load
from tllm.cli.display.progress import ShowProgress, loading
from tllm.cli.planning.answering_chooser import AnsweringChooser, tell_answers
from tllm.cli.planning.outcome import conclude_answering
from tllm.cluster.heartbeat import check_lost_after
from tllm.core.errors import ConfigError, PlanError, counted
from tllm.core.tasks import background, end_tasks
from tllm.hub.locate import locate
from tllm.hub.repository import HubWeights
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.spec.plan import Plan
from tllm.spec.plan_text import rank_count
from tllm.spec.process_groups import RoleName

if TYPE_CHECKING:
    from tllm.node.serve.answering_cluster import Answerers, AnsweringCluster
    from tllm.spec.model_spec import ModelSpec

Say = Callable[["ModelSpec", tuple[str, int]], None]
"""say(the model, the address that runs reach): called once it answers"""


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """The options of `tllm serve --nodes`, as far as they are about machines and not about requests."""
    where = parser.add_argument_group("machines")
    number = where.add_mutually_exclusive_group()
    number.add_argument("--nodes", type=whole, metavar="N", help="N machines hold the model, this one included")
    add_local(number)
    where.add_argument(
        "--plan", metavar="PLAN", help="by which they divide it: pp=2, tp=2 (what is predicted to be fastest)"
    )
    where.add_argument(
        "--leave-out",
        choices=("auto", "never"),
        default="auto",
        help="without --plan: nodes with which it would be slower, or none (%(default)s)",
    )
    add_spare_nodes(where, ", in reserve for a loss")
    add_allow_mixed(where)
    add_cluster_address(where)
    where.add_argument(
        "--cluster-folder",
        type=user_path,
        metavar="DIR",
        help="keep the cluster's authority, and what was measured and predicted: the same command with the same "
        "--cluster-port finds its nodes again (no)",
    )
    add_on_loss(where)
    add_lost_after(where)
    add_memory(where)
    add_weights_cache(where, "the parts that workers here fetched from the hub")


def has_nodes(args: argparse.Namespace) -> bool:
    """Whether several processes are to hold the model. ConfigError for options that are for these alone."""
    if args.nodes or args.local or args.plan:
        if args.plan and (named := named_load(args)):
            raise ConfigError(f"{named[0]} is what a plan is chosen by, and --plan gives one", "leave one of them out")
        if (args.nodes or args.local) == 1 and not args.plan and (named := named_load(args)):
            raise ConfigError(
                f"{named[0]} is what a plan is chosen by, and one node has none to choose",
                f"leave it out, or give {'--nodes' if args.nodes else '--local'} 2 or more",
            )
        return True
    given = {
        **dict.fromkeys(named_load(args), True),
        "--spare-nodes": args.spare_nodes,
        "--cluster-port": args.cluster_port,
        "--cluster-folder": args.cluster_folder,
        "--memory": args.memory,
        "--allow-mixed": args.allow_mixed,
        "--on-loss": args.on_loss != "replan",
    }
    if named := [name for name, value in given.items() if value]:
        raise ConfigError(f"{named[0]} is for a model that several processes hold", "give --nodes N with it")
    return False


def answer_over_nodes(args: argparse.Namespace, role: RoleName, say: Say) -> int:
    """Answer until Ctrl-C or SIGTERM. What is wrong with the options shows before anybody is waited for."""
    check_lost_after(args.lost_after)
    answerers = _answerers(args, role, (args.host, args.port))
    to_join = args.nodes - 1 if args.nodes else 0
    here = answerers.plan.world_size - to_join
    options: dict[str, Any] = dict(
        **joining(None, Path()),
        local=here,
        threads=args.threads or 0,
        address=(args.cluster_host, args.cluster_port) if to_join or args.spare_nodes else LOOPBACK,
        authority=args.cluster_folder,
        spare_nodes=args.spare_nodes,
        allow_mixed=args.allow_mixed,
        lost_after=args.lost_after,
        memory=args.memory,
        device=getattr(args, "device", "cpu"),
    )
    nodes = args.nodes or args.local or 1
    chooser: AnsweringChooser | None = None
    if not args.plan and nodes > 1:
        load = asked_load(args, role, answerers.model.spec)
        chooser = AnsweringChooser(answerers, load, ClusterOptions(**options), nodes, args.leave_out == "auto")
    return asyncio.run(_answer(args, answerers, options, say, chooser))


def _answerers(args: argparse.Namespace, role: RoleName, address: tuple[str, int]) -> Answerers:
    """What is to answer. PlanError where --plan and --nodes do not agree."""
    from tllm.node.serve.answering_cluster import Answerers
    from tllm.training.questions.answering_model import AnsweringModel

    # A policy's files are compared with those of a run that trains an adapter.
    found = locate(args.model, "ranges" if role == "teacher" else "whole")
    model = AnsweringModel.find_causal(str(found.path), *LACKS[role])
    wanted = args.nodes or args.local or 1
    if args.plan:
        rank_count(args.plan)  # what one copy of a model cannot be divided by
    # Without --plan this one only says how many nodes are waited for: the chooser takes another.
    plan = Plan.parse(args.plan or f"tp={wanted}", model.spec.num_layers)
    if plan.world_size < wanted or (args.local and plan.world_size != wanted):
        raise PlanError(
            f"the plan {plan} has {counted(plan.world_size, 'rank')} and "
            f"{'--nodes' if args.nodes else '--local'} is {wanted}",
            "give a plan with a rank for each, or leave --plan out: one is chosen by what is measured",
        )
    hub = None
    if found.weights is not None:
        hub = HubWeights(found.weights, args.weights_cache, args.weights_cache_size)
    return Answerers(role, args.model, model, plan, address, args.secret, getattr(args, "dtype", ""), hub)


async def _answer(
    args: argparse.Namespace, answerers: Answerers, options: dict[str, Any], say: Say, chooser: AnsweringChooser | None
) -> int:
    from tllm.node.serve.answering_cluster import open_answering

    choice = None if chooser is None else chooser.choice()

    def opening(on_progress: ShowProgress) -> AbstractAsyncContextManager[AnsweringCluster]:
        return open_answering(answerers, ClusterOptions(**options, on_progress=on_progress), args.on_loss, choice)

    async with loading(args.quiet, opening) as cluster:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        say(answerers.model.spec, answerers.address)
        stopping = asyncio.create_task(stopped.wait())
        telling = [] if chooser is None else [background(tell_answers(chooser, cluster), "prediction beside answers")]
        await asyncio.wait((stopping, cluster.failed), return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(stopping, *telling)
        if chooser is not None:
            conclude_answering(chooser, *cluster.answered())
        if cluster.failed.done():
            raise cluster.failed.result()
    return 0


LACKS = {
    "teacher": ("gives no next token", "take a causal language model as the teacher"),
    "rollout": ("writes nothing", "take the causal language model that the run trains"),
}
"""What a model without a head for tokens cannot do, and what to do then."""
