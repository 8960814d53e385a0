"""Suggests repos that a user may have meant.  They are only named, never used."""

from __future__ import annotations

from ssdprof.checkpoint.describe import describe, read_config
from ssdprof.checkpoint.hub import HubRepo
from ssdprof.checkpoint.hub_client import api, transport_error
from ssdprof.checkpoint.model_types import MODEL_TYPES
from ssdprof.checkpoint.source import CONFIG
from ssdprof.errors import SsdprofError

MOST_ASKED = 12  # configs read per search: one small request each


def similar_repos(repo_id: str) -> list[str]:
    """Repos of the same namespace whose names match and whose config has SSD or GDN layers, most downloaded first.

    The hub's search matches the whole text, so a name without a match is tried again without its last
    part.  Empty if the hub does not answer, because the caller already reports another error.
    """
    namespace, _, name = repo_id.rpartition("/")
    while name:
        if found := _search(namespace or None, name):
            return found
        name = name.rpartition("-")[0]
    return []


def _search(namespace: str | None, name: str) -> list[str]:
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        models = list(
            api().list_models(author=namespace, search=name, limit=30, expand=["config", "safetensors", "downloads"])
        )
    except (transport_error(), OfflineModeIsEnabled):
        return []
    # The hub's copy of a config holds no layer types, so it only rules out; the original format has no model_type.
    likely = [model for model in models if (model.config or {}).get("model_type", None) in (*MODEL_TYPES, None)]
    likely.sort(key=lambda model: -(model.downloads or 0))
    return [model.id for model in likely[:MOST_ASKED] if _has_operator(model.id)]


def _has_operator(repo_id: str) -> bool:
    try:
        describe(read_config(HubRepo(repo_id).path(CONFIG), repo_id))
    except SsdprofError:
        return False  # gated, unsupported or without such layers: no suggestion
    return True
