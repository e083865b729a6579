"""Prompts that begin alike share pages: what is found, what never is, and that a page is found for its own tokens only.

`FakeRing` refuses every slot that does not hold what the sequence itself would have written.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from tests.unit.engine.kits import FakeRing, FreeRows, expected, limits, repeating, request
from tests.unit.engine.schedule.test_scheduler import gathered
from tllm.engine.schedule import prefix_cache
from tllm.engine.schedule.prefix_cache import PageContent
from tllm.engine.schedule.scheduler import SMALLEST_CHUNK, Scheduler
from tllm.spec.request import Output, Request, Scheduling

PROMPT = [*range(1, 11)]  # two full pages of four, and half of one


def salted(asked: Request, salt: str) -> Request:
    return msgspec.structs.replace(asked, cache_salt=salt)


class Served:
    """A scheduler and its ring, to be asked for one thing after another."""

    def __init__(self, depth: int = 1, **sizes: int) -> None:
        self.scheduler = Scheduler(limits(**sizes), depth)
        self.ring = FakeRing(self.scheduler)

    def __call__(self, *asked: Request) -> list[Output]:
        for one in asked:
            self.scheduler.add(one)
        outputs = self.ring.run()
        assert {name: ids for name, (ids, _) in gathered(outputs).items()} == {
            one.id: expected(one, model=self.ring.model)[0] for one in asked
        }
        self.scheduler.pages.pool.check()
        return outputs

    def cached(self, asked: Request) -> int:
        """Serve it; how many tokens of its prompt were found, as its first output says."""
        first, *more = self(asked)
        assert not any(one.cached_tokens for one in more)
        return first.cached_tokens


def test_full_pages_of_a_prompt_are_found_and_the_last_token_is_computed() -> None:
    served = Served()
    assert served.cached(request("a", PROMPT)) == 0
    assert served.cached(request("b", PROMPT)) == 8
    assert served.ring.sizes[-4] == [2], "what was found is not computed again"
    assert served.cached(request("c", PROMPT[:8])) == 4, "the last token of a prompt is always computed"
    assert served.cached(request("d", PROMPT[:9])) == 8
    assert served.cached(request("e", [*PROMPT[:5], 40, 41, 42, 43])) == 4, "a page is found whole or not at all"
    assert served.cached(request("f", [9, *PROMPT[1:]])) == 0
    assert served.cached(request("g", PROMPT[4:])) == 0, "the same page after nothing else"
    assert served.scheduler.stats()["prefix_queries"] == 10 + 10 + 8 + 9 + 9 + 10 + 6
    assert served.scheduler.stats()["prefix_hits"] == 8 + 4 + 8 + 4


def test_the_next_turn_of_a_chat_finds_the_reply_too() -> None:
    served = Served()
    first = request("a", PROMPT, 9)
    reply, _ = expected(first)
    served(first)
    # 18 tokens were computed: all but the last of the reply
    assert served.cached(request("b", [*PROMPT, *reply, 7, 7, 7])) == 16


def test_several_that_come_together_share_what_the_first_computes() -> None:
    """n replies to one prompt: the others find what their own batch holds, and those that are under way."""
    served = Served(depth=3, max_num_batched_tokens=16, num_pages=64)
    prompt = [*range(1, 41)]
    outputs = served(*(request(f"r{i}", prompt, 6) for i in range(3)))
    cached = {one.request_id: one.cached_tokens for one in outputs if one.cached_tokens}
    assert cached == {"r1": 36, "r2": 36}, "r1 begins in the batch that computes the last eight tokens of r0's prompt"


@pytest.mark.parametrize("depth", [1, 3])
def test_the_choices_of_a_request_compute_its_prompt_once(depth: int) -> None:
    """Also where there is room for all of them in one batch: what it computes beside is a token of each."""
    served = Served(depth=depth, max_num_batched_tokens=200, num_pages=64, max_num_seqs=8)
    prompt, choices, reply = [*range(1, 43)], 5, 4
    outputs = served(*(request(f"choice-{i}", prompt, reply) for i in range(choices)))
    prompts = len(prompt) + (choices - 1) * 2  # ten full pages are found, and two tokens lie beyond
    assert sum(map(sum, served.ring.sizes)) == prompts + choices * (reply - 1)
    assert sorted(one.cached_tokens for one in outputs if one.cached_tokens) == [40] * (choices - 1)


def test_a_salt_is_kept_apart_within_a_batch_too() -> None:
    served = Served(max_num_batched_tokens=200, num_pages=64)
    outputs = served(request("a", PROMPT), salted(request("b", PROMPT), "two"))
    assert not any(one.cached_tokens for one in outputs)


def test_a_salt_keeps_its_prefixes_to_itself() -> None:
    served = Served()
    assert served.cached(salted(request("a", PROMPT), "one")) == 0
    assert served.cached(salted(request("b", PROMPT), "two")) == 0
    assert served.cached(request("c", PROMPT)) == 0
    assert served.cached(salted(request("d", PROMPT), "two")) == 8


def test_nothing_is_kept_where_it_is_switched_off() -> None:
    served = Served(enable_prefix_caching=False)
    assert [served.cached(request(name, PROMPT)) for name in "ab"] == [0, 0]
    assert "prefix_hits" not in served.scheduler.stats()


def test_log_probabilities_of_a_prompt_are_computed() -> None:
    served = Served()
    served(request("a", PROMPT))
    assert served.cached(request("b", PROMPT, prompt_logprobs=0)) == 0
    assert served.scheduler.stats()["prefix_queries"] == len(PROMPT), "nobody looked"
    assert served.cached(request("c", PROMPT)) == 8


def test_a_hash_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that has four values pages of other tokens, other prefixes and other salts have the same name."""

    def weak(content: PageContent) -> bytes:
        return bytes([blake2b(b"".join((content.parent, content.token_ids, content.salt.encode()))).digest()[0] % 4])

    monkeypatch.setattr(prefix_cache, "page_name", weak)
    served, hits = Served(max_num_batched_tokens=5, num_pages=60), 0
    for i in range(60):
        prompt = [(7 * i + place // 3) % 5 for place in range(9)]
        hits += served.cached(salted(request(f"r{i}", prompt), "one" if i % 2 else ""))
    assert hits > 0


def test_a_contents_name_follows_from_all_of_it() -> None:
    contents = [
        PageContent("", bytes(32), bytes(16)),
        PageContent("x", bytes(32), bytes(16)),
        PageContent("", bytes([*bytes(31), 1]), bytes(16)),
        PageContent("", bytes(32), bytes([*bytes(15), 1])),
    ]
    assert len({prefix_cache.page_name(one) for one in contents}) == len(contents)


def test_a_rejected_draft_token_is_in_no_page_that_is_found() -> None:
    served = Served(num_speculative_tokens=6, num_pages=64)
    served.ring.model = repeating
    assert served.scheduler.speculation is not None
    served.scheduler.speculation.cost = FreeRows()
    pages: set[bytes] = set()
    for i in range(12):
        first = request(f"a{i}", [10 + i, 20 + i, 30 + i] * 2, 15)
        reply, _ = expected(first, model=repeating)
        served(first)
        second = request(f"b{i}", [*first.prompt_ids, *reply], 3)
        assert served.cached(second) == 20
        text = array("I", [*second.prompt_ids, *expected(second, model=repeating)[0]])
        pages |= {text[at : at + 4].tobytes() for at in range(0, 24, 4)}
    assert served.scheduler.pages.prefix_cache is not None
    contents = served.scheduler.pages.prefix_cache._contents.values()
    assert {content.token_ids for _, content in contents} <= pages, "only what the texts have in the end"
    stats = served.scheduler.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


def test_accepted_draft_tokens_are_found_though_the_reply_ended_with_them() -> None:
    served = Served(num_speculative_tokens=6)
    served.ring.model = lambda ids: ids[-3]
    served(request("a", [1, 2, 3] * 3, 8))
    assert served.cached(request("b", [1, 2, 3] * 6, 2)) == 16
    stopped = request("c", [4, 5, 6] * 2, 10, stop_token_ids=(6,))
    outputs = served(stopped)
    assert [one.token_ids for one in outputs] == [(4,), (5, 6)]


def test_who_is_set_back_finds_its_own_pages_again() -> None:
    computed = []
    for caching in (True, False):
        served = Served(num_pages=11, max_num_seqs=3, max_model_len=40, enable_prefix_caching=caching)
        served(*(request(f"r{i}", [40 + i, *range(2, 7)], 10 + 5 * i) for i in range(3)))
        assert served.scheduler.preemptions == 1
        computed.append(sum(sum(sizes) for sizes in served.ring.sizes))
        if caching:
            stats = served.scheduler.stats()
            assert (stats["prefix_queries"], stats["prefix_hits"]) == (18, 0), "only beginnings count"
    assert computed[0] < computed[1] - 4, computed


def test_what_was_lost_and_computed_anew_is_found_too() -> None:
    served = Served(num_pages=6, max_num_seqs=3, max_model_len=24)
    asked = [request(f"r{i}", [40 + i, *range(2, 7)], 16) for i in range(3)]
    served(*asked)
    assert served.scheduler.preemptions > 0
    again = [*asked[2].prompt_ids, *expected(asked[2])[0]]
    assert served.cached(request("again", again, 1)) == 20


def test_pages_are_given_up_for_those_that_need_room() -> None:
    served = Served(num_pages=6)
    served(request("a", PROMPT))
    served(request("b", [40, *range(20)], 4))  # six pages: the whole cache
    assert served.cached(request("c", PROMPT)) == 0


def test_what_is_cancelled_leaves_what_was_right() -> None:
    served = Served(depth=2, max_num_batched_tokens=8, max_num_seqs=2)
    served.scheduler.add(request("a", [*range(1, 31)], 4))
    served.ring.start()
    served.ring.start()
    served.scheduler.cancel("a")
    served.scheduler.pages.pool.check()
    assert served.cached(request("b", [*range(1, 31)], 4)) == 16, "two batches of eight were under way"


def test_a_chunk_that_is_cut_ends_with_a_page_where_that_costs_little() -> None:
    scheduler = Scheduler(limits(num_pages=600, max_num_batched_tokens=150, max_model_len=2100))
    ring = FakeRing(scheduler)
    scheduler.add(request("a", [7] * 500, 1))
    ring.run()
    assert ring.sizes == [[148], [148], [148], [56]]
    assert min(148, SMALLEST_CHUNK) == SMALLEST_CHUNK


def test_a_prompt_that_waits_is_looked_up_by_what_has_changed_alone() -> None:
    """All of its pages were looked up in each step. Meanwhile some are evicted, and others come."""

    class Counted(list[int]):
        slices = 0

        def __getitem__(self, at: Any) -> Any:
            self.slices += isinstance(at, slice)
            return super().__getitem__(at)

    served, prompt = Served(num_pages=24, max_model_len=100), [n % 50 for n in range(1, 86)]  # it takes 22 pages
    scheduler, cache, found = served.scheduler, served.scheduler.pages.prefix_cache, list[int]()
    assert cache is not None
    served(request("a", prompt[:33], 1))
    others = [request("long", [40] * 17, 38), request("longer", prompt[:57], 1), request("other", [41] * 17, 4)]
    for number, one in enumerate(others):
        scheduler.add(msgspec.structs.replace(one, scheduling=Scheduling(priority=-1)))
        served.ring.step()
        if number == 0:
            scheduler.add(request("waits", prompt))
            waiting = scheduler.by_id["waits"]
            waiting.token_ids = looked_up = Counted(prompt)
        for _ in range(8):
            served.ring.step()
            assert waiting in scheduler.waiting
            cache.check()
            found.append(len(cache.find(waiting)))
    assert found[0] == 8 < max(found) > found[-1], found
    assert looked_up.slices <= max(found) + 2 * len(found) + 2, "each page once, and at each look the one after them"
    outputs = served.ring.run()
    assert gathered(outputs)["waits"][0] == expected(request("waits", prompt))[0]
    assert next(one.cached_tokens for one in outputs if one.request_id == "waits") == 4 * found[-1]
    assert not cache._found
