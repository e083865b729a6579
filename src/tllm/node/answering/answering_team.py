"""`AnsweringTeam`: nodes that together compute one teacher, reward model or policy, under a plan of their own.

The first node answers the run and hands each question on to the others; all ranks then make the same calls. When one of
them is lost, the others stop answering, and the run asks whoever is left until the coordinator has formed another team.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import msgspec

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import RankAddress
from tllm.cluster.settings import OUR_LINKS
from tllm.comm.links.connect import Listener
from tllm.comm.links.link import Link, break_off
from tllm.core.errors import ConfigError, LinkClosed, LinkError, decoded
from tllm.node.roles.role import CONNECT_SECONDS, Placed, bytes_by_wire, connect_wires
from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import wires
from tllm.training.questions.question_server import Session
from tllm.training.questions.run_connection import GREETING_LIMIT, QUESTION_LIMIT, Conversation
from tllm.training.step.rank_groups import Groups, groups_of

BROKEN = "broken_team"
"""In a node's heartbeat: the number of its team, once another of it is lost."""


def team_number(name: str) -> float:
    """Of a team by its name, which ends in a hexadecimal number."""
    return float(int(name.rpartition("/")[2], 16))


class SharedSession(Session[Any, Any], Protocol):
    """A rank's part in what answers one run."""

    def check(self, question: Any) -> None:
        """FrameError for a question that is none: before any other rank hears of it."""

    def part_of(self, question: Any, rank: int) -> Any:
        """What another rank has to compute of a question that was checked; None for nothing."""

    def compute(self, question: Any) -> Any:
        """The answer to a question that was checked, on the first rank; all that have a part of it call this."""


class SharedModel(Protocol):
    """A model, or a rank's part of one."""

    @property
    def name(self) -> str: ...

    def refusal(self, introduction: Any) -> str:
        """Why it cannot answer this run, in words, alike on all ranks; "" where it can."""

    def open_session(self, introduction: Any) -> SharedSession:
        """All ranks call it for the same run."""


class TeamPlace(NamedTuple):
    """A rank of a team, whose wires are of a cluster of their own by the team's name."""

    cluster: str
    epoch: int
    rank: int
    places: tuple[RankAddress, ...]


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A run has come, as its `introduction` says."""

    session: int
    introduction: bytes


class Handed(msgspec.Struct, frozen=True, tag="handed"):
    """A rank's part of a question of a run."""

    session: int
    question: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A run has gone."""

    session: int


Told = Opened | Handed | Ended
"""What the first rank tells each of the others."""

_TOLD: msgspec.msgpack.Decoder[Told | None] = msgspec.msgpack.Decoder(Told | None)
TOLD_LIMIT = QUESTION_LIMIT + GREETING_LIMIT
"""Bytes of one of these, at most."""


class AnsweringTeam:
    """A rank's end of the wires of a plan. `groups` are made of them."""

    def __init__(self, plan: Plan, rank: int, links: Mapping[Wire, Link]) -> None:
        self._links = links
        self.groups: Groups = groups_of(plan, rank, links)
        self.is_broken = threading.Event()

    @classmethod
    def connect(cls, placed: Placed, plan: Plan, identity: Identity, listener: Listener) -> AnsweringTeam:
        """LinkError where the wires cannot be opened."""
        links = connect_wires(placed, wires(plan), identity, listener, math.inf, OUR_LINKS, CONNECT_SECONDS)
        return cls(plan, placed.rank, links)

    def tell(self, told: Callable[[int], Told | None]) -> None:
        """Of the first: tell each of the others what is for it, if anything."""
        world, encode = self.groups.world, msgspec.msgpack.encode
        world.scatter_bytes([b"", *(encode(told(rank)) for rank in range(1, world.size))])

    def follow(self, model: SharedModel, conversation: Conversation[Any, Any, Any]) -> None:
        """Of the others: do what the first tells, until the team ends. What this rank fails of is raised."""
        sessions = dict[int, SharedSession]()
        try:
            while True:
                told = decoded(self.groups.world.scatter_bytes(None, TOLD_LIMIT), _TOLD)
                match told:
                    case Opened(session, introduction):
                        sessions[session] = model.open_session(decoded(introduction, conversation.introductions))
                    case Handed(session, question):
                        sessions[session].compute(decoded(question, conversation.questions))
                    case Ended(session):
                        sessions.pop(session).close()
        except LinkError:
            self.is_broken.set()
            self.interrupt()  # who waits for this rank is not to wait for the coordinator too
        finally:
            for one in sessions.values():
                one.close()

    def interrupt(self) -> None:
        """Wake whoever waits for another rank. From any thread."""
        for link in self._links.values():
            link.interrupt()

    def link_bytes(self) -> dict[str, int]:
        """Payload bytes so far over each wire."""
        return bytes_by_wire(self._links)

    def close(self) -> None:
        break_off(self._links.values())


@dataclass(frozen=True)
class LeadingModel:
    """An `Answerer` whose questions all ranks of a team compute. One thing at a time is told to them."""

    model: SharedModel
    team: AnsweringTeam
    telling: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def name(self) -> str:
        return self.model.name

    def open_session(self, introduction: Any) -> LeadingSession:
        """ConfigError where the model cannot answer the run, LinkClosed where a rank is lost."""
        if reason := self.model.refusal(introduction):
            raise ConfigError(reason)
        number, encoded = next(self.numbers), msgspec.msgpack.encode(introduction)
        with self.in_step():
            self.team.tell(lambda rank: Opened(number, encoded))
            session = self.model.open_session(introduction)
        return LeadingSession(self, number, session)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What fails in the block ends the team, as its ranks are out of step then. LinkClosed where one is lost."""
        team, is_whole = self.team, False
        with self.telling:
            if team.is_broken.is_set():
                raise LinkClosed("those who computed the model together do so no more")
            try:
                yield
                is_whole = True
            except LinkError as error:
                raise LinkClosed(error.message, error.hint) from error
            finally:
                if not is_whole:
                    team.is_broken.set()


@dataclass(frozen=True)
class LeadingSession:
    """A team, for one run. `own` is the first rank's part in it."""

    leading: LeadingModel
    number: int
    own: SharedSession

    def answer(self, question: Any) -> Any:
        """LinkClosed where a rank is lost."""
        self.own.check(question)
        encode = msgspec.msgpack.encode

        def told(rank: int) -> Told | None:
            part = self.own.part_of(question, rank)
            return None if part is None else Handed(self.number, encode(part))

        with self.leading.in_step():
            self.leading.team.tell(told)
            return self.own.compute(question)

    def failed(self, question: Any, reason: str) -> Any:
        return self.own.failed(question, reason)

    def close(self) -> None:
        """Let all ranks forget the run, as far as they are there."""
        with contextlib.suppress(LinkClosed), self.leading.in_step():
            self.leading.team.tell(lambda rank: Ended(self.number))
        self.own.close()
