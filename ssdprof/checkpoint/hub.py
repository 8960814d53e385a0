"""A checkpoint on the hub, through huggingface_hub, which is imported only here and only when it is used.

The client itself honours HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE, draws progress bars on stderr, and
continues a broken connection at the byte where it broke.  A run that is stopped keeps complete files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ssdprof import __version__
from ssdprof.checkpoint.integrity import read_header, stored_tensor
from ssdprof.checkpoint.sizes import shown
from ssdprof.checkpoint.source import CONFIG, StoredTensor
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def api() -> HfApi:
    """The client.  It reads HF_ENDPOINT on import; here it counts even when it was set after that."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="ssdprof", library_version=__version__)


class HubRepo:
    """The files of one repo at one commit (`checkpoint.source.Source`)."""

    def __init__(self, repo_id: str, revision: str | None = None, *, first: str = CONFIG) -> None:
        """Resolve `revision` (a branch, tag, commit or refs/pr/N; the main branch for None) to a commit, once.

        It is resolved by fetching `first`, a small file that any repo of this kind has.

        ModelUnavailableError: not found, gated, unknown revision, or out of reach and not cached.
        BadInputError: no repo id, or a repo without `first`.
        """
        self.label = repo_id
        self._api = api()
        with hub_errors(repo_id, revision):
            path = self._fetch_first(first, revision)
        # It lies in snapshots/<commit>/, by the server's answer or, when that is out of reach, by the cache's own refs.
        self.snapshot = path.parent
        self.revision: str | None = path.parent.name

    def _fetch_first(self, first: str, revision: str | None) -> Path:
        from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

        try:
            return Path(self._api.hf_hub_download(self.label, first, revision=revision))
        except RemoteEntryNotFoundError:
            raise BadInputError(
                f"{self.label} has no {first}.",
                "It is not in transformers' format; repos with only GGUF files are not.",
            ) from None
        except HfHubHTTPError:
            raise
        except transport_error():
            # The client takes a file from the cache when it cannot connect, but not when the server hangs up.
            return Path(self._api.hf_hub_download(self.label, first, revision=revision, local_files_only=True))

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._listing[0]

    @property
    def complete(self) -> bool:
        return self._listing[1]

    @cached_property
    def _listing(self) -> tuple[Mapping[str, int], bool]:
        """Sizes, and whether they are those of all files: when the hub is out of reach, of the cached ones only."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        with hub_errors(self.label, self.revision):
            try:
                info = self._api.model_info(self.label, revision=self.revision, files_metadata=True)
            except (transport_error(), OfflineModeIsEnabled) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise
                cached = (path for path in self.snapshot.rglob("*") if path.is_file())
                return {path.relative_to(self.snapshot).as_posix(): path.stat().st_size for path in cached}, False
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}, True

    def cached(self, name: str) -> bool:
        return (self.snapshot / name).is_file()

    def path(self, name: str) -> Path:
        if not self.cached(name):
            with hub_errors(self.label, self.revision, name):
                self._api.hf_hub_download(self.label, name, revision=self.revision)
        return self.snapshot / name

    def header(self, name: str) -> Mapping[str, StoredTensor]:
        if self.cached(name):
            return read_header(self.snapshot / name, name)
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with hub_errors(self.label, self.revision, name):
                found = self._api.parse_safetensors_file_metadata(self.label, name, revision=self.revision)
        except SafetensorsParsingError as error:
            raise ModelUnavailableError(
                f"{name} of {self.label} is corrupt on the hub: {shown(str(error))}.", "Take another revision."
            ) from None
        return {key: stored_tensor(str(t.dtype), t.shape) for key, t in found.tensors.items()}

    def check_space(self, need_bytes: int) -> None:
        """MissingCapabilityError unless the disk of the cache has `need_bytes` left."""
        free = shutil.disk_usage(self.snapshot).free
        if need_bytes > free:
            raise MissingCapabilityError(
                f"The download needs {need_bytes / 1e9:.1f} GB, but the hub cache's disk has {free / 1e9:.1f} GB left.",
                "Make room, set HF_HOME to a larger disk, or take fewer layers: --layers first:4.",
            )


def transport_error() -> type[Exception]:
    """The base of the HTTP library's errors: httpx's or httpx2's, whichever this huggingface_hub is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


@contextmanager
def hub_errors(repo_id: str, revision: str | None, file: str = "") -> Iterator[None]:
    """Turn the client's errors into ours; `file` is the one that is asked for, if one is.

    A gated repo's error is a subclass of a missing one's, so it comes first.
    """
    from huggingface_hub import errors, get_token

    try:
        yield
    except errors.GatedRepoError:
        raise ModelUnavailableError(
            f"{repo_id} is gated: its owner must let you in, and "
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
        raise ModelUnavailableError(f"{repo_id} has been disabled on the hub.", "Take another repo.") from None
    except errors.HFValidationError:
        raise BadInputError(
            f"{shown(repo_id)} is no hub id and no folder.", "A hub id reads org/name; a folder must exist."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise out_of_reach(repo_id, error) from None
    except errors.EntryNotFoundError:
        raise ModelUnavailableError(f"{repo_id} has no {file}.", "Take another revision.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "Check HF_TOKEN." if status in (401, 403) else "Try again later."
        raise ModelUnavailableError(f"The hub answered {status} for {repo_id}.", hint) from None
    except errors.OfflineModeIsEnabled as error:
        raise out_of_reach(repo_id, error) from None
    except transport_error() as error:
        raise ModelUnavailableError(
            f"The connection to the hub broke while {repo_id} was fetched: {shown(str(error))}.",
            "Run the same command again: complete files are kept.",
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MissingCapabilityError(
                f"The disk is full: {repo_id} could not be written to the hub's cache.",
                "Make room or set HF_HOME to a larger disk, then run the same command again: complete files are kept.",
            ) from None
        raise ModelUnavailableError(
            f"{repo_id} could not be fetched: {shown(str(error))}.",
            "Run the same command again: complete files are kept.",
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


def out_of_reach(repo_id: str, error: Exception) -> ModelUnavailableError:
    """The error for a file that is not cached while the hub cannot be asked; names the models that are cached."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    cause = error.__cause__
    if is_offline_mode():
        why = "HF_HUB_OFFLINE is set"
    elif isinstance(cause, HfHubHTTPError):
        why = f"the hub at {api().endpoint} answered {cause.response.status_code}"
    else:
        why = f"the hub at {api().endpoint} cannot be reached" + (f": {shown(str(cause))}" if cause else "")
    cached = cached_models()
    what = f"{repo_id} is only partly in the cache" if repo_id in cached else f"{repo_id} is not in the cache"
    hint = f"In the cache: {', '.join(cached)}." if cached else "The cache holds no model."
    return ModelUnavailableError(f"{what}, and {why}.", hint)


def cached_models(limit: int = 20) -> list[str]:
    """Ids of the models in the hub's cache, at most `limit` of them."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")[:limit]
    except CacheNotFound:
        return []


def revisions_hint(repo_id: str) -> str:
    """Which branches and tags there are; says nothing of them when the hub does not answer."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        refs = api().list_repo_refs(repo_id)
    except (HfHubHTTPError, transport_error()):
        return f"See the branches and tags at {api().endpoint}/{repo_id}/tree/main."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f"Branches and tags: {', '.join(names[:20])}." if names else "It has no branches or tags."
