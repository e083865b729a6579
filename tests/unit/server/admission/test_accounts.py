"""Token buckets and what requests are charged, on a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from tllm.core.errors import ConfigError
from tllm.server.admission.account import FIRST_REPLY_TOKENS, Account, ApiKey, duration
from tllm.server.admission.drain_rate import KEPT, LONGEST_SECONDS, WINDOW_SECONDS, DrainRate
from tllm.server.admission.token_bucket import RateLimits, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, **limits: int) -> Account:
    return Account(ApiKey("alice", b"", RateLimits(**limits)), clock)


def use(account: Account, prompt: int, generated: int, max_tokens: int = 1000, cached: int = 0) -> None:
    assert account.refusal(prompt, max_tokens) is None
    with account.charged(1, prompt, max_tokens) as charge:
        charge.use(generated, cached)


def test_a_bucket_fills_at_its_rate_and_holds_a_minute() -> None:
    clock = Clock()
    bucket = TokenBucket(120, clock)
    bucket.take(120)
    assert bucket.level == 0 and bucket.seconds_to(1) == 0.5 and bucket.seconds_to_full == 60
    clock.now += 30
    assert bucket.level == 60
    clock.now += 1000
    assert bucket.level == 120, "never more than a minute's"
    bucket.take(150)
    assert bucket.level == -30 and bucket.seconds_to(1) == 15.5
    bucket.take(-1000)
    assert bucket.level == 120
    clock.now -= 50
    assert bucket.level == 120, "a clock that goes back takes nothing"


def test_a_bucket_that_is_resized_keeps_what_was_taken() -> None:
    bucket = TokenBucket(100, Clock())
    bucket.take(90)
    bucket.resize(50)
    assert bucket.level == -40
    bucket.resize(200)
    assert bucket.level == 110


def test_no_more_is_taken_in_any_time_than_the_rate_and_one_minute_more() -> None:
    clock, dice, taken = Clock(), random.Random("a bucket"), list[tuple[float, float]]()
    bucket = TokenBucket(60, clock)
    for _ in range(3000):
        clock.now += dice.expovariate(4.0)
        amount = dice.randint(1, 10)
        if bucket.level >= amount:
            bucket.take(amount)
            taken.append((clock.now, amount))
    for first in range(0, len(taken), 50):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= 60 * (1 + (at - taken[first][0]) / 60) + 1e-6


def test_requests_of_a_minute() -> None:
    clock = Clock()
    alice = account(clock, requests_per_minute=2)
    use(alice, 5, 5)
    use(alice, 5, 5)
    refusal = alice.refusal()
    assert refusal is not None and refusal.limit == "requests_per_minute" and refusal.seconds == 30
    assert "alice may send 2 requests per minute" in refusal.message
    clock.now += 29.99
    assert alice.refusal() is not None
    clock.now += 0.01
    use(alice, 5, 5)


def test_tokens_are_charged_as_expected_and_corrected_at_the_end() -> None:
    clock = Clock()
    alice = account(clock, tokens_per_minute=1000)
    with alice.charged(1, 100, 50) as charge:
        assert charge.taken == 150 and alice.headers()["x-ratelimit-remaining-tokens"] == "850"
        charge.use(1, 0)
        assert charge.taken == 150
    assert alice.headers()["x-ratelimit-remaining-tokens"] == "899", "100 of the prompt and 1 of the reply"


def test_embeddings_do_not_make_replies_seem_short() -> None:
    """Else a key that embeds a lot could begin any number of chats at once, which then take more than it may."""
    alice = account(Clock(), tokens_per_minute=1000)
    for _ in range(100):
        use(alice, 1, 0)
    with alice.charged(1, 100, 100_000) as charge:
        assert charge.taken == 100 + FIRST_REPLY_TOKENS


def test_a_reply_longer_than_expected_is_charged_as_it_grows() -> None:
    alice = account(Clock(), tokens_per_minute=1000)
    with alice.charged(1, 100, 100_000) as charge:
        assert charge.taken == 100 + FIRST_REPLY_TOKENS
        charge.use(2000, 0)
        assert charge.taken == 2100
        refusal = alice.refusal(1, 1)
        assert refusal is not None and refusal.seconds == pytest.approx((1100 + 2) * 60 / 1000)
    assert alice.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_a_request_that_is_not_read_yet_is_told_when_one_like_those_before_may_come() -> None:
    """And not in a second, when it would be told another time: clients try again but twice."""
    clock = Clock()
    alice = account(clock, tokens_per_minute=60)
    use(alice, 20, 40)
    early = alice.refusal(0, 16)
    assert early is not None and early.seconds == 16
    assert early.message.endswith("0 are left and about 16 needed")
    clock.now += early.seconds
    assert alice.refusal(0, 16) is None and alice.refusal(0, 100) is None, "nothing is known of its prompt"
    late = alice.refusal(4, 16)
    assert late is not None and late.seconds == 4


def test_tokens_that_are_found_in_the_cache_are_given_back() -> None:
    alice = account(Clock(), tokens_per_minute=1000)
    use(alice, 300, 10, cached=288)
    assert alice.headers()["x-ratelimit-remaining-tokens"] == str(1000 - 12 - 10)


def test_a_request_that_never_began_costs_no_tokens() -> None:
    alice = account(Clock(), tokens_per_minute=1000, requests_per_minute=10)
    with alice.charged(1, 300, 100):
        pass
    assert alice.headers()["x-ratelimit-remaining-tokens"] == "1000"
    assert alice.headers()["x-ratelimit-remaining-requests"] == "9"


def test_what_was_computed_of_a_prompt_is_charged_though_nothing_came_of_it() -> None:
    clock = Clock()
    alice = account(clock, tokens_per_minute=1000)
    with alice.charged(1, 300, 100) as charge:
        charge.compute("a", 128)
        charge.compute("a", 256)
        charge.compute("a", 128)  # as another coordinator begins it again
        assert charge.taken == 400, "as long as it runs, it is expected to come to a reply"
    assert alice.headers()["x-ratelimit-remaining-tokens"] == str(1000 - 256)
    clock.now += 60
    with alice.charged(4, 30, 100) as charge:
        for name in "abcd":
            charge.compute(name, 28)
    assert alice.headers()["x-ratelimit-remaining-tokens"] == str(1000 - 30), "four choices of one prompt"
    clock.now += 60
    with alice.charged(1, 300, 100) as charge:
        charge.compute("a", 256)
        charge.lost()
    assert alice.headers()["x-ratelimit-remaining-tokens"] == "1000", "the server failed"
    with alice.charged(1, 300, 100) as charge:
        charge.compute("a", 256)
        charge.use(2, 40)
    assert alice.headers()["x-ratelimit-remaining-tokens"] == str(1000 - 300 + 40 - 2)


def test_what_replies_took_is_what_the_next_is_expected_to_take() -> None:
    alice = account(Clock(), tokens_per_minute=10**6)
    for _ in range(200):
        use(alice, 1, 20)
    with alice.charged(1, 1, 10_000) as charge:
        assert charge.taken == pytest.approx(21, abs=0.5)


def test_a_prompt_larger_than_a_minute_is_never_taken_and_a_long_reply_waits_for_a_full_bucket() -> None:
    clock = Clock()
    alice = account(clock, tokens_per_minute=300)
    refusal = alice.refusal(301, 1)
    assert refusal is not None and refusal.seconds is None and "300" in refusal.message and "301" in refusal.message
    assert alice.refusal(200, 10_000) is None, "456 are expected, more than there can be: a full bucket is enough"
    use(alice, 10, 0)
    refusal = alice.refusal(200, 10_000)
    assert refusal is not None and refusal.seconds == pytest.approx(2)


def test_requests_in_work() -> None:
    alice = account(Clock(), max_concurrent=1)
    with alice.charged(4, 1, 1):
        assert (alice.sequences, alice.concurrent) == (4, 1)
        refusal = alice.refusal()
        assert refusal is not None and refusal.limit == "max_concurrent" and refusal.seconds is not None
    assert alice.refusal() is None and alice.sequences == 0
    with pytest.raises(RuntimeError), alice.charged(4, 1, 1):
        raise RuntimeError
    assert (alice.sequences, alice.concurrent) == (0, 0)


def test_limits_that_change_hold_at_once() -> None:
    clock = Clock()
    alice = account(clock)
    assert alice.headers() == {}
    alice.change(ApiKey("alice", b"", RateLimits(requests_per_minute=1, tokens_per_minute=10)))
    use(alice, 5, 5)
    assert alice.refusal() is not None
    alice.change(ApiKey("alice", b"", RateLimits(requests_per_minute=2, tokens_per_minute=20)))
    use(alice, 5, 1, max_tokens=1)
    alice.change(ApiKey("alice", b""))
    assert alice.refusal() is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (6.1, "7s"), (60, "1m0s"), (359.2, "6m0s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_limits_of_the_command_line() -> None:
    made = RateLimits.parse("requests_per_minute=60, max_concurrent=4")
    assert made == RateLimits(requests_per_minute=60, max_concurrent=4)
    assert RateLimits(max_concurrent=1).or_else(made) == RateLimits(requests_per_minute=60, max_concurrent=1)
    for wrong in ("", "60", "rpm=60", "max_concurrent=0", "max_concurrent=x", "max_concurrent=1,max_concurrent=2"):
        with pytest.raises(ConfigError) as caught:
            RateLimits.parse(wrong)
        assert caught.value.hint


def test_when_to_come_again_follows_from_what_ended() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    assert rate.seconds_to_end(10) == 1.0, "nothing is known"
    for _ in range(2 * KEPT):
        clock.now += 0.5
        rate.ended()
    assert rate.seconds_to_end(10) == pytest.approx(5)
    assert rate.seconds_to_end(0) == pytest.approx(0.5)
    clock.now += 31.5
    assert rate.seconds_to_end(1) == pytest.approx(1.0), "nothing ended for as long as all of those took"
    assert rate.seconds_to_end(10**6) == LONGEST_SECONDS
    clock.now += WINDOW_SECONDS
    assert rate.seconds_to_end(10) == 1.0, "what is long ago tells nothing"
