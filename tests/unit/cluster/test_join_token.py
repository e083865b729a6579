from __future__ import annotations

import pytest

from tllm.cluster.certificates import Authority
from tllm.cluster.join_token import ALWAYS_SECONDS, JoinToken, StaleToken, TokenBook
from tllm.core.errors import AuthError

FINGERPRINT = bytes(range(32))


def test_a_token_survives_being_written_and_read() -> None:
    token = TokenBook(FINGERPRINT).issue(now=0.0)
    again = JoinToken.parse(f"  {token}\n")
    assert again == token
    assert again.fingerprint == FINGERPRINT


@pytest.mark.parametrize("shown", ["{}\n{}", '"{}{}"', "{} \r\n  {}"])
def test_a_token_that_a_terminal_broke_is_read(shown: str) -> None:
    token = TokenBook(FINGERPRINT).issue(now=0.0)
    assert JoinToken.parse(shown.format(str(token)[:60], str(token)[60:])) == token


def test_half_a_token_is_told_how_long_one_is() -> None:
    text = str(TokenBook(FINGERPRINT).issue(now=0.0))
    with pytest.raises(AuthError, match=f"40 characters, and one has {len(text)}"):
        JoinToken.parse(text[:40])


def test_a_token_is_not_shown_by_repr() -> None:
    token = TokenBook(FINGERPRINT).issue(now=0.0)
    assert repr(token.secret) not in repr(token)


@pytest.mark.parametrize("text", ["", "tllm1-", "tllm1-AAAA", "x" * 92, "tllm1-" + "é" * 86, "tllm1-" + "A" * 87])
def test_anything_else_is_not_a_token_and_is_not_repeated(text: str) -> None:
    with pytest.raises(AuthError, match="not a join token") as caught:
        JoinToken.parse(text)
    assert len(text) < 7 or text not in str(caught.value)


def test_a_token_is_good_for_its_number_of_uses() -> None:
    book = TokenBook(FINGERPRINT)
    token = book.issue(now=0.0, uses=2)
    for _ in range(2):
        book.check(token.secret, now=1.0)
        book.redeem(token.secret, now=1.0)
    with pytest.raises(AuthError, match="used up"):
        book.redeem(token.secret, now=1.0)


def test_a_token_expires() -> None:
    book = TokenBook(FINGERPRINT)
    token = book.issue(now=100.0, seconds=60.0)
    book.check(token.secret, now=159.9)
    other = book.issue(now=100.0, uses=3, seconds=60.0)
    assert [book.open_uses(tokens, now=159.9) for tokens in ([token], [token, other], [])] == [1, 4, 0]
    with pytest.raises(StaleToken, match="expired 0 s ago"):
        book.check(token.secret, now=160.0)
    assert book.open_uses([token, other], now=160.0) == 0


def test_a_secret_that_was_never_given_out_is_unknown() -> None:
    book = TokenBook(FINGERPRINT)
    kept, other = book.issue(now=0.0), TokenBook(FINGERPRINT).issue(now=0.0)
    for secret in (other.secret, b"", kept.secret[:-1], bytes(32)):
        with pytest.raises(AuthError, match="not one of this cluster"):
            book.check(secret, now=0.0)
    book.check(kept.secret, now=0.0)


def test_all_who_share_a_secret_make_the_same_token_and_nobody_else_does() -> None:
    token = JoinToken.of_secret(b"s" * 32)
    assert token == JoinToken.of_secret(b"s" * 32)
    assert token.fingerprint == Authority.of_secret(b"s" * 32).fingerprint
    other = JoinToken.of_secret(b"t" * 32)
    assert token.secret != other.secret and token.fingerprint != other.fingerprint
    assert b"s" * 32 not in token.secret + token.fingerprint


def test_a_token_of_a_secret_is_not_used_up() -> None:
    token = JoinToken.of_secret(b"s" * 32)
    book = TokenBook(token.fingerprint)
    book.keep(token, now=0.0)
    for _ in range(1000):
        book.redeem(token.secret, now=ALWAYS_SECONDS - 1)
    with pytest.raises(AuthError, match="not one of this cluster"):
        book.check(JoinToken.of_secret(b"t" * 32).secret, now=0.0)
