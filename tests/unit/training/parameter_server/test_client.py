"""Replicas and servers as threads. Each gradient is a power of two, so that weights tell which of them they hold."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.comm.ranks import tcp_groups
from tests.support.models.layouts import in_threads
from tests.support.properties import examples
from tests.support.training.parameter_servers import buckets_of, lines_between, state_of
from tests.unit.training.parameter_server.test_segments import parameters_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.core.errors import ConfigError, FrameError, LinkClosed, NonFiniteError, TllmError
from tllm.training.data.batch_tensors import Tokens
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.parameter_server import messages as say
from tllm.training.parameter_server.client import ParameterServerClient
from tllm.training.parameter_server.connections import ReplicaLinks
from tllm.training.parameter_server.server import ParameterServer
from tllm.training.parameter_server.stale_synchronous import ASYNCHRONOUS

SHAPES = ((9, 7), (21, 5), (30, 11), (5,))
TABLE = 1
PLAIN = SGD(momentum=0.0)
UNIT = 2.0**-40
PATIENCE = 20.0
"""Seconds that a thread waits for another at most, in a test that fails."""


def tokens(*ids: int) -> Tokens:
    return Tokens(torch.tensor(ids), torch.tensor(ids), torch.arange(len(ids)), [len(ids)])


class Replica:
    """Its loss is `amount` times the sum of all weights, of the table those of the rows with tokens."""

    def __init__(
        self, world: Group, lines: list[ReplicaLinks], max_staleness: int, table: int | None, limit: float
    ) -> None:
        self.number = number = world.rank
        self.parameters = parameters_of(*SHAPES, dtype=torch.float64)
        for parameter in self.parameters:
            parameter.data.fill_(0.0 if number == 0 else math.nan)
            parameter.requires_grad_()
        self.update = ParameterServerClient(
            buckets_of(self.parameters, 2000), table, lines, max_staleness, limit, world
        )

    def step(self, amount: float, *ids: int, look: Callable[[], None] = lambda: None, loss: float = 0.0) -> float:
        """The norm of the next step; `look` is called between its pull and its push."""
        self.update.begin([tokens(*ids)] if ids else [])
        look()
        self.update.buckets.begin(1 if ids else 0)
        if ids:
            rows = self.parameters[TABLE][sorted(set(ids))]
            others = [parameter for index, parameter in enumerate(self.parameters) if index != TABLE]
            (amount * sum(tensor.sum() for tensor in (rows, *others))).backward()  # type: ignore[union-attr]
        self.update.buckets.finish()
        return self.update.apply(self.update.step + 1, 1.0, loss)

    def clear(self) -> None:
        """Numbers where nothing was pulled yet."""
        for run in self.update.flat.whole:
            run.zero_()

    def holds(self, row: int) -> list[int]:
        """The units that were taken from weights in several places: the first and last elements, and a row's."""
        ends = [end for index in (0, 2, 3) for end in (self.parameters[index].flatten()[[0, -1]],)]
        return [round(-float(x) / UNIT) for x in torch.cat([*ends, self.parameters[TABLE][row]]).detach()]


class Ranks:
    def __init__(
        self,
        replicas: int,
        servers: int,
        max_staleness: int = 0,
        optimizer: Optimizer = PLAIN,
        table: int | None = TABLE,
        limit: float = 0.0,
        lines: tuple[list[list[ReplicaLinks]], list[list[ReplicaLinks]]] | None = None,
    ) -> None:
        up, down = lines or lines_between(replicas, servers)
        worlds = local_groups(replicas, name="world")
        self.replicas = [Replica(world, up[world.rank], max_staleness, table, limit) for world in worlds]
        empty = parameters_of(*SHAPES, dtype=torch.float64)
        states = [state_of(empty, table, s, servers, optimizer, limit=2000) for s in range(servers)]
        self.servers = [ParameterServer(state, down[s], max_staleness) for s, state in enumerate(states)]

    def run(
        self, work: Callable[[Replica], Any], save: Callable[[int, int], None] = lambda server, step: None
    ) -> list[Any]:
        """Results by replica; what a rank raised instead, its links then closed, as those of a process that ended."""
        tasks = [partial(self._replica, work, replica) for replica in self.replicas]
        tasks += [partial(self._server, server, partial(save, number)) for number, server in enumerate(self.servers)]
        return in_threads(tasks)

    def _replica(self, work: Callable[[Replica], Any], replica: Replica) -> Any:
        try:
            if replica.number == 0 and replica.update.step == 0:
                replica.update.give()
            result = work(replica)
            replica.update.close()
        except TllmError as error:
            close(replica.update.servers.lines)
            return error
        except BaseException:  # a test that fails
            close(replica.update.servers.lines)
            raise
        return result

    def _server(self, server: ParameterServer, save: Callable[[int], None]) -> Any:
        try:
            server.run(save)
        except TllmError as error:
            close(server.lines)
            return error
        return server.updates


def weights_of(server: ParameterServer) -> list[tuple[str, Tensor]]:
    """Copies of the blocks of weights that a server keeps, with their names; of the table only row 20."""
    found = list[tuple[str, Tensor]]()
    for block in server.state.blocks():
        if block.name != f"p{TABLE}":
            found += [(block.name, block.tensor.clone())] if "/" not in block.name else []
        elif block.box[0][0] <= 20 < block.box[0][1]:
            found.append((block.name, block.tensor[20 - block.box[0][0]].clone()))
    return found


def units_of(servers: list[ParameterServer]) -> set[int]:
    """The units that were taken from the servers' weights."""
    return {round(-float(x) / UNIT) for server in servers for _, held in weights_of(server) for x in held.flatten()}


def close(lines: Any) -> None:
    for line in lines:
        line.send.close()
        line.recv.close()


def bit(replica: int, step: int) -> int:
    """The units of replica's gradient of a step, in runs of at most 3 replicas and 12 steps."""
    return 1 << (12 * replica + step - 1)


def everything(replicas: int, steps: int) -> int:
    return sum(bit(replica, step) for replica in range(replicas) for step in range(1, steps + 1))


@settings(max_examples=examples(40))
@given(
    st.sampled_from([0, 1, 2, ASYNCHRONOUS]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), max_size=18),
)
def test_no_read_is_older_than_allowed_and_every_push_is_taken_once(
    max_staleness: int, replicas: int, servers: int, turns: list[int]
) -> None:
    """`turns` let replicas go a step further, in any order; then all may run."""
    ranks, steps = Ranks(replicas, servers, max_staleness), 6
    gates = [threading.Semaphore(0) for _ in range(replicas)]
    for turn in [*turns, *[r for r in range(replicas) for _ in range(steps)]]:
        if turn < replicas and max_staleness != 0:
            gates[turn].release()

    def work(replica: Replica) -> None:
        def look() -> None:
            at, row = replica.update.step + 1, replica.number
            slack = at if max_staleness == ASYNCHRONOUS else max_staleness
            for held in replica.holds(row=20):
                for other in range(replicas):
                    must = at - 1 if other == row else max(at - 1 - slack, replica.update.clocks[other])
                    assert all(held & bit(other, step) for step in range(1, must + 1)), (at, other, bin(held))

        for step in range(1, steps + 1):
            if max_staleness != 0:
                gates[replica.number].acquire(timeout=PATIENCE)
            replica.step(bit(replica.number, step) * UNIT, replica.number, 20, look=look)

    results = ranks.run(work)
    assert units_of(ranks.servers) == {everything(replicas, steps)}
    assert results[replicas:] == [steps if max_staleness == 0 else steps * replicas] * servers


def test_one_that_stands_still_stops_nobody_who_need_not_wait() -> None:
    ranks, done = Ranks(2, 2, ASYNCHRONOUS), threading.Event()

    def work(replica: Replica) -> None:
        if replica.number == 0:
            for step in range(1, 13):
                replica.step(bit(0, step) * UNIT, 20)
            done.set()
        else:
            replica.step(
                bit(1, 1) * UNIT, 20, look=partial(done.wait, PATIENCE)
            )  # computes until the other has finished
            for step in range(2, 13):
                replica.step(bit(1, step) * UNIT, 20)

    ranks.run(work)
    assert units_of(ranks.servers) == {everything(2, 12)}


def test_the_fastest_waits_where_the_bound_is() -> None:
    ranks = Ranks(2, 1, max_staleness=2)
    waits, seen = threading.Event(), list[tuple[int, tuple[int, ...]]]()

    def work(replica: Replica) -> None:
        for step in range(1, 7):
            if replica.number == 0 and step == 4:
                waits.set()
            replica.step(
                bit(replica.number, step) * UNIT,
                20,
                look=partial(waits.wait, PATIENCE) if replica.number else lambda: None,
            )
            if replica.number == 0:
                seen.append((step, replica.update.clocks))

    ranks.run(work)
    assert [clocks[1] for step, clocks in seen[:3]] == [0, 0, 0], "three steps while the other takes none"
    assert all(clocks[1] >= step - 3 for step, clocks in seen)


@pytest.mark.parametrize("max_staleness", [0, ASYNCHRONOUS])
def test_only_rows_of_the_batch_travel(max_staleness: int) -> None:
    ranks = Ranks(2, 3, max_staleness)

    def work(replica: Replica) -> Tensor:
        if replica.number == 0:
            return replica.step(UNIT, 0)  # type: ignore[return-value]
        replica.step(UNIT, 2, 7, 7)
        rows = replica.parameters[TABLE].detach()
        return (~rows.isnan().any(1)).nonzero().flatten()

    assert ranks.run(work)[1].tolist() == [2, 7]


@pytest.mark.parametrize("table", [TABLE, None])
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_bytes_are_the_formula(table: int | None, max_staleness: int) -> None:
    replicas, servers, steps = 2, 3, 2
    ranks = Ranks(replicas, servers, max_staleness, table=table)

    def work(replica: Replica) -> int:
        before = replica.update.bytes_moved
        for _ in range(steps):
            replica.step(UNIT, 3, 9, 20, 9)
        return replica.update.bytes_moved - before

    size = sum(bucket.size for bucket in ranks.replicas[0].update.buckets.layout.buckets)
    padded = -(-21 * 5 // 16) * 16  # the table in whole lines
    touched = 3 if table is not None else 0
    elements = size - padded + 3 * 5 if table is not None else size
    words = [say.Pull(1, touched), say.Weights((0,) * replicas), say.Push(1, False, 1.0, 0.0)]
    words += [say.Square(1.0), say.Apply(1, 1.0, 1.0)] if max_staleness == 0 else []
    said = servers * sum(len(msgspec.msgpack.encode(word)) for word in words)
    want = steps * (8 * elements + 8 * elements + 4 * touched + said)
    assert ranks.run(work)[:replicas] == [want] * replicas


@pytest.mark.parametrize("max_staleness", [0, 2, ASYNCHRONOUS])
@pytest.mark.parametrize(
    ("amount", "loss", "what"),
    [
        (math.nan, 1.0, "the gradient of p0 on rank 1 is not finite; backward came to p3 on rank 1 first"),
        (UNIT, math.inf, "the loss is inf on rank 1"),
    ],
)
def test_what_is_no_number_ends_the_run_before_a_weight_moves(
    amount: float, loss: float, what: str, max_staleness: int
) -> None:
    ranks = Ranks(2, 2, max_staleness, optimizer=AdamW())

    def work(replica: Replica) -> None:
        replica.clear()
        replica.step(UNIT, 20)
        if replica.number == 1:
            replica.step(amount, 20, loss=loss)
        while True:  # until the other's end is heard of
            replica.step(UNIT, 20)

    first, second, *servers = ranks.run(work)
    said = f"step 2 went bad: {what}"
    assert isinstance(second, NonFiniteError) and second.message == said
    if max_staleness == 0:
        assert isinstance(first, NonFiniteError) and first.message == said
        assert [server.updates for server in ranks.servers] == [1, 1]
    else:
        assert first.message == f"rank 1 ended the run: {said}"
    assert all(isinstance(server, LinkClosed) for server in servers)
    assert any(f"ended the run: {said}" in server.message for server in servers)
    assert all(bool(x.isfinite().all()) for server in ranks.servers for _, x in weights_of(server))


def test_where_nobody_has_a_token_to_learn_weights_move_by_what_the_optimizer_remembers() -> None:
    """As those of replicas that sum their gradients themselves, with a gradient of 0."""
    ranks = Ranks(2, 2, optimizer=SGD(momentum=0.5))

    def work(replica: Replica) -> float:
        replica.step(UNIT, 20)
        return replica.step(UNIT)

    assert ranks.run(work) == [0.0, 0.0, 2, 2]
    assert units_of(ranks.servers) == {3}, "twice a unit, and half of that"


def test_gradients_too_large_together_end_the_run_on_every_replica() -> None:
    ranks = Ranks(2, 1)

    def work(replica: Replica) -> None:
        replica.clear()
        replica.step(torch.finfo(torch.float64).max, 20)

    results = ranks.run(work)
    assert all("the norm of the gradient is inf" in replica.message for replica in results[:2])


def test_a_replica_alone_is_clipped_by_its_own_norm() -> None:
    ranks, count = Ranks(2, 2, ASYNCHRONOUS, limit=2.0**-20), sum(math.prod(SHAPES[i]) for i in (0, 2, 3)) + 5

    first, second, *_ = ranks.run(lambda replica: replica.step((1 + replica.number) * 1.0, 20))
    assert (first, second) == (pytest.approx(math.sqrt(count)), pytest.approx(2 * math.sqrt(count)))
    for _, moved in (block for server in ranks.servers for block in weights_of(server)):
        torch.testing.assert_close(moved, torch.full_like(moved, -2 * 2.0**-20 / math.sqrt(count)))


@pytest.mark.parametrize("max_staleness", [0, 1, ASYNCHRONOUS])
def test_a_save_holds_every_step_before_it_and_none_after(max_staleness: int) -> None:
    ranks = Ranks(3, 2, max_staleness)
    saves: dict[tuple[int, int], set[int]] = {}
    moved = [threading.Event() for _ in ranks.servers]

    def save(server: int, step: int) -> None:
        moved[server].clear()
        moved[server].wait(0.05)  # a chance to go on too early
        saves[server, step] = units_of([ranks.servers[server]])

    def work(replica: Replica) -> list[int]:
        updates = [replica.update.save()]
        for step in range(1, 7):
            replica.step(bit(replica.number, step) * UNIT, 20)
            for event in moved:
                event.set()
            if step % 2 == 0:
                updates.append(replica.update.save())
        return updates

    results = ranks.run(work, save)
    assert results[:3] == [[0, 2, 4, 6] if max_staleness == 0 else [0, 6, 12, 18]] * 3
    assert sorted(saves) == [(server, step) for server in (0, 1) for step in (0, 2, 4, 6)]
    assert all(units == {everything(3, step)} for (_, step), units in saves.items())


def test_a_run_goes_on_from_what_servers_held() -> None:
    """AdamW's count, clocks and weights: three steps and three more are six."""
    want = Ranks(2, 2, optimizer=AdamW())
    want.run(lambda replica: [replica.step(1.0 + step, 20) for step in range(6)])
    first, second = Ranks(2, 2, optimizer=AdamW()), Ranks(2, 2, optimizer=AdamW())
    first.run(lambda replica: [replica.step(1.0 + step, 20) for step in range(3)])
    for old, new in zip(first.servers, second.servers, strict=True):
        for source, target in zip(old.state.state_slices(), new.state.state_slices(), strict=True):
            target.flat.copy_(source.flat)
        new.state.take_weights()
        new.resume(3, old.updates)
    for replica in second.replicas:
        replica.update.step = 3
    second.run(lambda replica: [replica.step(1.0 + step, 20) for step in range(3, 6)])
    for one, other in zip(want.servers, second.servers, strict=True):
        assert one.updates == other.updates == 6
        for a, b in zip(one.state.state_slices(), other.state.state_slices(), strict=True):
            assert torch.equal(a.flat, b.flat)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_lost_replica_is_named_to_everybody(servers: int, max_staleness: int) -> None:
    ranks = Ranks(3, servers, max_staleness)

    def work(replica: Replica) -> None:
        for step in range(1, 7):
            if replica.number == 1 and step == 3:
                close(replica.update.servers.lines)
            replica.step(UNIT, 20)

    results = ranks.run(work)
    for rank in (0, *range(2, 3 + servers)):
        assert isinstance(results[rank], LinkClosed) and "went away" in results[rank].message, results[rank]
        # With more servers one may first find a replica gone that another had ended by then.
        assert servers > 1 or "rank 1 went away" in results[rank].message, results[rank]
    assert any("rank 1 went away" in result.message for result in results[3:])


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_lost_server_is_named(replicas: int) -> None:
    ranks = Ranks(replicas, 2)

    def work(replica: Replica) -> None:
        for step in range(1, 7):
            if step == 3 and replica.number == 0:
                close(ranks.servers[1].lines)
            replica.step(UNIT, 20)

    results = ranks.run(work)
    for result in results[: replicas + 1]:
        assert isinstance(result, LinkClosed) and "went away" in result.message, result
    assert any(f"rank {replicas + 1} went away" in result.message for result in results[:replicas])


def test_a_save_that_fails_ends_everybody_with_its_reason() -> None:
    ranks = Ranks(2, 2)

    def save(server: int, step: int) -> None:
        if server == 1:
            raise TllmError("the disk burns")

    def work(replica: Replica) -> None:
        for _ in range(3):
            replica.step(UNIT, 20)
            replica.update.save()

    results = ranks.run(work, save)
    assert results[3].message == "the disk burns"
    assert "rank 3 ended the run: the disk burns" in results[0].message


def test_a_replica_that_fails_says_why_to_everybody() -> None:
    ranks = Ranks(2, 2)

    def work(replica: Replica) -> None:
        for step in range(1, 4):
            if (replica.number, step) == (1, 2):
                replica.update.close(ConfigError("the data has come to an end", "give more"))
                raise ConfigError("the data has come to an end")
            replica.step(UNIT, 20)

    results = ranks.run(work)
    for rank in (0, 2, 3):
        assert results[rank].message == "rank 1 ended the run: the data has come to an end"
        assert results[rank].hint == "give more"


def test_what_is_no_message_or_out_of_turn_is_refused() -> None:
    def rogue(tell: Callable[[ReplicaLinks], None]) -> Any:
        up, down = lines_between(1, 1)
        server = ParameterServer(state_of(parameters_of(*SHAPES), TABLE, 0, 1, PLAIN), down[0])
        server.resume(0, 0)
        tell(up[0][0])
        with pytest.raises(FrameError) as caught:
            server.run()
        return caught.value.message

    assert "no message" in rogue(lambda line: line.send.send_bytes(b"\xc1"))
    assert "pushed step 2 after step 0" in rogue(lambda line: say.send(line.send, say.Push(2, True, 1.0, 0.0)))
    assert "asks for 22 rows; rank 1 holds 21" in rogue(lambda line: say.send(line.send, say.Pull(1, 22)))

    def far(line: ReplicaLinks) -> None:
        say.send(line.send, say.Pull(1, 1))
        line.send.send(torch.tensor([21], dtype=torch.int32))

    assert "asks for rows 21 to 21" in rogue(far)


def test_the_same_over_tcp() -> None:
    replicas, servers = 2, 2
    groups = tcp_groups(replicas + servers)
    of = [{other: ReplicaLinks(group.send[other], group.recv[other]) for other in group.send} for group in groups]
    up = [[of[r][replicas + s] for s in range(servers)] for r in range(replicas)]
    down = [[of[replicas + s][r] for r in range(replicas)] for s in range(servers)]
    ranks = Ranks(replicas, servers, lines=(up, down))

    def work(replica: Replica) -> None:
        for step in range(1, 4):
            replica.step(bit(replica.number, step) * UNIT, replica.number, 20)

        def look() -> None:
            """The other pushes only once both servers have said that they end: who hears of one server's end amid a
            push goes away without a word, and the other server might hear of that before it hears of rank 1's end."""
            lines = replica.update.servers.lines
            assert set(replica.holds(row=20)) == {everything(replicas, 3)}
            if replica.number == 1:
                close(lines)
            else:
                assert all(line.recv.wait(PATIENCE) for line in lines)

        replica.step(UNIT, 20, look=look)

    results = ranks.run(work)
    for rank in (0, 2, 3):
        assert "rank 1 went away" in results[rank].message, results[rank]
    for group in groups:
        group.close()
