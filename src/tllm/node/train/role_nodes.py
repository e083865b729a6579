"""`RoleNodes`: which nodes of a cluster teach a training run, or sample for it, beside the ranks of its plan.

A node that is lost costs the run nothing but time: what it was asked, others are asked. Who joins later takes its role.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from tllm.cluster.messages import RankAddress, RoleAsker, RolePlaces, RoleTaken, TakeRole
from tllm.cluster.settings import TrainSettings
from tllm.cluster.state import Member, RankRefused, RoleBegan, RoleGiven
from tllm.core.errors import ClusterError, ConfigError, TllmError, WeightsError
from tllm.core.tasks import background, end_tasks
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.weights.model_folder import ModelFolder
from tllm.spec.process_groups import RoleName
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.job import Job
from tllm.training.job.job_parts import role_key, role_nodes
from tllm.training.job.key_limits import WantedNodes
from tllm.training.questions.causal_model import CausalModel
from tllm.training.reward_models.reward_model import ScoringModel

log = logging.getLogger("tllm.node")

DOES: dict[RoleName, str] = {
    "teacher": "teach",
    "rollout": "sample completions",
    "reward": "score completions",
}
"""What a node with a role does, in words."""

RETRY_SECONDS = 10.0


class RoleNodes:
    """Of the job that the coordinator's nodes are brought together for; `job` may be chosen later.

    Nodes have their roles beside any epoch, and keep them when the next begins.
    """

    def __init__(self, coordinator: Coordinator, job: Job) -> None:
        self.job = job
        self._coordinator, self._members = coordinator, coordinator.members
        self._unable = set[tuple[str, int]]()  # processes of nodes that could not take a role
        self._told: object = None

    @property
    def wanted(self) -> dict[RoleName, WantedNodes]:
        """By role; none for most jobs."""
        return role_nodes(self.job)

    def reserve(self, nodes: Sequence[str]) -> set[str]:
        """Choose who is to have a role, of nodes of which the first is to be rank 0: those that are named, else the
        last; beside those that have had it from a coordinator before. ConfigError for names that cannot be."""
        reserved = set[str]()
        lacking = {role: wanted.count - len(self._holders(role)) for role, wanted in self.wanted.items()}
        for role, wanted in self.wanted.items():
            names = wanted.names if lacking[role] == wanted.count else ()
            _check_names(names, nodes, role_key(self.job, role))
            for node in names:
                reserved.add(node)
                self._members.record(RoleGiven(node, role))
        had = {member.node for member in self._members.state.living if member.before is not None}
        for role, count in lacking.items():
            free = [node for node in nodes[1:] if node not in reserved]
            free.sort(key=lambda node: node not in had)  # who may hold steps in memory is taken last
            for node in free[len(free) - count :] if count > 0 and not self.wanted[role].names else ():
                reserved.add(node)
                self._members.record(RoleGiven(node, role))
        return reserved

    async def wait_for_named(self, seconds: float | None) -> bool:
        """Let nodes come that the job names for a role and that are not here, `seconds` at most; whether there were
        some. ConfigError where they do not come: `reserve` says it of those that could come from nowhere."""
        coordinator, missing = self._coordinator, self._missing()
        if not missing or len(coordinator.control_server.own) >= coordinator.work.nodes:
            return False
        whom = " and ".join(f"{name}, which {role_key(self.job, role)} names" for name, role in missing.items())
        log.warning("waiting for %s%s", whom, "" if seconds is None else f", for {seconds:.0f} s at most")
        coordinator.invite(len(missing))
        try:
            async with asyncio.timeout(seconds):
                await self._members.until(lambda: not self._missing())
        except TimeoutError as error:
            name, role = next(iter(self._missing().items()))
            raise ConfigError(
                f"{role_key(self.job, role)} names {name!r}, which has not joined within {seconds:g} s; the nodes are "
                f"{', '.join(coordinator.nodes)}",
                f"let it join by that name (`tllm join --name {name}`), or name another one",
            ) from error
        return True

    def _missing(self) -> dict[str, RoleName]:
        """Nodes that are named for a role which nobody has yet, and are not here."""
        here = {member.node for member in self._members.state.living}
        unheld = {role: wanted for role, wanted in self.wanted.items() if not self._holders(role)}
        return {name: role for role, wanted in unheld.items() for name in wanted.names if name not in here}

    def welcome(self, node: str) -> None:
        """A node has joined, perhaps with a role that it had from a coordinator before: it keeps that, unless it is not
        wanted here, or the node is now the first, which has rank 0."""
        member = self._members.state.member(node)
        is_first = node in self._coordinator.first[:1]
        if member is not None and member.role is not None and (is_first or member.role not in self.wanted):
            self._members.record(RoleGiven(node, None))

    @contextlib.asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """Those that were reserved take their roles while the block runs. Raises what any of them fails with, by its
        name; one that is lost meanwhile may have a successor."""

        async def take(member: Member, order: TakeRole) -> None:
            try:
                await self._give(member, order)
            except TllmError as error:
                now = self._members.state.member(member.node)
                if now is not None and now.is_living:
                    raise
                log.warning("%s", error.message)

        reserved = [one for one in self._members.state.living if one.role is not None and not one.answers_at]
        roles = {one.role for one in reserved if one.role is not None}
        # What this machine lacks shows before anything is built.
        orders = {role: await asyncio.to_thread(self._order, role) for role in roles}
        taking = [asyncio.create_task(take(one, orders[one.role])) for one in reserved if one.role is not None]
        try:
            yield
            await asyncio.gather(*taking)
        finally:
            await end_tasks(*taking)

    @contextlib.asynccontextmanager
    async def kept(self, is_settled: Callable[[], bool]) -> AsyncIterator[None]:
        """While the block runs, give the roles of lost nodes to others, when the plan `is_settled`: when it is known
        which nodes have its ranks."""
        keeping = [self._fill(is_settled), self._tell_changes()] if self.wanted else []
        tasks = [background(one, "who has which role") for one in keeping]
        try:
            yield
        finally:
            await end_tasks(*tasks)

    def tell(self) -> None:
        """Tell rank 0 who answers now, and these whom they answer."""
        self._told = self._known()
        channels, settings = self._members.channels, self._coordinator.work.settings
        assert isinstance(settings, TrainSettings), "roles are of runs that train"
        first = self._members.state.ranks[:1]
        if not first or first[0].node not in channels:  # it is told when another has its part
            return
        for role in self.wanted:
            places = self._places(role)
            for place in places:
                if place.node in channels:
                    channels[place.node].post(RoleAsker(first[0].node, settings.run))
            channels[first[0].node].post(RolePlaces(role, places, settings.run))

    async def _tell_changes(self) -> None:
        while True:
            await self._members.until(lambda: self._known() != self._told)
            self.tell()

    async def _fill(self, is_settled: Callable[[], bool]) -> None:
        while True:
            await self._members.until(lambda: self._vacancy(is_settled) is not None)
            vacancy = self._vacancy(is_settled)
            assert vacancy is not None, "nothing was awaited since"
            role, member = vacancy
            try:
                order = await asyncio.to_thread(self._order, role)
            except (TllmError, OSError) as error:  # this machine's lack, and no node's
                log.warning("nobody else can %s, as this machine cannot say how: %s", DOES[role], error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            now = self._vacancy(is_settled)
            if now is None or (now[0], now[1].node) != (role, member.node):
                continue
            self._members.record(RoleGiven(member.node, role))
            try:
                await self._give(member, order)
            except TllmError as error:
                log.warning("%s", error.message)
                self._unable.add((member.node, member.facts.pid))
                self._members.record(RoleGiven(member.node, None))

    async def _give(self, member: Member, order: TakeRole) -> None:
        node, role = member.node, order.role
        try:
            channel = self._members.channels.get(node)
            if channel is None:
                raise ClusterError("it went away")
            taken = await channel.ask(order, self._coordinator.work.load_seconds)
        except TllmError as error:
            self._members.record(RankRefused(node, error.message))
            why = error.message if node in error.message else f"{node} cannot {DOES[role]}: {error.message}"
            raise type(error)(why, error.hint) from error
        assert isinstance(taken, RoleTaken), "what a node answers"
        self._members.record(RoleBegan(node, taken))
        log.info("%s is to %s, at port %d", node, DOES[role], taken.port)
        self.tell()

    def _order(self, role: RoleName) -> TakeRole:
        """What a node must know to take a role. ConfigError or WeightsError where this machine lacks the teacher."""
        weights = self._coordinator.weights
        if role == "rollout":
            own = weights.folder
            model, config = self.job.model_name_or_path or self.job.config_name or "", self._coordinator.work.config
            folder, files = (str(own.path), own.files) if own is not None else ("", ())
            is_base = self.job.lora is not None
            return TakeRole(role=role, model=model, config=config, folder=folder, files=files, is_base=is_base)
        name, dtype, found = self._model_of(role)
        if (lent := weights.beside.get(role)) is None:
            lent = weights.beside[role] = ModelFolder(found.folder)
        if not lent.files:
            whose = "teacher's" if role == "teacher" else "reward model's"
            raise WeightsError(f"the {whose} folder {found.folder} has no files of weights", "copy model.safetensors")
        return TakeRole(
            role=role,
            model=name,
            config=json.dumps(found.config),
            vocabulary=vocabulary_digest(found.folder),
            dtype=dtype,
            folder=str(lent.path),
            files=lent.files,
        )

    def _model_of(self, role: RoleName) -> tuple[str, str, CausalModel | ScoringModel]:
        """The name, the dtype and the folder of a role's model that is not the one that is trained."""
        if role == "teacher":
            keys = self.job.distill
            assert keys is not None and keys.teacher_model_name_or_path, "a job whose nodes teach names the teacher"
            name, hint = keys.teacher_model_name_or_path, "take a causal language model"
            return name, keys.teacher_dtype, CausalModel.find(name, "gives no next token", hint)
        config = self.job.rollouts
        assert config is not None and config.reward_model_name_or_path, "a job whose nodes score names the model"
        name = config.reward_model_name_or_path
        return name, config.reward_dtype, ScoringModel.find(name)

    def _holders(self, role: RoleName) -> list[Member]:
        return [member for member in self._members.state.living if member.role == role]

    def _places(self, role: RoleName) -> tuple[RankAddress, ...]:
        holders = [member for member in self._holders(role) if member.answers_at]
        return tuple(RankAddress(member.node, member.facts.host, member.answers_at) for member in holders)

    def _known(self) -> object:
        """What rank 0 is to know, and in which epoch."""
        return self._members.state.epoch, [self._places(role) for role in self.wanted]

    def _vacancy(self, is_settled: Callable[[], bool]) -> tuple[RoleName, Member] | None:
        """A role that lacks a node, and one that is free for it: not wanted by the plan, unless nobody has the role."""
        if not is_settled():
            return None
        state, wanted = self._members.state, self.wanted
        free = [
            member
            for member in state.available
            if member.rank is None and (member.node, member.facts.pid) not in self._unable
        ]
        short = max(0, self._coordinator.work.plan.world_size - state.seated_count)
        for role in sorted(wanted, key=lambda role: len(self._holders(role))):
            held = len(self._holders(role))
            if held < wanted[role].count and len(free) > (short if held else 0):
                return role, free[-1]
        return None


def _check_names(names: Sequence[str], nodes: Sequence[str], key: str) -> None:
    """ConfigError for names of nodes that cannot have a role."""
    if unknown := [name for name in names if name not in nodes]:
        raise ConfigError(
            f"{key} names {unknown[0]!r}, and the nodes are {', '.join(nodes)}", "give the names of nodes that join"
        )
    if nodes[0] in names:
        raise ConfigError(f"{key} names {nodes[0]}, the first node, which has the data and trains", "name another one")
