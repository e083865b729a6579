"""`Workload`: what the nodes of a cluster are to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tllm.cluster.heartbeat import SILENCE_SECONDS, check_lost_after
from tllm.cluster.http_messages import ServedModel
from tllm.cluster.settings import Settings
from tllm.hub.repository import HubWeights
from tllm.spec.lora.lora_config import ServedLoras
from tllm.spec.plan import Plan

PREPARE_SECONDS = 60.0
LOAD_SECONDS = 120.0


@dataclass(frozen=True)
class Workload:
    """A model, a plan for it and the settings that every rank is sent. All times are in seconds.

    folder: holds the model's weights; None where none are read from files.
    config: the text of the model's config.json.
    load_seconds: how long a rank may load without telling of any progress.
    allow_mixed: accept nodes that run another version of the program than the coordinator.
    prepare_seconds: how long a node may take to leave the epoch before and to connect its links to other ranks.
    lost_after: a node that has sent no heartbeat for so long is lost.
    hub: weights that are not in the folder, and that each node fetches from the hub; None where they are in the folder.
    served: what HTTP servers on other nodes serve; None while none may.
    adapters: LoRA adapters that are loaded, or are to be; None where none are served.
    reads: files that whoever coordinates reads beside the model, by the paths that its own machine is to have them at.
    beside: how many nodes are to have a role beside the plan, and no rank.
    """

    folder: Path | None
    config: str
    plan: Plan
    settings: Settings
    load_seconds: float = LOAD_SECONDS
    allow_mixed: bool = False
    prepare_seconds: float = PREPARE_SECONDS
    lost_after: float = SILENCE_SECONDS
    hub: HubWeights | None = None
    served: ServedModel | None = None
    adapters: ServedLoras | None = None
    reads: tuple[str, ...] = ()
    beside: int = 0

    @property
    def nodes(self) -> int:
        """How many nodes the work is for."""
        return self.plan.world_size + self.beside

    def __post_init__(self) -> None:
        check_lost_after(self.lost_after)
