"""Pages that go to disk and come from it, beside batches: nothing is lost, mixed up, or waited for by others.

`FakeRing` refuses every slot that does not hold what the sequence itself would have written; here a disk has the
contents of slots under the names that messages give them.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from hashlib import blake2b

import msgspec
import pytest

from tests.unit.engine.kits import FakeRing, expected, limits, request
from tllm.core.errors import FrameError
from tllm.engine.page_moves import PageMoves, PagesInFlight
from tllm.engine.pages.page_messages import FetchPages, PageChain, PageMessage, SavePages, TakePages, salt_digest
from tllm.engine.schedule import prefix_cache
from tllm.engine.schedule.batch import decode, encode
from tllm.engine.schedule.prefix_cache import PageContent
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.schedule.stored_prefixes import MAX_LOADS
from tllm.engine.stage_pages import StagePages, check_pages
from tllm.spec.request import Output, PoolingParams, Request, SamplingParams

PROMPT = [*range(1, 11)]  # two full pages of four, and half of one

Slots = list[tuple[str, tuple[int, ...]]]


class FakeDisk:
    """What all ranks' disks have of each page; `fails` says which names some rank turns out to lack."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Slots] = {}
        self.fails: set[bytes] = set()
        self.room = True

    page_bytes = 1 << 20

    def keeps(self, name: bytes) -> bool:
        return name in self.pages

    def may_have(self, name: bytes) -> bool:
        return name in self.pages

    @property
    def has_room(self) -> bool:
        return self.room

    def wait_for_room(self, seconds: float) -> None:
        self.room = True

    def is_read(self, number: int) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        return {}


class FakeStage:
    """Does what a message asks for with the slots of a `FakeRing`, in order with its batches."""

    def __init__(self, disk: FakeDisk, ring: FakeRing, most_pages: int = 3) -> None:
        self.store, self.ring, self.most_pages = disk, ring, most_pages
        self.fetched: dict[int, FetchPages] = {}
        self.sent: list[PageMessage] = []

    check_back = StagePages.check_back

    def start(self, message: PageMessage) -> TakePages | None:
        assert decode(encode(message)) == message
        check_pages(message, self.ring.scheduler.limits)
        self.sent.append(message)
        match message:
            case SavePages(chain=chain):
                for place, (name, slots) in enumerate(zip(chain.names, self._slots(message.page_table), strict=True)):
                    whole = [self.ring.slots[slot] for slot in slots]
                    ids = array("I", [text[1][-1] for text in whole]).tobytes()
                    assert chain.tokens_of(place) == ids, "the page holds other tokens than its name says"
                    assert len(whole[-1][1]) == (chain.first + place + 1) * len(slots)
                    assert {salt_digest(salt) for salt, _ in whole} == {chain.salt}
                    self.store.pages[name] = whole
                    self.store.fails.discard(name)
                return None
            case FetchPages():
                self.fetched[message.number] = message
                return None
        names = self.fetched.pop(message.number).chain.names
        taken = 0
        for name, slots in zip(names, self._slots(message.page_table), strict=False):
            if name in self.store.fails:
                break
            self.ring.slots.update(zip(slots, self.store.pages[name], strict=True))
            taken += 1
        return msgspec.structs.replace(message, num_taken=min(taken, message.num_taken))

    def _slots(self, page_table: tuple[tuple[int, int], ...]) -> list[range]:
        size = self.ring.scheduler.limits.page_size
        return [range(p * size, (p + 1) * size) for first, count in page_table for p in range(first, first + count)]


class DiskRing(FakeRing):
    """A ring whose driver keeps pages on a disk. With `late` what comes back is taken a turn later."""

    def __init__(self, disk: FakeDisk, depth: int = 1, late: bool = False, **sizes: int) -> None:
        super().__init__(Scheduler(limits(**sizes), depth))
        self.disk, self.stage, self.late = disk, FakeStage(disk, self), late
        self.moves = PageMoves(self.stage, self.scheduler.pages)  # type: ignore[arg-type]
        self.back: deque[tuple[PagesInFlight, TakePages]] = deque()

    def step(self) -> list[Output]:
        while self.back:
            self.moves.accept(*self.back.popleft())
        while len(self.in_flight) < self.scheduler.depth:
            step = self.scheduler.schedule()
            self._move(step is None and not self.in_flight)
            if step is None:
                break
            self.in_flight.append((step, self._compute(step)))
            self.sizes.append([entry.count for entry in step.batch.entries])
        self.scheduler.pages.pool.check()
        return self.finish() if self.in_flight else []

    def run(self) -> list[Output]:
        outputs = []
        for _ in range(10_000):
            if not (self.scheduler.has_work or self.in_flight or self.moves.has_work or self.back):
                return outputs
            outputs += self.step()
        raise AssertionError("the driver turns for ever")

    def _move(self, is_idle: bool) -> None:
        start = self.stage.start
        if self.late:

            def later(message: PageMessage) -> TakePages | None:
                came = start(message)
                if came is not None:
                    results.append(came)
                return None

            results: list[TakePages] = []
            self.stage.start = later  # type: ignore[method-assign]
        sent = self.moves.send(is_idle)
        self.stage.start = start  # type: ignore[method-assign]
        if self.late:
            self.back.extend(zip(sent, results, strict=True))


def cached(ring: FakeRing, asked: Request) -> int:
    """Serve it; how many tokens of its prompt were found, as its first output says."""
    ring.scheduler.add(asked)
    outputs = ring.run()
    assert [token for one in outputs for token in one.token_ids] == expected(asked)[0]
    assert outputs[0].request_id == asked.id and not any(one.cached_tokens for one in outputs[1:])
    return outputs[0].cached_tokens


def salted(asked: Request, salt: str) -> Request:
    return msgspec.structs.replace(asked, cache_salt=salt)


def external(ring: FakeRing) -> tuple[float, float, float, float]:
    stats = ring.scheduler.stats()
    names = ("prefix_queries", "prefix_hits", "external_prefix_queries", "external_prefix_hits")
    return tuple(stats[name] for name in names)  # type: ignore[return-value]


@pytest.mark.parametrize("late", [False, True])
def test_a_chat_goes_on_after_a_restart(late: bool) -> None:
    disk = FakeDisk()
    first = request("a", PROMPT, 9)
    assert cached(DiskRing(disk, late=late), first) == 0
    said = [*PROMPT, *expected(first)[0], 7, 7, 7]  # 18 tokens were computed: all but the last of the reply
    ring = DiskRing(disk, late=late)
    assert cached(ring, request("b", said)) == 16
    assert ring.sizes[0] == [6], "what came from disk is not computed"
    assert external(ring) == (22, 0, 22, 16)
    assert cached(ring, request("c", said)) == 20, "from memory now"
    assert external(ring) == (44, 20, 24, 16), "a hit is counted where it was found"


def test_the_cache_comes_first_and_the_disk_goes_on_from_there() -> None:
    disk = FakeDisk()
    cached(DiskRing(disk), request("a", [*range(1, 31)]))
    ring = DiskRing(disk)
    disk.pages, whole = dict(list(disk.pages.items())[:2]), disk.pages
    assert cached(ring, request("d", [*range(1, 31)])) == 8
    ring.scheduler.pages.pool.check()
    disk.pages = whole
    assert cached(ring, request("e", [*range(1, 31)])) == 28
    assert external(ring)[1] == 28, "the pages that were computed after those from disk are in memory"


def test_salts_and_other_prefixes_are_not_found() -> None:
    disk = FakeDisk()
    cached(DiskRing(disk), salted(request("a", PROMPT), "one"))
    ring = DiskRing(disk)
    for asked in (request("b", PROMPT), salted(request("c", PROMPT), "two"), request("d", [9, *PROMPT[1:]])):
        assert cached(ring, asked) == 0
    assert cached(ring, salted(request("e", PROMPT), "one")) == 8


def test_pages_are_saved_before_they_are_written_over() -> None:
    """A disk without room for more: pages wait, and go when they are to be written over."""
    disk = FakeDisk()
    ring = DiskRing(disk, num_pages=8)
    prompts = [[n, *range(2, 21)] for n in range(5)]
    for n, prompt in enumerate(prompts):
        disk.room = False
        ring.scheduler.add(request(f"r{n}", prompt, 4))
        while ring.scheduler.has_work:
            ring.step()
            disk.room = False
    assert len(disk.pages) >= 3 * 5, "what was not written over may wait"
    ring = DiskRing(disk)
    assert [cached(ring, request(f"s{n}", prompt)) for n, prompt in enumerate(prompts[1:4])] == [16] * 3


def test_a_sequence_waits_for_its_disk_and_those_behind_it_do_not() -> None:
    disk = FakeDisk()
    cached(DiskRing(disk), request("a", PROMPT))
    ring = DiskRing(disk, late=True, max_num_batched_tokens=8)
    disk.is_read = lambda number: False  # type: ignore[method-assign]
    ring.scheduler.add(request("b", PROMPT))
    ring.scheduler.add(request("twin", PROMPT))
    ring.scheduler.add(request("c", [40, 41, 42], 6))
    outputs = ring.run()
    ends = [one.request_id for one in outputs if one.finish_reason]
    assert ends[0] == "c" and set(ends[1:]) == {"b", "twin"}
    assert {one.request_id: one.cached_tokens for one in outputs if one.cached_tokens} == {"b": 8, "twin": 8}
    assert sum(isinstance(message, FetchPages) for message in ring.stage.sent) == 1, "twins have it read once"


def test_what_some_rank_lacks_is_computed_and_saved_again() -> None:
    disk = FakeDisk()
    prompt = [*range(1, 31)]
    cached(DiskRing(disk), request("a", prompt))
    lacking = list(disk.pages)[4]
    disk.fails.add(lacking)
    ring = DiskRing(disk)
    assert cached(ring, request("b", prompt)) == 16
    assert external(ring) == (30, 0, 30, 16)
    assert lacking in [name for one in ring.stage.sent if isinstance(one, SavePages) for name in one.chain.names]
    assert not disk.fails
    assert cached(DiskRing(disk), request("c", prompt)) == 28


def test_a_cancelled_sequence_lets_go_of_what_is_read_for_it() -> None:
    disk = FakeDisk()
    prompt = [*range(1, 31)]
    cached(DiskRing(disk), request("a", prompt))
    for late in (False, True):
        for steps in range(4):
            ring = DiskRing(disk, late=late)
            ring.stage.most_pages = 1
            ring.scheduler.add(request("b", prompt))
            for _ in range(steps):
                ring.step()
            ring.scheduler.cancel("b")
            ring.run()
            assert ring.scheduler.pages.pool.num_free == ring.scheduler.limits.num_pages
            assert not ring.stage.fetched, "nothing that was read is left with the ranks"
            assert cached(ring, request("c", prompt)) == 28


@pytest.mark.parametrize("output_ids", [(), (7,)])
def test_pages_are_saved_once_the_model_came_to_a_token_after_them(output_ids: tuple[int, ...]) -> None:
    """Those of a prompt that is cancelled may hold what are no numbers, and every later prompt read them from disk."""
    disk, prompt = FakeDisk(), [*range(1, 31)]
    ring = DiskRing(disk)
    ring.scheduler.add(msgspec.structs.replace(request("a", prompt), output_ids=output_ids))
    assert not ring.step() and ring.scheduler.cancel("a")
    assert not ring.run() and not disk.pages
    assert cached(ring, request("b", prompt)) == 16, "in memory they are found"
    assert len(disk.pages) == (30 + 3) // 4


def test_pages_of_a_pooled_prompt_are_saved() -> None:
    disk = FakeDisk()
    ring = DiskRing(disk, hidden_size=1)
    params = SamplingParams(max_tokens=1, temperature=0)
    ring.scheduler.add(Request(id="m", prompt_ids=(*range(1, 31),), params=params, pooling=PoolingParams(kind="mean")))
    assert [output.pooled for output in ring.run()] == [(15.5,)]
    assert len(disk.pages) == 30 // 4


def test_prompts_whose_log_probabilities_are_wanted_are_computed() -> None:
    disk = FakeDisk()
    cached(DiskRing(disk), request("a", PROMPT))
    ring = DiskRing(disk)
    assert cached(ring, request("b", PROMPT, prompt_logprobs=0)) == 0
    assert external(ring) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_gives_its_own_tokens(seed: int) -> None:
    """Small caches, several servers one after another on one disk, pages that fail, cancellations, names of 256 values.

    With so few names a page of another prefix is found often, and must be told by its content.
    """
    rng, disk = random.Random(seed), FakeDisk()
    hits = 0.0
    for _ in range(4):
        ring = DiskRing(disk, rng.choice((1, 2, 3)), rng.random() < 0.5, num_pages=rng.choice((16, 24)), max_num_seqs=3)
        ring.stage.most_pages = rng.choice((1, 3))
        told: dict[str, Request] = {}
        outputs: list[Output] = []
        for n in range(30):
            head = [rng.randrange(2)] * rng.randrange(1, 30)
            asked = salted(
                request(f"r{n}", [*head, *range(rng.randrange(1, 8))], rng.randrange(1, 12)), rng.choice("ab")
            )
            ring.scheduler.add(asked)
            told[asked.id] = asked
            for _ in range(rng.randrange(4)):
                disk.room = rng.random() < 0.7
                disk.fails = {name for name in disk.pages if rng.random() < 0.05}
                outputs += ring.step()
            if rng.random() < 0.1 and ring.scheduler.cancel(asked.id):
                del told[asked.id]
        outputs += ring.run()
        for name, asked in told.items():
            ids = [token for one in outputs if one.request_id == name for token in one.token_ids]
            assert ids == expected(asked)[0]
        hits += external(ring)[3]
        assert ring.scheduler.pages.pool.num_free == ring.scheduler.limits.num_pages
    assert hits > 100


def test_names_are_of_all_that_a_page_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that ends after a few bits the disk has other prefixes' pages under a page's name; ranks compare the
    content, as `test_rank_pages` shows, and here the message carries it."""

    def weak(content: PageContent) -> bytes:
        return bytes([blake2b(content.parent + content.token_ids).digest()[0] % 4]) * 32

    monkeypatch.setattr(prefix_cache, "page_name", weak)
    disk = FakeDisk()
    cached(DiskRing(disk), request("a", PROMPT))
    ring = DiskRing(disk)
    ring.scheduler.add(salted(request("b", [9, *PROMPT[1:]]), "salt"))
    ring.scheduler.schedule()
    disk.fails = set(disk.pages)
    ring.moves.send(True)
    fetches = [message for message in ring.stage.sent if isinstance(message, FetchPages)]
    for message in fetches:
        assert message.chain.salt == salt_digest("salt") != salt_digest("")
        assert message.chain.token_ids[:16] == array("I", [9, *PROMPT[1:4]]).tobytes()


CHAIN = PageChain((b"n" * 32, b"m" * 32), 0, bytes(32), bytes(2 * 4 * 4), salt_digest(""))


@pytest.mark.parametrize(
    "message",
    [
        SavePages(CHAIN, ((15, 2),)),
        SavePages(CHAIN, ((0, 1),)),
        SavePages(CHAIN, ((0, 0), (0, 2))),
        SavePages(msgspec.structs.replace(CHAIN, token_ids=bytes(31)), ((0, 2),)),
        FetchPages(1, msgspec.structs.replace(CHAIN, names=(), token_ids=b"")),
        FetchPages(1, msgspec.structs.replace(CHAIN, names=(b"n" * 32,) * 5, token_ids=bytes(5 * 16))),
        TakePages(1, ((16, 1),), 1),
    ],
)
def test_messages_about_other_pages_than_there_are_are_refused(message: PageMessage) -> None:
    with pytest.raises(FrameError):
        check_pages(message, limits())


def test_what_comes_back_must_be_what_was_sent() -> None:
    sent = TakePages(3, ((0, 2),), 2)
    stage = StagePages.__new__(StagePages)
    assert stage.check_back(sent, TakePages(3, ((0, 2),), 1)).num_taken == 1
    for came in (TakePages(4, ((0, 2),), 2), TakePages(3, ((1, 2),), 2), TakePages(3, ((0, 2),), 3), object()):
        with pytest.raises(FrameError):
            stage.check_back(sent, came)


class CountedDisk(FakeDisk):
    """It counts the pages that it is asked for."""

    asked = 0

    def may_have(self, name: bytes) -> bool:
        self.asked += 1
        return super().may_have(name)


def test_of_those_that_wait_for_their_turn_at_the_disk_a_step_looks_at_one_page_each() -> None:
    """All their pages were looked up in each step: 200 prompts of 8,192 tokens took it 500 ms, for which the replies of
    others waited."""

    class FullDisk(CountedDisk):
        def may_have(self, name: bytes) -> bool:
            super().may_have(name)
            return True

    disk = FullDisk()
    scheduler = Scheduler(limits(num_pages=400, max_model_len=200))
    scheduler.pages.keep_on_disk(disk, part_pages=2)
    for number in range(20):
        scheduler.add(request(str(number), [number + 1] * 100))
    assert scheduler.schedule() is None and scheduler.pages.stored is not None
    assert len(scheduler.pages.stored.loads) == MAX_LOADS
    disk.asked = 0
    assert scheduler.schedule() is None
    assert disk.asked == 20 - MAX_LOADS


def test_a_prompt_that_waits_for_room_is_looked_up_on_disk_by_one_page_a_step() -> None:
    disk, prompt = CountedDisk(), [*range(1, 46)]
    cached(DiskRing(disk), request("a", prompt, 1))
    ring = DiskRing(disk)
    ring.scheduler.add(request("long", [40] * 21, 30))
    ring.step()
    ring.scheduler.add(request("b", prompt))
    disk.asked = 0
    for _ in range(20):
        ring.step()
    assert len(ring.scheduler.waiting) == 1 and 1 <= disk.asked <= 20
    outputs = [one for one in ring.run() if one.request_id == "b"]
    assert outputs[0].cached_tokens == 44
