"""A checkpoint on the hub.  huggingface_hub is imported only when it is used; a run that is stopped keeps its files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ssdprof.checkpoint.hub_client import api, resumed, transport_error
from ssdprof.checkpoint.hub_errors import hub_errors
from ssdprof.checkpoint.integrity import read_header, stored_tensor
from ssdprof.checkpoint.source import CONFIG, StoredTensor
from ssdprof.core.words import size_words
from ssdprof.errors import BadInputError, MissingCapabilityError, ModelUnavailableError, library_message


class HubRepo:
    """The files of one repo at one commit (`checkpoint.source.Source`)."""

    def __init__(self, repo_id: str, revision: str | None = None, *, first: str = CONFIG) -> None:
        """Resolve `revision` (a branch, tag, commit or refs/pr/N; the main branch for None) to a commit, once.

        It is resolved by fetching `first`, a small file that any repo of this kind has.

        ModelUnavailableError: not found, gated, unknown revision, or unreachable and not cached.
        BadInputError: no repo id, or a repo without `first`.
        """
        self.label = repo_id
        self._api = api()
        with hub_errors(repo_id, revision):
            path = self._fetch_first(first, revision)
        # It lies in snapshots/<commit>/, according to the server or, if it is unreachable, to the refs in the cache.
        self.snapshot = path.parent
        self.revision: str | None = path.parent.name

    def _fetch_first(self, first: str, revision: str | None) -> Path:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError

        try:
            if not isinstance(try_to_load_from_cache(self.label, first, revision=revision), str):
                self._check_reachable(first, revision)
            return Path(resumed(lambda: self._api.hf_hub_download(self.label, first, revision=revision)))
        except RemoteEntryNotFoundError:
            raise BadInputError(
                f"{self.label} has no {first}.",
                "It is not in transformers' format; repos with only GGUF files are not.",
            ) from None
        except HfHubHTTPError:
            raise
        except transport_error() as dropped:
            # The client takes a file from the cache when it cannot connect, but not when the server hangs up.
            try:
                return Path(self._api.hf_hub_download(self.label, first, revision=revision, local_files_only=True))
            except LocalEntryNotFoundError as absent:
                raise absent from dropped

    def _check_reachable(self, first: str, revision: str | None) -> None:
        """Ask for `first` once: without a network, the client tries for 24 s to get a file that is not cached."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.label, first, revision=revision, endpoint=self._api.endpoint)
        resumed(lambda: self._api.get_hf_file_metadata(url=url))

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._listing[0]

    @property
    def complete(self) -> bool:
        return self._listing[1]

    @cached_property
    def _listing(self) -> tuple[Mapping[str, int], bool]:
        """Sizes of files, and whether these are all files: if the hub is unreachable, only cached files are known."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        with hub_errors(self.label, self.revision):
            try:
                info = resumed(lambda: self._api.model_info(self.label, revision=self.revision, files_metadata=True))
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
                resumed(lambda: self._api.hf_hub_download(self.label, name, revision=self.revision))
        return self.snapshot / name

    def header(self, name: str) -> Mapping[str, StoredTensor]:
        if self.cached(name):
            return read_header(self.snapshot / name, name)
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with hub_errors(self.label, self.revision, name):
                found = resumed(
                    lambda: self._api.parse_safetensors_file_metadata(self.label, name, revision=self.revision)
                )
        except SafetensorsParsingError as error:
            raise ModelUnavailableError(
                f"{name} of {self.label} is corrupt on the hub: {library_message(error)}.", "Choose another revision."
            ) from None
        return {key: stored_tensor(str(t.dtype), t.shape) for key, t in found.tensors.items()}

    def check_space(self, need_bytes: int) -> None:
        """MissingCapabilityError unless the disk of the cache has `need_bytes` left."""
        free = shutil.disk_usage(self.snapshot).free
        if need_bytes > free:
            raise MissingCapabilityError(
                f"The download needs {size_words(need_bytes)}, but the hub cache's disk has {size_words(free)} left.",
                "Make room, set HF_HOME to a larger disk, or use --layers first:N with fewer layers.",
            )
