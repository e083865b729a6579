"""The secret by which the ranks of a `torch.distributed` process group trust each other.

The store of `torch.distributed` is not encrypted and is open to whoever reaches its port. So nothing that it says is
trusted: it carries addresses only, and each rank proves itself by a certificate of the authority that is made from the
secret (`Authority.of_secret`). Where the secret comes from:

    TLLM_SECRET set    the user gives every rank the same random text of SECRET_LENGTH characters or more, on any
                       machines
    not set            all ranks are processes of one user on one machine and listen on loopback; rank 0 draws a secret
                       and leaves it in a file that only this user can read, until the rendezvous is over
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tllm.cluster.connection import is_loopback, own_address
from tllm.core.errors import AuthError, ConfigError

SECRET_VARIABLE, HOST_VARIABLE = "TLLM_SECRET", "TLLM_HOST"
SECRET_LENGTH = 32
LOOPBACK, WILDCARDS = "127.0.0.1", ("0.0.0.0", "::")
OUTSIDE = "192.0.2.1", 9
"""An address kept for documentation (RFC 5737), to which the default route leads; nothing is sent."""

DRAW_ONE = f'export {SECRET_VARIABLE}="$(openssl rand -hex 32)" for every rank'

_MEETING = re.compile(r"[0-9a-f]{32}")


def secret_from_environment(environment: Mapping[str, str]) -> bytes | None:
    """The secret that the user gave; None if there is none. AuthError for one that might be guessed."""
    text = environment.get(SECRET_VARIABLE, "")
    if text and len(text) < SECRET_LENGTH:
        raise AuthError(f"{SECRET_VARIABLE} has {len(text)} characters of at least {SECRET_LENGTH}", DRAW_ONE)
    return text.encode() or None


def listening_host(environment: Mapping[str, str], store_host: str, is_shared: bool) -> str:
    """The address that this rank listens on: TLLM_HOST, else that of the interface that reaches the store's machine; on
    that machine, if /etc/hosts has its own name as loopback, that of the default route.

    Without a shared secret it is loopback; AuthError if TLLM_HOST is then another address.
    """
    given = environment.get(HOST_VARIABLE, "")
    if given in WILDCARDS:
        raise ConfigError(f"{HOST_VARIABLE} is {given}, where nobody can be reached", "give one interface's address")
    if not is_shared:
        if given and not is_loopback(given):
            raise AuthError(f"{HOST_VARIABLE} is {given}, which others reach, and there is no secret", DRAW_ONE)
        return given or LOOPBACK
    if given:
        return given
    if not store_host or is_loopback(store_host):
        return LOOPBACK
    towards_store = own_address((store_host, 9))
    if not is_loopback(towards_store):
        return towards_store
    try:
        return own_address(OUTSIDE)
    except ConfigError:  # without a network, all ranks are here
        return towards_store


def new_meeting_name() -> str:
    """A random name for one rendezvous of ranks."""
    return secrets.token_hex(16)


def check_meeting_name(name: str) -> str:
    """The name that the store gave, once it is found to have the right form; AuthError otherwise."""
    if not _MEETING.fullmatch(name):
        raise AuthError(
            f"the store gives {name[:40]!r} as the name of the ranks' meeting", "something else writes to it"
        )
    return name


@contextmanager
def secret_file(meeting: str, folder: Path | None = None) -> Iterator[bytes]:
    """Draw a secret, and keep it in a file for this user's other processes while the block lasts."""
    file = _private_folder(folder) / meeting
    secret = secrets.token_bytes(32)
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secret)
        yield secret
    finally:
        file.unlink(missing_ok=True)


def read_secret_file(meeting: str, folder: Path | None = None) -> bytes:
    """The secret in rank 0's file; AuthError if there is none, because rank 0 has another machine or another user."""
    try:
        return (_private_folder(folder) / meeting).read_bytes()
    except FileNotFoundError as error:
        raise AuthError(
            f"rank 0 is not a process of this user on this machine, and {SECRET_VARIABLE} is not set", DRAW_ONE
        ) from error


def _private_folder(folder: Path | None) -> Path:
    """The folder of this user's secrets, made on first use; AuthError if other users could write to it."""
    folder = folder or Path(tempfile.gettempdir(), f"tllm-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AuthError(f"{folder} is not a folder of this user alone", f"remove it, or chmod 700 {folder}")
    return folder
