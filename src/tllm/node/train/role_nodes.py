"""`RoleNodes`: which nodes of a cluster teach a training run, or sample for it, beside the ranks of its plan.

A lost node costs the run nothing but time: its questions are put to others. A node that joins later takes its role.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import islice

import msgspec

from tllm.cluster.messages import Progress, RankAddress, RoleAsker, RolePlaces, RoleTaken, TakeRole
from tllm.cluster.settings import TrainSettings
from tllm.cluster.state import Member, RankLoading, RankRefused, RoleBegan, RoleGiven
from tllm.core.errors import ClusterError, ConfigError, LinkError, TllmError, WeightsError
from tllm.core.tasks import background, end_tasks
from tllm.node.answering.answering_team import BROKEN, team_number
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.membership import hear_others
from tllm.node.train import role_teams
from tllm.node.train.role_teams import FailedTeams, larger_parts_first, possible_teams
from tllm.node.weights.model_folder import ModelFolder
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.plan_text import rank_count
from tllm.spec.process_groups import RoleName
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.job import Job
from tllm.training.job.job_parts import check_teams, role_key, role_nodes, role_plan, role_plan_text
from tllm.training.job.key_limits import WantedNodes
from tllm.training.questions.answering_model import AnsweringModel

log = logging.getLogger("tllm.node")

DOES: dict[RoleName, str] = {
    "teacher": "teach",
    "rollout": "sample completions",
    "reward": "score completions",
}
"""What a node with a role does, in words."""

RETRY_SECONDS = 10.0
"""After this machine could not say what a role needs: the folder that it lacked may be there then."""

TEAMS_LOOKED_AT = 64
"""Of all that could be made of the nodes that are there, where some are left alone for a while."""

LOOK_SECONDS = 0.5
"""Between two looks at whose team is broken, which a heartbeat says that wakes nobody, and at how far nodes have read
their model, which wakes nobody either."""


class RoleNodes:
    """Of the job that the coordinator's nodes are brought together for; `job` may be chosen later.

    Nodes have their roles beside any epoch, and keep them when the next begins. Those that compute one model together,
    by the role's plan, are a team: it answers as long as all of them are there.
    """

    def __init__(self, coordinator: Coordinator, job: Job) -> None:
        self.job = job
        self._coordinator, self._members = coordinator, coordinator.members
        self._unable = set[tuple[str, int]]()  # processes of nodes that could not take a role
        self._trying = set[tuple[str, int]]()  # of those that take one now
        self._failed = FailedTeams()
        self._told: object = None

    @property
    def wanted(self) -> dict[RoleName, WantedNodes]:
        """By role; none for most jobs."""
        return role_nodes(self.job)

    def reserve(self, nodes: Sequence[str]) -> set[str]:
        """Choose who is to have a role, of nodes of which the first is to be rank 0: those that are named, else the
        last; beside those that have had it from a coordinator before. ConfigError for names that cannot be."""
        for role, wanted in self.wanted.items():
            check_teams(self.job, role, wanted, self._size(role))
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

        async def take(team: Sequence[Member], order: TakeRole) -> None:
            try:
                await self._give(team, order)
            except TllmError as error:
                now = [self._members.state.member(member.node) for member in team]
                if all(one is not None and one.is_living for one in now):
                    raise
                log.warning("%s", error.message)

        reserved = {role: self._waiting(role) for role in self.wanted}
        # What this machine lacks shows before anything is built.
        orders = {role: await asyncio.to_thread(self._order, role) for role, nodes in reserved.items() if nodes}
        teams = [(team, orders[role]) for role, nodes in reserved.items() for team in self._teams(role, nodes)]
        taking = [asyncio.create_task(take(team, order)) for team, order in teams]
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
            channels[first[0].node].post(RolePlaces(role, places, settings.run, self._reading(role)))

    async def _tell_changes(self) -> None:
        while True:
            await self._look_until(lambda: self._known() != self._told)
            self.tell()

    async def _fill(self, is_settled: Callable[[], bool]) -> None:
        def is_due() -> bool:
            return is_settled() and (bool(self._stranded()) or self._vacancy() is not None)

        async with asyncio.TaskGroup() as giving:  # who reads a model keeps no other from a role
            while True:
                await self._look_until(is_due)
                self._free_stranded()
                vacancy = self._vacancy()
                if vacancy is None:
                    continue
                role, team = vacancy
                try:
                    order = await asyncio.to_thread(self._order, role)
                except (TllmError, OSError) as error:  # this machine's lack, and no node's
                    log.warning("nobody else can %s, as this machine cannot say how: %s", DOES[role], error)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                now = self._vacancy() if is_settled() else None
                if now is None or (now[0], _names(now[1])) != (role, _names(team)):
                    continue
                self._put_together(role, team)
                giving.create_task(self._try(team, order))

    async def _look_until(self, holds: Callable[[], bool]) -> None:
        """As `Membership.until`, of what may come to hold without a notice."""
        while not holds():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._members.until(holds)

    async def _try(self, team: Sequence[Member], order: TakeRole) -> None:
        """Let a team that was put together take its role. Where it cannot, other nodes may."""
        try:
            await self._give(team, order)
            self._failed.met(team)
        except LinkError as error:  # between those of a team, of whom one may be lost
            self._failed.forget_gone(self._members.state.living)
            again, whom = self._failed.failed(team), " with ".join(_names(team))
            log.warning("%s; %s is tried again in %g s at the earliest", error.message, whom, again)
            self._put_back(team, order.role)
            await asyncio.sleep(role_teams.FIRST_SECONDS)
        except TllmError as error:
            log.warning("%s", error.message)
            for member in team:
                given = self._members.state.member(member.node)
                if given is not None and given.phase == "refused":
                    self._unable.add(_process(member))
                    self._members.record(RoleGiven(member.node, None))
            self._put_back(team, order.role)
        finally:
            self._trying.difference_update(map(_process, team))

    def _put_back(self, team: Sequence[Member], role: RoleName) -> None:
        """Those of a team that did not come together load no more, and wait with their role."""
        for member in team:
            given = self._members.state.member(member.node)
            if given is not None and given.role == role and given.phase == "loading":
                self._members.record(RoleGiven(member.node, role))

    def _put_together(self, role: RoleName, team: Sequence[Member]) -> None:
        """These have a role, and of those that wait for others no more than are wanted."""
        self._trying.update(map(_process, team))
        for member in team:
            self._members.record(RoleGiven(member.node, role))
        surplus = len(self._holders(role)) - self.wanted[role].count
        left = [one for one in self._waiting(role) if one.node not in _names(team)]
        for member in left[: max(0, surplus)]:
            self._members.record(RoleGiven(member.node, None))

    async def _give(self, team: Sequence[Member], order: TakeRole) -> None:
        """Let a team take a role, all of whom must. Raises what one fails of by itself, else what it fails of with
        another; the others then have the role and wait."""
        role, state = order.role, self._members.state
        if order.plan is not None and not _is_as_named(team, self.wanted[role].names):
            team = larger_parts_first(team, order.plan)
        name = f"{state.cluster}/{role}/{secrets.token_hex(4)}"
        places = tuple(RankAddress(member.node, member.facts.host, member.facts.port) for member in team)
        order = msgspec.structs.replace(order, team=name, places=places if len(team) > 1 else ())
        orders = [msgspec.structs.replace(order, rank=rank) for rank in range(len(team))]
        asked = [asyncio.create_task(self._ask(*one)) for one in zip(_names(team), orders, strict=True)]
        try:
            found = await asyncio.gather(*asked)
        except TllmError:
            await hear_others(asked)  # but not until they have read their parts in vain
            faults = [one.exception() for one in asked if one.done()]
            raise min((one for one in faults if one is not None), key=lambda one: isinstance(one, LinkError)) from None
        finally:
            await end_tasks(*asked)
        for taken, member in zip(found, team, strict=True):
            self._members.record(RoleBegan(member.node, taken))
        log.info("%s is to %s", " with ".join(member.node for member in team), DOES[role])
        self.tell()

    async def _ask(self, node: str, order: TakeRole) -> RoleTaken:
        """What a node answers. Raises what it fails of, which is said of it where it is its own."""
        try:
            channel = self._members.channels.get(node)
            if channel is None:
                raise ClusterError("it went away")
            async with aclosing(channel.stream(order, self._coordinator.work.load_seconds)) as answers:
                async for answer in answers:
                    if isinstance(answer, RoleTaken):
                        return answer
                    self._members.record(RankLoading(node, answer))
            raise ClusterError("it does not say that it has the role")
        except TllmError as error:
            why = error.message if node in error.message else f"{node} cannot {DOES[order.role]}: {error.message}"
            if isinstance(error, LinkError) or error.peer is not None:  # between two of a team
                raise LinkError(why, error.hint) from error
            self._members.record(RankRefused(node, error.message))
            raise type(error)(why, error.hint) from error

    def _order(self, role: RoleName) -> TakeRole:
        """What a node must know to take a role. ConfigError or WeightsError where this machine lacks the teacher."""
        weights = self._coordinator.weights
        if role == "rollout":
            own = weights.folder
            model, config = self.job.model_name_or_path or self.job.config_name or "", self._coordinator.work.config
            folder, files = (str(own.path), own.files) if own is not None else ("", ())
            return TakeRole(
                role=role,
                model=model,
                config=config,
                folder=folder,
                files=files,
                is_base=self.job.lora is not None,
                plan=self._plan(role, spec_from_config(json.loads(config)).num_layers),
            )
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
            plan=self._plan(role, found.spec.num_layers),
        )

    def _model_of(self, role: RoleName) -> tuple[str, str, AnsweringModel]:
        """The name, the dtype and the folder of a role's model that is not the one that is trained."""
        if role == "teacher":
            keys = self.job.distill
            assert keys is not None and keys.teacher_model_name_or_path, "a job whose nodes teach names the teacher"
            name, hint = keys.teacher_model_name_or_path, "take a causal language model"
            return name, keys.teacher_dtype, AnsweringModel.find_causal(name, "gives no next token", hint)
        config = self.job.rollouts
        assert config is not None and config.reward_model_name_or_path, "a job whose nodes score names the model"
        name = config.reward_model_name_or_path
        return name, config.reward_dtype, AnsweringModel.find_scoring(name)

    def _plan(self, role: RoleName, num_layers: int) -> Plan | None:
        """By which a team divides the model; None where each node has all of it."""
        return role_plan(self.job, role, num_layers) if self._size(role) > 1 else None

    def _size(self, role: RoleName) -> int:
        """Nodes of a team."""
        return rank_count(role_plan_text(self.job, role))

    def _teams(self, role: RoleName, nodes: Sequence[Member]) -> list[Sequence[Member]]:
        """As many whole teams as there are nodes for, in the order in which the job names them."""
        size, ordered = self._size(role), self._in_order(role, nodes)
        return [ordered[at : at + size] for at in range(0, len(ordered) - size + 1, size)]

    def _in_order(self, role: RoleName, nodes: Sequence[Member]) -> list[Member]:
        """By the names that the job has, as the plan may give its first ranks other shares than its last."""
        names = self.wanted[role].names
        return sorted(nodes, key=lambda one: names.index(one.node) if one.node in names else len(names))

    def _waiting(self, role: RoleName) -> list[Member]:
        """Those that have a role and do not answer, alone or in a team, nor begin to."""
        held = [member for member in self._holders(role) if not member.team and not member.answers_at]
        return [member for member in held if _process(member) not in self._trying]

    def _free_stranded(self) -> None:
        """Let those whose team is over wait for another one, and rank 0 ask them no more."""
        if stranded := self._stranded():
            for role, member in stranded:
                lost = [one.node for one in self._members.state.table if one.team == member.team and not one.is_living]
                why = f"{' and '.join(lost)} of its team is lost" if lost else "a link of its team is lost"
                log.warning("%s waits for another to %s with, as %s", member.node, DOES[role], why)
                self._members.record(RoleGiven(member.node, role))
            self.tell()

    def _stranded(self) -> list[tuple[RoleName, Member]]:
        """Those that had a team, of which somebody is lost."""
        found = list[tuple[RoleName, Member]]()
        for role in self.wanted:
            size, teams = self._size(role), defaultdict[str, list[Member]](list)
            for member in self._holders(role):
                teams[member.team].append(member)
            for name, team in teams.items():
                if name and (len(team) < size or any(one.beat.stats.get(BROKEN) == team_number(name) for one in team)):
                    found += [(role, member) for member in team]
        return found

    def _holders(self, role: RoleName) -> list[Member]:
        return [member for member in self._members.state.living if member.role == role]

    def _places(self, role: RoleName) -> tuple[RankAddress, ...]:
        holders = [member for member in self._holders(role) if member.answers_at]
        return tuple(RankAddress(member.node, member.facts.host, member.answers_at) for member in holders)

    def _reading(self, role: RoleName) -> dict[str, Progress]:
        """How far those have read their model that take the role now."""
        taking = [member for member in self._holders(role) if _process(member) in self._trying]
        return {member.node: member.progress for member in taking if member.phase == "loading"}

    def _known(self) -> object:
        """What rank 0 is to know, and in which epoch."""
        return self._members.state.epoch, [(self._places(role), self._reading(role)) for role in self.wanted]

    def _vacancy(self) -> tuple[RoleName, Sequence[Member]] | None:
        """A role that lacks a team, and nodes for it: those that have the role and no team, and such as are free: not
        wanted by the plan, unless nobody answers in the role, nor by another role that lacks them by their names."""
        state, wanted = self._members.state, self.wanted
        free = [member for member in state.available if member.rank is None and _process(member) not in self._unable]
        short = max(0, self._coordinator.work.plan.world_size - state.seated_count)
        lack = [role for role in wanted if len(self._holders(role)) < wanted[role].count]
        named = {name: role for role in lack for name in wanted[role].names}
        for role in sorted(wanted, key=lambda role: len(self._holders(role))):
            held, size = self._holders(role), self._size(role)
            waiting, answers = self._waiting(role), any(member.answers_at for member in held)
            others = [member for member in free if named.get(member.node, role) == role]
            others.sort(key=lambda member: member.node in named)  # the last are taken
            spare = max(0, len(others) - (short if answers else 0))
            if len(held) - len(waiting) + size > wanted[role].count:
                continue
            candidates = self._failed.fewest_first([*waiting, *reversed(others)])
            for team in islice(possible_teams(candidates, size, spare), TEAMS_LOOKED_AT):
                if self._failed.may_try(team):
                    return role, self._in_order(role, [one for one in [*waiting, *others] if one in team])
        return None


def _names(team: Sequence[Member]) -> list[str]:
    return [member.node for member in team]


def _process(member: Member) -> tuple[str, int]:
    return member.node, member.facts.pid


def _is_as_named(team: Sequence[Member], names: Sequence[str]) -> bool:
    """Whether it is one of the teams that the job names, in its order."""
    size = len(team)
    return tuple(_names(team)) in {tuple(names[at : at + size]) for at in range(0, len(names), size)}


def _check_names(names: Sequence[str], nodes: Sequence[str], key: str) -> None:
    """ConfigError for names of nodes that cannot have a role."""
    if unknown := [name for name in names if name not in nodes]:
        raise ConfigError(
            f"{key} names {unknown[0]!r}, and the nodes are {', '.join(nodes)}", "give the names of nodes that join"
        )
    if nodes[0] in names:
        raise ConfigError(f"{key} names {nodes[0]}, the first node, which has the data and trains", "name another one")
