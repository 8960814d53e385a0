"""The files of a checkpoint: in a local folder, or on the hub, through the hub's own client.

The client reads HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE itself, draws progress bars on
stderr, and continues a broken download after the last chunk of 10 MiB that it stored.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from ssdprof import __version__
from ssdprof.checkpoint.names import KNOWN, shown
from ssdprof.core.target import PlannedFile
from ssdprof.core.words import size_words
from ssdprof.errors import (
    MACHINE_ERRNOS,
    BadInputError,
    MissingCapabilityError,
    ModelUnavailableError,
    SsdprofError,
    library_message,
    masked,
    unreadable,
)
from ssdprof.files import unwritable


def _bad_settings(reason: str) -> BadInputError:
    """The error for environment variables that the hub's client cannot use."""
    return BadInputError(
        f"The hub's client cannot use its settings: {reason}.",
        "Check HF_TOKEN, other variables with HF_ and proxies: ALL_PROXY, HTTPS_PROXY and "
        "HTTP_PROXY.",
    )


def _check_timeouts() -> None:
    """BadInputError for a timeout that is no whole number of seconds.  The client's own error does
    not name the variable.
    """
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        value = os.environ.get(name, "")
        if value and not value.strip().isdecimal():
            raise BadInputError(
                f"{name}={value!r} is not a whole number of seconds.",
                f"Give one, or run: unset {name}",
            )


def _endpoint() -> str | None:
    """The value of HF_ENDPOINT; None if it is not set.  BadInputError if it is no address."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint is None:
        return None
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        without_password = endpoint.rpartition("@")[2]
        raise BadInputError(
            f"HF_ENDPOINT={without_password!r} is not the address of a hub.",
            "An address begins with https://.  For https://huggingface.co, run: unset HF_ENDPOINT",
        )
    return endpoint


try:  # the client reads its variables on import
    _check_timeouts()
    _endpoint()
    from huggingface_hub import (
        HfApi,
        constants,
        errors,
        get_token,
        hf_hub_url,
        is_offline_mode,
        parse_hf_uri,
        parse_local_safetensors_file_metadata,
        scan_cache_dir,
        try_to_load_from_cache,
    )
    from huggingface_hub.utils import TensorInfo as TensorInfo  # type: ignore[attr-defined]
except ValueError as error:
    raise _bad_settings(library_message(error)) from error

T = TypeVar("T")
P = ParamSpec("P")
CONFIG = "config.json"
_ADDRESS = "An address has the form https://huggingface.co/org/name."
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# The tokenizer's files that hold a vocabulary; without one of them, the others are of no use.
VOCABULARIES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"})
# Parts of the names of files that a tokenizer may have and that ssdprof does not read:
# tiktoken.model, tekken.json, spiece.model, source.spm, bpe.model, tokenization_kimi.py
_OTHER_TOKENIZER = re.compile(r"tiktoken|tekken|sentencepiece|spiece|\.spm$|bpe|tokeniz|vocab")
_MOST_FOLDERS_IN_HINT = 4
ATTEMPTS = 3  # of a request whose connection drops
PAUSE_S = 0.5  # between two attempts
# Errors that say that no server can be reached.  They are compared by name, because their classes
# are httpx's or httpx2's.
UNREACHABLE_ERROR_NAMES = ("ConnectError", "ConnectTimeout", "ProxyError")
# The base of the HTTP library's errors: httpx's or httpx2's, depending on huggingface_hub.  It is
# also a base of HfHubHTTPError, an answer of the hub.
TRANSPORT_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the start of a Git LFS pointer


class Source:
    """The files of a checkpoint in a local folder.

    label: repo id or folder name, for messages.
    revision: commit hash on the hub; None for a folder.
    complete: False once `sizes` was read while the hub was unreachable or failed: then `sizes` may
        lack files.
    """

    revision: str | None = None
    complete = True

    def __init__(self, folder: Path, label: str | None = None) -> None:
        """Raises BadInputError or ModelUnavailableError if `folder` is no directory.

        Its files are listed when `sizes` is first read.
        """
        self.folder = folder
        # (name, whether the file was cached) -> header
        self._headers: dict[tuple[str, bool], Mapping[str, TensorInfo]] = {}
        # the name of a symbolic link, not that of its target
        self.label = label or folder.absolute().name or folder.resolve().name
        if folder.is_file():
            raise BadInputError(
                f"{folder} is a file; a checkpoint is a folder.",
                "Name the folder that holds config.json.",
            )
        if not folder.is_dir():
            raise ModelUnavailableError(
                f"There is no folder {folder}.", "Check the path, or name a hub repo: org/name."
            )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size in bytes of every file directly in the folder, by name.

        Broken symbolic links are left out, and so are files in subfolders, which may hold other
        checkpoints.  `cached` and `path` find them.
        """
        try:
            return {
                path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()
            }
        except OSError as error:
            raise ModelUnavailableError(
                f"{self.folder} cannot be read: {error.strerror}.",
                "Check the folder's permissions.",
            ) from None

    def cached(self, name: str) -> bool:
        """Whether the file `name` is on this machine."""
        return os.path.isfile(self.folder / name)

    def path(self, name: str) -> Path:
        """The path of the file `name` on this machine; `HubRepo` downloads it if necessary.

        Raises ModelUnavailableError if there is no such file, and for a `HubRepo` other errors if
        it cannot be downloaded: see `_in_our_words`.
        """
        if not self.cached(name):
            raise ModelUnavailableError(
                f"{self.label} has no {name}.", "The folder is an incomplete copy."
            )
        return self.folder / name

    def header(self, name: str) -> Mapping[str, TensorInfo]:
        """The header of the safetensors file `name`: the key of each tensor, and its description.

        The file is not downloaded for it.  After a download the header is read again, from the
        file on this machine.

        Raises what `path` raises, and what `broken_file` returns if the header cannot be parsed, or
        if the length of a file on this machine is not the one that its header says.
        """
        key = (name, self.cached(name))
        if key not in self._headers:
            self._headers[key] = self._read_header(name)
        return self._headers[key]

    def _read_header(self, name: str) -> Mapping[str, TensorInfo]:
        """The header of a file on this machine; see `header`."""
        path = self.path(name)
        try:
            with safe_open(path, framework="np"):  # checks the length of the file
                return parse_local_safetensors_file_metadata(path).tensors
        except (SafetensorError, errors.SafetensorsParsingError, OSError) as error:
            raise broken_file(path, name, error) from None

    def tokenizer_files(self) -> tuple[str, ...]:
        """Names of the tokenizer's files; empty if there is no vocabulary."""
        files = tuple(name for name in TOKENIZER_FILES if name in self.sizes)
        return files if VOCABULARIES & set(files) else ()

    def unread_tokenizer(self) -> str:
        """The name of a tokenizer's file that ssdprof does not read, preferably not one of Python
        code; empty if there is none.
        """
        inner = {str(path.relative_to(self.folder)) for path in self.folder.glob("*/tokenizer*")}
        others = sorted((inner | self.sizes.keys()) - set(TOKENIZER_FILES))
        unread = [name for name in others if _OTHER_TOKENIZER.search(name)]
        return min(unread, key=lambda name: name.endswith(".py"), default="")

    def inner_checkpoints(self) -> str:
        """A hint that names at most `_MOST_FOLDERS_IN_HINT` folders of checkpoints in this one,
        such as those of a training run, with the highest numbers first; empty if there are none.
        """
        configs = (*self.folder.glob(f"*/{CONFIG}"), *self.folder.glob(f"*/*/{CONFIG}"))
        folders = sorted((path.parent for path in configs), key=_natural, reverse=True)
        names = ", ".join(map(str, folders[:_MOST_FOLDERS_IN_HINT]))
        return f"Name a checkpoint inside: {names}." if folders else ""

    def planned(self, name: str) -> PlannedFile:
        """The file `name`, as a dry run shows it."""
        size = self.sizes.get(name)
        if size is None:
            # The file is in a subfolder, or the hub was not reached: then it is cached, or the
            # request for it raises the error.
            size = self.path(name).stat().st_size
        return PlannedFile(name=name, size_bytes=size, cached=self.cached(name))


def _natural(path: Path) -> tuple[tuple[int, str], ...]:
    """A sort key that compares numbers in names by value: checkpoint-1000 comes after
    checkpoint-200.
    """
    parts = re.split(r"(\d+)", str(path))
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in parts)


def fetch_again(path: Path) -> str:
    """The hint for a damaged file.

    In the hub's cache, `path` is a link.  The client would link the same damaged file again if only
    the link were deleted, so the hint names the file itself.
    """
    return f"Delete it and fetch it again: {path.resolve()}"


def broken_file(path: Path, name: str, error: Exception) -> SsdprofError:
    """The error for a weights file that could not be parsed.

    It is what `unreadable` returns if the file cannot be opened, else ModelUnavailableError: the
    file is a Git LFS pointer, or damaged.

    name: of the file, for the message.  error: of the parser.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as reason:
        return unreadable(name, reason, fetch_again(path))
    if is_pointer:
        return ModelUnavailableError(
            f"{name} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in the folder."
        )
    return ModelUnavailableError(
        f"{name} is truncated or corrupt ({path.stat().st_size} bytes): {library_message(error)}.",
        fetch_again(path),
    )


# --- the hub


def parse_repo(typed: str, revision: str | None) -> tuple[str, str | None]:
    """The repo id, and the revision, which is None if the user named none.

    typed: "org/name", "org/name@v1", or an address with "://", such as
        "https://huggingface.co/org/name/tree/v1", whose path in the repo is ignored.  A known repo
        is found with any capitalisation.
    revision: the value of --revision; None: none was given.

    Raises BadInputError for an address of no model, and for two different revisions.
    """
    if "://" in typed:
        try:
            address = parse_hf_uri(typed, _endpoint())
        except ValueError as error:
            raise BadInputError(f"{library_message(error)}.", _ADDRESS) from None
        if address.type != "model":
            raise BadInputError(f"{typed} is not the address of a model.", _ADDRESS)
        repo_id = address.id
        named = address.revision
    else:
        repo_id, _, suffix = typed.partition("@")
        named = suffix or None
    if named is not None and revision not in (None, named):
        raise BadInputError(
            f"{typed} names the revision {named}, and --revision another: {revision}.",
            "Give one of them.",
        )
    if checkpoint := KNOWN.get(repo_id.casefold()):
        repo_id = checkpoint.repo
    return repo_id, revision or named


class HubRepo(Source):
    """The files of one repo on the hub, at one commit.

    folder: the commit's folder in the hub's cache, with the files that have been downloaded.
    """

    def __init__(self, repo_id: str, revision: str | None = None, *, first: str = CONFIG) -> None:
        """Resolve the revision to a commit, by fetching one file.  If the hub is unreachable or
        fails, and the file is cached, it is the commit that the revision had before.

        revision: a branch, tag, commit or refs/pr/N; None: the main branch.
        first: the file, a small one that any repo of this kind has.

        Raises ModelUnavailableError if the repo or the revision does not exist, if this user has no
        access to the repo, and if the hub is unreachable or fails and the file is not cached.
        Raises BadInputError for text that is no repo id, and for a repo without `first`.
        Raises MissingCapabilityError if the cache cannot be written.
        """
        self._api = api()
        with _hub_errors(repo_id, revision):
            try:
                if not isinstance(try_to_load_from_cache(repo_id, first, revision=revision), str):
                    # This request fails at once without a network.  A download of a file that is
                    # not cached would be tried for 24 s.
                    url = hf_hub_url(repo_id, first, revision=revision, endpoint=self._api.endpoint)
                    _resumed(self._api.get_hf_file_metadata, url=url)
                path = Path(_resumed(self._api.hf_hub_download, repo_id, first, revision=revision))
            except errors.RemoteEntryNotFoundError:
                raise BadInputError(
                    f"{repo_id} has no {first}.",
                    "A repo in transformers' format has it; repos with only GGUF files or an "
                    "adapter do not.",
                ) from None
            except errors.HfHubHTTPError:  # an answer of the hub; a subclass of TRANSPORT_ERROR
                raise
            except TRANSPORT_ERROR as error:
                # what the library itself raises for an unreachable hub and a file not in its cache
                raise errors.LocalEntryNotFoundError(str(error)) from error
        # the file is in snapshots/<commit>/
        super().__init__(path.parent, repo_id)
        self.revision = path.parent.name

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size in bytes of every file, by its path in the repo; if the hub is unreachable or
        answers with an error of its own, only of cached files (see `complete`).
        """
        with _hub_errors(self.label, self.revision):
            try:
                info = _resumed(
                    self._api.model_info, self.label, revision=self.revision, files_metadata=True
                )
            except (TRANSPORT_ERROR, errors.OfflineModeIsEnabled) as error:
                if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                    raise  # the hub answers, and refuses the request
                self.complete = False
                return {
                    path.relative_to(self.folder).as_posix(): path.stat().st_size
                    for path in self.folder.rglob("*")
                    if path.is_file()
                }
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def path(self, name: str) -> Path:
        if not self.cached(name):
            with _hub_errors(self.label, self.revision, name):
                _resumed(self._api.hf_hub_download, self.label, name, revision=self.revision)
        return self.folder / name

    def _read_header(self, name: str) -> Mapping[str, TensorInfo]:
        """The header of a file; if the file is not cached, the client fetches the header alone.
        See `header`.
        """
        if self.cached(name):
            return super()._read_header(name)
        try:
            with _hub_errors(self.label, self.revision, name):
                fetch_header = self._api.parse_safetensors_file_metadata
                return _resumed(fetch_header, self.label, name, revision=self.revision).tensors
        except errors.SafetensorsParsingError as error:
            raise ModelUnavailableError(
                f"{name} of {self.label} is corrupt on the hub: {library_message(error)}.",
                "Choose another revision.",
            ) from None

    def check_space(self, need_bytes: int) -> None:
        """MissingCapabilityError unless the disk of the hub's cache has `need_bytes` free."""
        free = shutil.disk_usage(self.folder).free
        if need_bytes > free:
            raise MissingCapabilityError(
                f"The download needs {size_words(need_bytes)}, but the hub cache's disk has "
                f"{size_words(free)} left.",
                "Make room, set HF_HOME to a larger disk, or use --layers first:N with fewer "
                "layers.",
            )


def api() -> HfApi:
    """The hub's client, for the HF_ENDPOINT that is set now.  BadInputError if that is no address.

    Passwords in the client's log messages are masked.
    """
    endpoint = _endpoint()
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_masked)
    return HfApi(endpoint=endpoint, library_name="ssdprof", library_version=__version__)


def _masked(record: logging.LogRecord) -> bool:
    """A filter of log records, which masks passwords in the addresses that warnings quote.

    True: the record is shown.
    """
    record.msg = masked(record.getMessage())
    record.args = ()
    return True


def _resumed(ask: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result of `ask`, a function of the hub's client, which is called again if the connection
    drops.

    The client itself retries a download, but no request.  Errors that the server answers, and those
    of an unreachable server, are raised at once.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return ask(*arguments, **options)
        except errors.HfHubHTTPError:  # the server has answered
            raise
        except TRANSPORT_ERROR as error:
            if type(error).__name__ in UNREACHABLE_ERROR_NAMES:
                raise
            time.sleep(PAUSE_S)
    return ask(*arguments, **options)


# --- errors of the client, in the user's words


@contextmanager
def _hub_errors(repo_id: str, revision: str | None, file: str = "") -> Iterator[None]:
    """Turn errors of the hub's client in the block into SsdprofError.  The error of the client is
    the cause, but for an invalid address: that error is dropped, because it may quote a password.

    file: the requested file, for messages; empty: the request was for none.
    """
    try:
        yield
    except (TRANSPORT_ERROR, ImportError, ValueError, OSError) as error:
        raise _in_our_words(error, repo_id, revision, file) from error
    except Exception as error:
        if type(error).__name__ != "InvalidURL":  # of httpx or of httpx2
            raise
        raise _bad_settings("an address is invalid") from None


def _in_our_words(error: Exception, repo_id: str, revision: str | None, file: str) -> SsdprofError:
    """The error of ssdprof for one of the hub's client.  file: see `_hub_errors`."""
    text = library_message(error)
    match error:  # a class comes before its base classes
        case errors.RepositoryNotFoundError():
            return _no_access(repo_id, is_gated=isinstance(error, errors.GatedRepoError))
        case errors.RevisionNotFoundError():
            what = f"{repo_id} has no revision {shown(revision or 'main')}."
            hint = _revisions_hint(repo_id)
        case errors.HFValidationError():
            return BadInputError(
                f"{shown(repo_id)} is neither a hub id nor a folder.",
                "A hub id has the form org/name; a folder must exist.",
            )
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return _out_of_reach(repo_id, error.__cause__)
        case errors.RemoteEntryNotFoundError():
            what = f"{repo_id} has no {file}."
            hint = "The repo is incomplete at this revision; choose another one."
        case errors.HfHubHTTPError():
            status = error.response.status_code
            what = f"The hub answered {status} for {f'{repo_id}/{file}'.rstrip('/')}."
            hint = "Check HF_TOKEN." if status in (401, 403) else "Try again later."
        case ImportError():
            return MissingCapabilityError(
                f"The hub's client lacks a package: {text}.",
                "Install it, or unset the proxy that needs it: ALL_PROXY, HTTPS_PROXY or "
                "HTTP_PROXY.",
            )
        case ValueError():
            return _bad_settings(text)
        case OSError() if error.filename is not None or error.errno in MACHINE_ERRNOS:
            cannot = unwritable(Path(error.filename or constants.HF_HUB_CACHE), error)
            cannot.hint = (
                "The hub's cache is there: make room, check its permissions, or set HF_HOME to "
                "another disk."
            )
            return cannot
        case _:
            what = f"The connection to the hub broke while {repo_id} was fetched: {text}."
            hint = (
                "Check the network and SSL_CERT_FILE, and run the same command again: complete "
                "files are kept."
            )
    return ModelUnavailableError(what, hint)


def _no_access(repo_id: str, *, is_gated: bool) -> ModelUnavailableError:
    """The error for a repo that does not exist, or that this user may not read.

    is_gated: whether the hub says that the owner must grant access.
    """
    token = get_token()
    if is_gated:
        state = "your token's account is not on the list." if token else "you are not logged in."
        return ModelUnavailableError(
            f"{repo_id} is gated: its owner must grant you access, and {state}",
            f"Ask for access at {api().endpoint}/{repo_id}, then run `hf auth login` or set "
            "HF_TOKEN.",
        )
    remedy = "run `hf auth login` or set HF_TOKEN."
    if token:
        remedy = "the token's account must be allowed to read it."
    return ModelUnavailableError(
        f"There is no repo {repo_id} on the hub, or it is private.", f"If it is private, {remedy}"
    )


def _out_of_reach(repo_id: str, cause: BaseException | None) -> ModelUnavailableError:
    """The error for a file that is not cached while the hub is unreachable or fails.

    The hint names at most 20 other models of which files are cached.
    cause: the error of the request; None: there was none.
    """
    if is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    elif isinstance(cause, errors.HfHubHTTPError):
        reason = f"the hub at {api().endpoint} answered {cause.response.status_code}"
    else:
        details = f": {library_message(cause)}" if cause else ""
        reason = f"the hub at {api().endpoint} cannot be reached{details}"
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
        cached = {repo.repo_id for repo in repos if repo.repo_type == "model"}
    except errors.CacheNotFound:
        cached = set()
    degree = "only partly" if repo_id in cached else "not"
    remedy = "Unset HF_HUB_OFFLINE" if is_offline_mode() else "Check the network"
    hint = f"{remedy}, or use demo."
    others = sorted(cached - {repo_id})[:20]
    if others:
        hint = f"{remedy}, or use a model in the cache: {', '.join(others)}."
    return ModelUnavailableError(f"{repo_id} is {degree} in the cache, and {reason}.", hint)


def _revisions_hint(repo_id: str) -> str:
    """A hint that lists at most 20 branches and tags, or says where to find them if the hub does
    not answer or refuses.
    """
    try:
        refs = api().list_repo_refs(repo_id)
    except TRANSPORT_ERROR:
        return f"See the branches and tags at {api().endpoint}/{repo_id}/tree/main."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f"Branches and tags: {', '.join(names[:20]) or 'none'}."
