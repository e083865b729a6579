"""`HubRanges`: byte ranges of a repository's files, straight from the Hugging Face hub over HTTPS.

What pins a range to the model: the hub is asked for the file at one commit, and must answer with that commit, with the
hash (etag) and the size that were listed; where it sends us on to a storage host, the etag there may not change between
two ranges. Of each range the place, the length and the size of the whole are checked. The hub gives no hash of a range.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from tllm.core.errors import TllmError, WeightsError
from tllm.hub.hub_errors import HubOffline, HubUnreachable, endpoint, hub_errors, hub_host
from tllm.hub.repository import HubFile, Repository

ATTEMPTS, FIRST_ATTEMPTS, RETRY_SECONDS = 5, 2, 0.5
"""Of one range, and as long as no byte has ever come; each goes on at the byte where the one before broke off. The
pause doubles each time."""
SECONDS = 30.0
"""Of silence, after which a connection counts as broken."""
EXPIRED = (400, 401, 403, 404, 410)
"""What storage answers to an address that was signed for a time that is over."""


class HubStopped(WeightsError):
    """Nobody waits for these bytes any more."""


class NoRanges(WeightsError):
    """Whoever has the bytes gives them whole alone."""


class HubRanges:
    """Any thread may call it. `fetched` counts bytes that came; once `is_stopped` is set, nothing more is fetched."""

    def __init__(self, repository: Repository, pause: float = RETRY_SECONDS) -> None:
        self.fetched = 0
        self.is_stopped = False
        self._repository, self._pause = repository, pause
        self._places: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()

    def read(self, file: HubFile, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file. HubUnreachable after ATTEMPTS, WeightsError or AuthError where trying again
        would be in vain."""
        out = bytearray()
        for piece in self.stream(file, start, stop):
            out += piece
        return bytes(out)

    def stream(self, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        """The same in pieces, as they come."""
        assert 0 <= start < stop <= file.size
        at, attempt = start, 0
        while at < stop:
            self.check_wanted()
            try:
                for piece in self._go_on(file, at, stop):
                    at += len(piece)
                    yield piece
            except HubUnreachable as error:
                if isinstance(error, HubOffline):
                    raise
                attempt += 1
                if attempt >= (ATTEMPTS if self.fetched else FIRST_ATTEMPTS):
                    raise HubUnreachable(
                        f"{file.name} of {self._repository}: bytes [{start}, {stop}) broke off {attempt} times, the "
                        f"last at byte {at}: {error.message}",
                        error.hint,
                    ) from error
                time.sleep(self._pause * 2 ** (attempt - 1))

    def check_wanted(self) -> None:
        """HubStopped once nobody waits for bytes any more."""
        if self.is_stopped:
            raise HubStopped(f"{self._repository} is wanted no more")

    def _go_on(self, file: HubFile, at: int, stop: int) -> Iterator[bytes]:
        """What comes of bytes [at, stop) until they are whole. HubUnreachable where they break off."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it is documented there

        place, came = self._place(file), 0
        headers = {"Range": f"bytes={at}-{stop - 1}", "Accept-Encoding": "identity"}
        if urlsplit(place).netloc == hub_host():  # our token is for the hub alone
            headers |= build_hf_headers(library_name="tllm")
        with (
            hub_errors(self._repository.repo, self._repository.commit),
            get_session().stream("GET", place, headers=headers, timeout=SECONDS) as response,
        ):
            if response.status_code != 206 and not (response.status_code == 200 and stop - at == file.size):
                raise self._refused(file, response.status_code)
            given = response.headers.get("Content-Range", f"bytes {at}-{stop - 1}/{file.size}")
            if given != f"bytes {at}-{stop - 1}/{file.size}":
                raise WeightsError(
                    f"{file.name} of {self._repository}: bytes {at}-{stop - 1}/{file.size} were asked for, and the "
                    f"answer is {given[:80]}",
                    "is HF_ENDPOINT a hub that gives ranges?",
                )
            self._check_unchanged(file, response.headers.get("ETag", ""))
            for piece in response.iter_raw():  # as it comes: what waits for a piece to be full is lost with a break
                self.check_wanted()
                came += len(piece)
                self.fetched += len(piece)
                if came > stop - at:
                    raise WeightsError(f"{file.name} of {self._repository}: more bytes came than were asked for")
                yield piece
        if came < stop - at:
            raise HubUnreachable(f"{hub_host()} closed the connection early")

    def _place(self, file: HubFile) -> str:
        """The address of a file's bytes, once the hub has said that it is the file that was listed."""
        with self._lock:
            if file.name not in self._places:
                self._places[file.name] = self._ask(file)
            return self._places[file.name]

    def _ask(self, file: HubFile) -> str:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        repo, commit = self._repository.repo, self._repository.commit
        url = hf_hub_url(repo, file.name, revision=commit, endpoint=endpoint())
        with hub_errors(repo, commit):
            found = get_hf_file_metadata(url, timeout=SECONDS, library_name="tllm")
        for what, is_now, was in (
            ("commit", found.commit_hash, commit),
            ("etag", found.etag, file.etag),
            ("size", found.size, file.size),
        ):
            if is_now != was:
                raise _changed(self._repository, file, f"the {what} {was} was listed, and {is_now} is given")
        if urlsplit(endpoint()).scheme == "https" and urlsplit(found.location).scheme != "https":
            raise WeightsError(
                f"{hub_host()} sends us on to {found.location[:60]} for {file.name}, which is not encrypted",
                "something between here and the hub changes its answers",
            )
        return found.location

    def _refused(self, file: HubFile, status: int) -> TllmError:
        if status in EXPIRED:
            with self._lock:
                self._places.pop(file.name, None)
        if status in EXPIRED or status in (408, 429) or status >= 500:
            return HubUnreachable(f"{hub_host()} answers HTTP {status}", "try again later")
        return (NoRanges if status == 200 else WeightsError)(
            f"{file.name} of {self._repository}: a range was asked for, and the answer is HTTP {status}",
            "is HF_ENDPOINT a hub that gives ranges?",
        )

    def _check_unchanged(self, file: HubFile, etag: str) -> None:
        with self._lock:
            before = self._etags.setdefault(file.name, etag)
        if before != etag:
            raise _changed(self._repository, file, f"its etag was {before}, and is {etag}")


def _changed(repository: Repository, file: HubFile, why: str) -> WeightsError:
    return WeightsError(
        f"{file.name} of {repository} changed while it was fetched: {why}", "start again, for the revision as it is now"
    )
