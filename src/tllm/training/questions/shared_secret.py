"""The secret by which a run and programs elsewhere trust each other: a file that both have."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from tllm.cluster.certificates import Authority, Identity
from tllm.core.disk import check_private, private_file
from tllm.core.errors import AuthError

SECRET_LENGTH = 32


def shared_identity(file: Path, name: str, command: str, make: bool = False) -> Identity:
    """A certificate of the authority that the secret makes; AuthError where the file is no secret.

    With `make` a file that is not there is written, readable by its owner only. `command` does that for users.
    """
    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), private_file(file, replaces=False) as out:  # another was first
            out.write(f"{secrets.token_hex(32)}\n".encode())
    try:
        check_private(file)
        secret = file.read_bytes().strip()
    except OSError as error:
        raise AuthError(
            f"cannot read the secret {file}: {error.strerror}",
            f"`{command}` writes it: copy the file from there, and keep it from others",
        ) from error
    if len(secret) < SECRET_LENGTH:
        raise AuthError(
            f"{file} has {len(secret)} characters, of at least {SECRET_LENGTH}", f"let `{command}` write a new one"
        )
    return Authority.of_secret(secret).identity(name)
