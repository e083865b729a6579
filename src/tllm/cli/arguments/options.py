"""Options that several commands share, and the `EngineOptions` that they come to."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, cast, get_args

from tllm.api import engine_options as api_options
from tllm.api.engine_options import EngineArgs, EngineOptions
from tllm.cli.arguments.model_argument import add_model_argument
from tllm.cli.arguments.parser import count, nonempty, port, size, user_path_text, whole
from tllm.cluster.heartbeat import SILENCE_SECONDS
from tllm.cluster.settings import OUR_LINKS, IntraHost, LinkKind, Narrowing, Wiring
from tllm.core.errors import AuthError, PlanError, counted
from tllm.node.topology.numa_binding import NumaBinding
from tllm.planner.cost.cache_room import CACHE_DIR_BYTES, MAX_NUM_SEQS, PAGE_SIZE
from tllm.server.http.settings import is_loopback
from tllm.spec.quantized.cache_form import KVCacheDtype
from tllm.spec.speculative_config import read_speculative_config
from tllm.text.generation_config import KEYS, NOTHING, OWN

API_KEY_VARIABLE = "TLLM_API_KEY"
ACCEPTANCE = 0.3
"""Of drafted tokens, until a run has said how many were right: texts that quote their prompt have more, others less."""

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model folder, the plan and the dtype."""
    add_model_argument(parser)
    parser.add_argument(
        "--plan",
        default=None,
        metavar="PLAN",
        help="who holds what: pp=2,tp=2 (stages, ranks in each), tp=1+2 (each stage its own), layers=10+22 "
        "or 1+2*62+1 (layers of each stage), shares=1:3 (share of each rank), experts=spread, "
        "tensor=2d (both ways); or a JSON file",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of weights and cache (the checkpoint's own)")


def add_weight_form(parser: argparse.ArgumentParser) -> None:
    """How weights are held in memory, where not as the files keep them."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quantize", choices=("int8", "int4"), help="round plain weights while they are loaded")
    form.add_argument("--dequantize", action="store_true", help="hold quantised weights as plain numbers of --dtype")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """How much room sequences have."""
    group = parser.add_argument_group("room for sequences")
    group.add_argument("--page-size", type=whole, default=PAGE_SIZE, metavar="N", help="tokens in a page (%(default)s)")
    group.add_argument("--kv-cache-memory", type=size, metavar="SIZE", help="for keys and values, of each rank: 2GiB")
    add_kv_cache_dtype(group)
    group.add_argument("--max-model-len", type=whole, metavar="N", help="longest sequence (the model's own)")
    group.add_argument("--max-num-seqs", type=whole, default=MAX_NUM_SEQS, metavar="N", help="at once (%(default)s)")


def add_kv_cache_dtype(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="keys and values in one byte each, with a scale for each head and token; auto: as --dtype (%(default)s)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """All that a command which runs a model takes."""
    add_model(parser)
    add_weight_form(parser)
    add_cache(parser)
    add_speculation(parser)
    add_prefix_caching(parser)
    add_cache_dir(parser)
    parser.add_argument("--threads", type=whole, metavar="N", help="threads of each worker (cores / workers here)")
    add_device(parser)
    add_numa_binding(parser)


def add_numa_binding(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--numa-binding",
        choices=get_args(NumaBinding),
        default="auto",
        help="processors of each worker here: exclusive (cores of its own, on one NUMA node where there is room), node "
        "(those of its NUMA node), none (any), auto: exclusive on machines of several NUMA nodes (%(default)s)",
    )


def add_speculation(parser: argparse._ActionsContainer) -> None:
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--num-speculative-tokens",
        type=count,
        default=0,
        metavar="N",
        help="check up to N tokens at once that are looked up in the text so far, where that is faster; the reply is "
        "the same (%(default)s)",
    )
    drafts.add_argument(
        "--speculative-config",
        action=SpeculativeConfigAction,
        metavar="JSON",
        help="the same, with tokens that a small model drafts: "
        """'{"model": "FOLDER", "num_speculative_tokens": 5}'; also "method": "ngram", and "quantization" """
        "(int8, int4) of the draft model's plain weights",
    )


class SpeculativeConfigAction(argparse.Action):
    """Reads `--speculative-config`, which says `--num-speculative-tokens` too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        config = read_speculative_config(str(values))
        namespace.speculative_config = config
        namespace.num_speculative_tokens = config.num_speculative_tokens


def add_prefix_caching(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what was computed, for prompts that begin alike and for the next turn of a chat (yes)",
    )


def add_cache_dir(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cache-dir",
        type=user_path_text,
        default="",
        metavar="FOLDER",
        help="keep that on disk too, for after a restart, under other plans and after the loss of a node (no)",
    )
    parser.add_argument(
        "--cache-dir-size",
        type=size,
        default=CACHE_DIR_BYTES,
        metavar="SIZE",
        help="of what is kept on disk, on each machine; the longest unused is deleted (32GiB)",
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="to compute on here: auto, cpu, cuda, cuda:1 or xpu; without a number each process has its own "
        "(%(default)s)",
    )


def add_acceptance(parser: argparse._ActionsContainer, goal: str = "") -> None:
    parser.add_argument(
        "--acceptance",
        type=float,
        default=ACCEPTANCE,
        metavar="P",
        help=f"{goal}chance that a drafted token is right if those before it were (%(default)s)",
    )


def add_local(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--local", type=whole, metavar="N", help="N worker processes here, as if they were machines")


def add_spare_nodes(parser: argparse._ActionsContainer, purpose: str) -> None:
    """`purpose` says in the help what they are for."""
    parser.add_argument(
        "--spare-nodes", type=count, default=0, metavar="N", help=f"so many more may join{purpose} (%(default)s)"
    )


def add_on_loss(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--on-loss",
        choices=("replan", "wait"),
        default="replan",
        help="of a node: go on with what is left, or wait for another (%(default)s)",
    )


def add_cluster_address(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cluster-host", default="0.0.0.0", metavar="HOST", help="with --nodes: address that the others reach (all)"
    )
    parser.add_argument("--cluster-port", type=port, default=0, metavar="PORT", help="with --nodes (any free one)")


def add_allow_mixed(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--allow-mixed", action="store_true", help="take nodes whose tllm has the same version and other source (no)"
    )


def add_memory(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="of this machine, that its workers may use together: 12GiB (all)"
    )


def add_lost_after(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--lost-after",
        type=float,
        default=SILENCE_SECONDS,
        metavar="SECONDS",
        help="give up a node that is silent for so long (%(default)g)",
    )


def add_narrow_wire(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--narrow-wire",
        choices=get_args(Narrowing),
        default="off",
        help="hidden states between machines in fewer bytes, which changes numbers; auto: where it saves time (off)",
    )


def add_link(parser: argparse._ActionsContainer) -> None:
    """What carries tensors between processes."""
    parser.add_argument(
        "--link",
        choices=get_args(LinkKind),
        default="tls",
        help="what carries tensors between processes: our own links, gRPC or torch.distributed (%(default)s)",
    )
    parser.add_argument(
        "--trusted-network", action="store_true", help="let --link torch go unencrypted between machines (no)"
    )
    parser.add_argument(
        "--intra-host",
        choices=get_args(IntraHost),
        default=OUR_LINKS.intra_host,
        help="what carries tensors between processes on one machine: memory that they share, which is for sums on "
        "processors, to serve; our links; nccl between CUDA devices (%(default)s)",
    )


def wiring(args: argparse.Namespace) -> Wiring:
    """What was asked for. AuthError where tensors would cross a network in clear which nobody has called trusted."""
    if not hasattr(args, "link"):
        return OUR_LINKS
    if args.link == "torch" and args.nodes and not args.trusted_network and not is_loopback(args.cluster_host):
        raise AuthError(
            f"--link torch does not encrypt, and --nodes {args.nodes} are other machines",
            "give --trusted-network if nobody else is on their network, or leave out --link torch",
        )
    return Wiring(args.link, args.trusted_network, args.intra_host)


def add_generation_config(parser: argparse._ActionsContainer) -> None:
    """Whose defaults count where nobody says how tokens are chosen."""
    parser.add_argument(
        "--generation-config",
        default=OWN,
        metavar="FROM",
        help="where nothing else is said, tokens are chosen as the model's generation_config.json or GGUF file has it: "
        f"{OWN}; {NOTHING}: not so; a folder: as the file there has it (%(default)s)",
    )
    parser.add_argument(
        "--override-generation-config",
        metavar="JSON",
        help=f"""before that: '{{"temperature": 0.6, "top_p": 0.95}}'; keys: {", ".join(KEYS)}""",
    )


def add_sampling(parser: argparse.ArgumentParser, temperature: float, max_tokens: int, *, greedy: bool) -> None:
    """How tokens are chosen. Names as in the HTTP interface. `greedy`: whatever a model's file has."""
    group = parser.add_argument_group("choosing tokens")
    group.add_argument(
        "--max-tokens", type=whole, metavar="N", help=f"at most ({max_tokens}, or what the context leaves)"
    )
    parser.set_defaults(default_max_tokens=max_tokens, default_temperature=temperature, is_greedy=greedy)
    whose = "that of --override-generation-config" if greedy else "the model's own"
    group.add_argument("--temperature", type=float, metavar="T", help=f"0: greedy ({whose}, else {temperature})")
    group.add_argument("--top-k", type=count, metavar="K", help="of the K likeliest (0: all)")
    group.add_argument("--top-p", type=float, metavar="P", help="of the likeliest that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="of those P times as likely as the best")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="of what prompt and reply have: above 1 rarer (1: off)"
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="taken off the logits of what the reply has"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, once for each time that it has it"
    )
    group.add_argument("--seed", type=int, metavar="S", help="same seed, same text (drawn when left out)")
    group.add_argument(
        "--stop", type=nonempty, action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    add_generation_config(group)


def add_api_key(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"that the HTTP server asks for (better: the variable {API_KEY_VARIABLE})"
    )


def api_key(args: argparse.Namespace) -> str | None:
    """From the command line, else from the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def engine_options(args: argparse.Namespace, plan: str | None = None) -> EngineOptions:
    """The engine that a command line asks for; every fault in it shows here, before anything is started."""
    given = {name: getattr(args, name) for name in EngineArgs.__annotations__ if hasattr(args, name)}
    given.setdefault("generation_config", NOTHING)  # a command that samples nothing does not fail over its faults
    asked = cast(EngineArgs, {**given, "wiring": wiring(args)})
    options = api_options.engine_options(args.model, plan or args.plan or "pp=1", **asked)
    return dataclasses.replace(options, hub=getattr(args, "hub", None))


def even_plan(nodes: int, num_layers: int) -> str:
    """The plan for machines of which nothing else is known: one stage each."""
    if nodes > num_layers:
        raise PlanError(
            f"{counted(nodes, 'node')} cannot share {counted(num_layers, 'layer')} as stages", "give --plan with tp=…"
        )
    return f"pp={nodes}"
