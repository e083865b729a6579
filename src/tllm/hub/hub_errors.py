"""What went wrong with the Hugging Face hub, in the words of this program: one line, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tllm.core.errors import AuthError, ConfigError, TllmError, WeightsError, nearest


class HubUnreachable(WeightsError):
    """The hub does not answer, or may not be asked. What is on disk, or on other nodes, may still do."""


class HubOffline(HubUnreachable):
    """HF_HUB_OFFLINE forbids to ask it, so that it is of no use to try again."""


HUB_REFUSES = (WeightsError, AuthError, ConfigError)
"""What a fetch may fail with. Of a private model a hub says to whoever may not read it that there is none, which is a
ConfigError."""


def endpoint() -> str:
    """Where the hub is: HF_ENDPOINT, else https://huggingface.co."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_host() -> str:
    """The hub in a message."""
    return urlsplit(endpoint()).netloc


@contextlib.contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Turn what the library raises within the block into errors of ours."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _refused(error, repo, revision) from error
    except errors.LocalEntryNotFoundError as error:  # what the library makes of it for a whole file
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _refused(error.__cause__, repo, revision) from error
        raise _unreachable(repo, error.__cause__ or error) from error
    except (errors.OfflineModeIsEnabled, httpx2.TransportError, httpx2.TooManyRedirects) as error:
        raise _unreachable(repo, error) from error


def _unreachable(repo: str, error: BaseException) -> HubUnreachable:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubOffline(
            f"{repo} is not whole on this disk, and HF_HUB_OFFLINE forbids to fetch what is missing",
            "unset HF_HUB_OFFLINE, or give the path of a copy",
        )
    reason = str(error).partition("\n")[0] or type(error).__name__
    return HubUnreachable(
        f"{hub_host()} cannot be reached for {repo}: {reason}",
        "look at the network and at HF_ENDPOINT; what was fetched is kept, and the same command goes on from there. "
        f"If a path was meant, {_path_like(repo, 'there is no such folder here')}",
    )


def _path_like(repo: str, otherwise: str) -> str:
    """The hint for a name that may be a mistyped path: what is in that folder and most like it."""
    return nearest(Path(repo).name, (path.name for path in Path(repo).parent.glob("*")), otherwise)


def _refused(error: Exception, repo: str, revision: str) -> TllmError:
    from huggingface_hub import errors, get_token

    assert isinstance(error, errors.HfHubHTTPError)
    page, status = f"{endpoint()}/{repo}", error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        if get_token() is None:
            return AuthError(
                f"{repo} is gated, and there is no Hugging Face token here",
                f"accept its terms at {page}, then set HF_TOKEN or run `hf auth login`",
            )
        return AuthError(f"{repo} is gated, and this token has no access to it", f"ask for access at {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"there is no path {repo}, and no model of that name at {hub_host()} that may be read from here",
            _path_like(repo, "look at the spelling; a private model needs HF_TOKEN or `hf auth login`"),
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{repo} has no revision {revision or 'main'}", f"its branches and tags: {page}/tree/main")
    if status in (401, 403):
        return AuthError(f"{hub_host()} refuses {repo} (HTTP {status})", "look at HF_TOKEN, or run `hf auth login`")
    if status == 429 or status >= 500:
        return HubUnreachable(f"{hub_host()} does not answer for {repo} (HTTP {status})", "try again later")
    return WeightsError(f"{hub_host()} does not give {repo} (HTTP {status})", f"look at {page}")
