"""`KeyRing`: the API keys of a server, from its options and from a file that is read anew when it changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tllm.core.errors import ConfigError, counted
from tllm.server.admission.account import Account, ApiKey
from tllm.server.admission.key_file import check_distinct, digest_of, read_keys
from tllm.server.admission.token_bucket import UNLIMITED, RateLimits

POLL_SECONDS = 1.0
"""Between two looks at the file. It is read once it is the same in two of them, so not while it is written."""

ANONYMOUS, DEFAULT = "anonymous", "default"
"""Names of those who need no key, and of the key that is no file's."""

_log = logging.getLogger("tllm.server")
_Stamp = tuple[int, int, int]


class KeyRing:
    """Finds the account of a key. `anonymous` is that of everybody where the server has no keys.

    With a file a key is always needed, whatever becomes of the file. One that cannot be read or is wrong changes
    nothing: the keys before it stay, `fault` says what is wrong, and `faults` counts such files.
    """

    def __init__(
        self,
        keys: Sequence[str],
        file: str = "",
        limits: RateLimits = UNLIMITED,
        hears_priorities: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._defaults = limits
        names = [DEFAULT, *(f"{DEFAULT}-{number}" for number in range(2, len(keys) + 1))]
        self._fixed = [ApiKey(name, digest_of(key), self._defaults) for name, key in zip(names, keys, strict=False)]
        self._file = Path(file) if file else None
        self._hears_priorities = hears_priorities
        self._clock = clock
        self.anonymous = Account(ApiKey(ANONYMOUS, b"", self._defaults), clock)
        self.accounts: dict[str, Account] = {}
        self.fault, self.faults = "", 0
        self._read_stamp = self._seen_stamp = self._stamp()
        self._take(self._read())

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self.accounts and self._file is None

    def find(self, given: str) -> Account | None:
        """The account of a key that a request gives. Every key is compared, so that the time tells nothing."""
        digest = digest_of(given)
        found = [account for account in self.accounts.values() if hmac.compare_digest(digest, account.key.digest)]
        return found[0] if found else None

    async def watch(self) -> None:
        """Read the file anew whenever it has changed, until this is cancelled."""
        while self._file is not None:
            await asyncio.sleep(POLL_SECONDS)
            self._apply(await asyncio.to_thread(self._news))

    def look(self) -> None:
        """Look at the file: it is read if it has changed since it was read, and not since the last look."""
        self._apply(self._news())

    def _news(self) -> list[ApiKey] | ConfigError | None:
        stamp, before = self._stamp(), self._seen_stamp
        self._seen_stamp = stamp
        if stamp == self._read_stamp or stamp != before:
            return None
        self._read_stamp = stamp
        try:
            return self._read()
        except ConfigError as error:
            return error

    def _apply(self, news: list[ApiKey] | ConfigError | None) -> None:
        if isinstance(news, ConfigError):
            self.fault, self.faults = news.message, self.faults + 1
            now = counted(len(self.accounts), "key from before stays", "keys from before stay")
            text = "THE FILE OF API KEYS WAS NOT TAKEN, and %s: %s (%s)"
            _log.error(text, now, news.message, news.hint)
        elif news is not None:
            self.fault = ""
            self._take(news)
            _log.warning("the file of API keys was read anew; keys: %d", len(self.accounts))

    def _read(self) -> list[ApiKey]:
        if self._file is None:
            return self._fixed
        keys = [*self._fixed, *read_keys(self._file, self._defaults, self._hears_priorities)]
        check_distinct(keys)
        return keys

    def _take(self, keys: Sequence[ApiKey]) -> None:
        accounts = {}
        for key in keys:
            account = self.accounts.get(key.name)
            if account is None:
                account = Account(key, self._clock)
            else:
                account.change(key)
            accounts[key.name] = account
        self.accounts = accounts

    def _stamp(self) -> _Stamp | None:
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
