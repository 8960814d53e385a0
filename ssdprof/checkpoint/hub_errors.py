"""Turns errors of the hub's client into messages for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ssdprof.checkpoint.hub_client import api, transport_error
from ssdprof.checkpoint.sizes import shown
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError, library_message


@contextmanager
def hub_errors(repo_id: str, revision: str | None, file: str = "") -> Iterator[None]:
    """Turn the client's errors into ssdprof's.  file: the requested file, if any.

    The error of a gated repo is a subclass of that of a missing one, so it is handled first.
    """
    from huggingface_hub import errors, get_token

    try:
        yield
    except errors.GatedRepoError:
        raise ModelUnavailableError(
            f"{repo_id} is gated: its owner must grant you access, and "
            + ("your token's account is not on the list." if get_token() else "you are not logged in."),
            f"Ask for access at {api().endpoint}/{repo_id}, then run `hf auth login` or set HF_TOKEN.",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelUnavailableError(
            f"{repo_id} has no revision {shown(revision or 'main')}.", revisions_hint(repo_id)
        ) from None
    except errors.RepositoryNotFoundError:
        raise RepoNotFoundError(repo_id, logged_in=get_token() is not None) from None
    except errors.DisabledRepoError:
        raise ModelUnavailableError(f"{repo_id} has been disabled on the hub.", "Choose another repository.") from None
    except errors.HFValidationError:
        raise BadInputError(
            f"{shown(repo_id)} is neither a hub id nor a folder.",
            "A hub id has the form org/name; a folder must exist.",
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise out_of_reach(repo_id, error) from None
    except errors.EntryNotFoundError:
        raise ModelUnavailableError(f"{repo_id} has no {file}.", "Choose another revision.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "Check HF_TOKEN." if status in (401, 403) else "Try again later."
        raise ModelUnavailableError(f"The hub answered {status} for {repo_id}.", hint) from None
    except errors.OfflineModeIsEnabled as error:
        raise out_of_reach(repo_id, error) from None
    except transport_error() as error:
        raise ModelUnavailableError(
            f"The connection to the hub broke while {repo_id} was fetched: {library_message(error)}.",
            "Run the same command again: complete files are kept.",
        ) from None
    except ImportError as error:
        raise MissingCapabilityError(
            f"The hub's client lacks a package: {library_message(error)}.",
            "Install it, or unset the proxy that needs it: ALL_PROXY, HTTPS_PROXY or HTTP_PROXY.",
        ) from None
    except ValueError as error:
        raise BadInputError(
            f"The hub's client cannot use its settings: {library_message(error)}.",
            "Check HF_TOKEN and the addresses of proxies: ALL_PROXY, HTTPS_PROXY and HTTP_PROXY.",
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MissingCapabilityError(
                f"The disk is full: {repo_id} could not be written to the hub's cache.",
                "Make room or set HF_HOME to a larger disk, then run the same command again: complete files are kept.",
            ) from None
        if error.filename is not None or isinstance(error, PermissionError) or error.errno == errno.EROFS:
            place = error.filename or "The hub's cache"
            raise MissingCapabilityError(
                f"{place} cannot be written: {error.strerror}.",
                "The hub's cache lies there: check its permissions, or set HF_HOME to a folder that you can write to.",
            ) from None
        raise ModelUnavailableError(
            f"{repo_id} could not be fetched: {library_message(error)}.",
            "Check the network and SSL_CERT_FILE, then run the same command again: complete files are kept.",
        ) from None


class RepoNotFoundError(ModelUnavailableError):
    """No such repo, or a private one, which looks the same."""

    def __init__(self, repo_id: str, *, logged_in: bool) -> None:
        self.repo_id = repo_id
        if logged_in:
            hint = "If it is private, the token's account must be allowed to read it."
        else:
            hint = "If it is private, run `hf auth login` or set HF_TOKEN."
        super().__init__(f"There is no repo {repo_id} on the hub, or it is private.", hint)


class NotCachedError(ModelUnavailableError):
    """The hub is unreachable, and the file is not in the cache."""


def out_of_reach(repo_id: str, error: Exception) -> NotCachedError:
    """The error for a file that is not cached while the hub is unreachable; it names the cached models."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    cause = error.__cause__
    remedy = "check the network"
    if is_offline_mode():
        why, remedy = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    elif isinstance(cause, HfHubHTTPError):
        why = f"the hub at {api().endpoint} answered {cause.response.status_code}"
    else:
        why = f"the hub at {api().endpoint} cannot be reached" + (f": {library_message(cause)}" if cause else "")
    cached = cached_models()
    what = f"{repo_id} is only partly in the cache" if repo_id in cached else f"{repo_id} is not in the cache"
    hint = f"In the cache: {', '.join(cached)}." if cached else f"The cache is empty: {remedy}, or use demo."
    return NotCachedError(f"{what}, and {why}.", hint)


def cached_models() -> list[str]:
    """Ids of the models in the hub's cache, at most 20 of them."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
        return sorted(repo.repo_id for repo in found if repo.repo_type == "model")[:20]
    except CacheNotFound:
        return []


def revisions_hint(repo_id: str) -> str:
    """A hint that lists branches and tags, or where to find them if the hub does not answer."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        refs = api().list_repo_refs(repo_id)
    except (HfHubHTTPError, transport_error()):
        return f"See the branches and tags at {api().endpoint}/{repo_id}/tree/main."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f"Branches and tags: {', '.join(names[:20])}." if names else "It has no branches or tags."
