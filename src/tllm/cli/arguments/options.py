"""Options that several commands share, and what they come to: `EngineOptions`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tllm.cli.arguments.parser import count, size, whole
from tllm.cluster.heartbeat import SILENCE_SECONDS, check_lost_after
from tllm.cluster.settings import OUR_LINKS, LinkKind, Narrowing, Wiring
from tllm.core.errors import AuthError, ConfigError, PlanError
from tllm.planner.cost.cache_room import MAX_NUM_SEQS, PAGE_SIZE
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.server.http.settings import is_loopback
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

API_KEY_VARIABLE = "TLLM_API_KEY"
ACCEPTANCE = 0.3
"""Of drafted tokens, until a run has said how many were right: texts that quote their prompt have more, others less."""

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class EngineOptions:
    """What to run and how: the model, who holds what of it, how much room its cache has, who is given up when."""

    folder: Path
    spec: ModelSpec
    plan: Plan
    dtype: str
    threads: int | None
    page_size: int
    kv_cache_memory: int | None
    asked_model_len: int | None
    max_num_seqs: int
    num_speculative_tokens: int = 0
    allow_mixed: bool = False
    narrow_wire: Narrowing = "off"
    lost_after: float = SILENCE_SECONDS
    wiring: Wiring = OUR_LINKS
    memory: int | None = None

    @property
    def max_model_len(self) -> int:
        """The longest sequence: what was asked for, else what the model was made for."""
        return self.asked_model_len or self.spec.max_model_len


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model folder, the plan and the dtype."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a Hugging Face model (safetensors)")
    parser.add_argument(
        "--plan",
        default=None,
        metavar="PLAN",
        help="who holds what: pp=2,tp=2 (stages, ranks in each), tp=1+2 (each stage its own), layers=10+22 "
        "or 1+2*62+1 (layers of each stage), shares=1:3 (share of each rank), experts=spread; or a JSON file",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of weights and cache (the checkpoint's own)")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """How much room sequences have."""
    group = parser.add_argument_group("room for sequences")
    group.add_argument("--page-size", type=whole, default=PAGE_SIZE, metavar="N", help="tokens in a page (%(default)s)")
    group.add_argument("--kv-cache-memory", type=size, metavar="SIZE", help="for keys and values, of each rank: 2GiB")
    group.add_argument("--max-model-len", type=whole, metavar="N", help="longest sequence (the model's own)")
    group.add_argument("--max-num-seqs", type=whole, default=MAX_NUM_SEQS, metavar="N", help="at once (%(default)s)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """All that a command which runs a model takes."""
    add_model(parser)
    add_cache(parser)
    add_speculation(parser)
    parser.add_argument("--threads", type=whole, metavar="N", help="threads of each worker (cores / workers here)")


def add_speculation(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--num-speculative-tokens",
        type=count,
        default=0,
        metavar="N",
        help="check up to N tokens at once that are looked up in the text so far, where that is faster; the reply is "
        "the same (%(default)s)",
    )


def add_acceptance(parser: argparse._ActionsContainer, goal: str = "") -> None:
    parser.add_argument(
        "--acceptance",
        type=float,
        default=ACCEPTANCE,
        metavar="P",
        help=f"{goal}chance that a drafted token is right if those before it were (%(default)s)",
    )


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


def wiring(args: argparse.Namespace) -> Wiring:
    """What was asked for. AuthError where tensors would cross a network in clear which nobody has called trusted."""
    if not hasattr(args, "link"):
        return OUR_LINKS
    if args.link == "torch" and args.nodes and not args.trusted_network and not is_loopback(args.cluster_host):
        raise AuthError(
            f"--link torch does not encrypt, and --nodes {args.nodes} are other machines",
            "give --trusted-network if nobody else is on their network, or leave out --link torch",
        )
    return Wiring(args.link, args.trusted_network)


def add_sampling(parser: argparse.ArgumentParser, temperature: float, max_tokens: int) -> None:
    """How tokens are chosen. Names as in the HTTP interface."""
    group = parser.add_argument_group("choosing tokens")
    group.add_argument(
        "--max-tokens", type=whole, metavar="N", help=f"at most ({max_tokens}, or what the context leaves)"
    )
    parser.set_defaults(default_max_tokens=max_tokens)
    group.add_argument("--temperature", type=float, default=temperature, metavar="T", help="0: greedy (%(default)s)")
    group.add_argument("--top-k", type=count, default=0, metavar="K", help="of the K likeliest (0: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest that make up P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="of those P times as likely as the best")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, metavar="S", help="same seed, same text (drawn when left out)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def add_api_key(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"that the HTTP server asks for (better: the variable {API_KEY_VARIABLE})"
    )


def api_key(args: argparse.Namespace) -> str | None:
    """From the command line, else from the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def engine_options(args: argparse.Namespace, plan: str | None = None) -> EngineOptions:
    """Read `config.json` and the plan; every fault in them shows here, before anything is started."""
    spec = read_spec(args.model)
    chosen = Plan.parse(plan or args.plan or "pp=1", spec.num_layers)
    dtype = args.dtype or spec.dtype
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"the checkpoint's dtype {dtype!r} cannot be computed with", "give --dtype bfloat16")
    check_lost_after(lost_after := getattr(args, "lost_after", SILENCE_SECONDS))
    longest = args.max_model_len or spec.max_model_len
    if longest > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {longest} is more than the {spec.max_model_len} that the model was made for",
            f"give at most {spec.max_model_len}",
        )
    return EngineOptions(
        folder=args.model,
        spec=spec,
        plan=chosen,
        dtype=dtype,
        threads=getattr(args, "threads", None),
        page_size=args.page_size,
        kv_cache_memory=args.kv_cache_memory,
        asked_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        num_speculative_tokens=getattr(args, "num_speculative_tokens", 0),
        allow_mixed=getattr(args, "allow_mixed", False),
        narrow_wire=getattr(args, "narrow_wire", "off"),
        lost_after=lost_after,
        wiring=wiring(args),
        memory=getattr(args, "memory", None),
    )


def read_spec(folder: Path) -> ModelSpec:
    """The model's spec from its folder, or from a config.json alone."""
    if not folder.is_dir() and not folder.is_file():
        raise ConfigError(f"{folder} is not a folder", "give the folder of a Hugging Face model, with its config.json")
    return spec_from_config(read_config(folder))


def even_plan(nodes: int, num_layers: int) -> str:
    """The plan for machines of which nothing else is known: one stage each."""
    if nodes > num_layers:
        raise PlanError(f"{nodes} nodes cannot share {num_layers} layers as stages", "give --plan with tp=…")
    return f"pp={nodes}"
