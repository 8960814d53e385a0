"""huggingface_hub's client as ssdprof uses it.

It honours HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE itself, draws progress bars on stderr, and continues a
broken download at the byte where it broke.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from ssdprof import __version__
from ssdprof.errors import BadInputError, masked

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ATTEMPTS = 3  # of a request whose connection drops
PAUSE_S = 0.5
NOBODY_THERE = ("ConnectError", "ConnectTimeout", "ProxyError")  # by name: of httpx or of httpx2

T = TypeVar("T")


def api() -> HfApi:
    """The client.  It reads HF_ENDPOINT on import; this function also applies a later change.

    BadInputError for an HF_ENDPOINT that is no address.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint is not None and not _is_address(endpoint):
        raise BadInputError(
            f"HF_ENDPOINT={endpoint!r} is not the address of a hub.",
            "An address begins with https://.  For https://huggingface.co, run: unset HF_ENDPOINT",
        )
    from huggingface_hub import HfApi

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_masked)
    return HfApi(endpoint=endpoint, library_name="ssdprof", library_version=__version__)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _masked(record: logging.LogRecord) -> bool:
    """Its warnings quote addresses, which may hold a password."""
    record.msg, record.args = masked(record.getMessage()), ()
    return True


def transport_error() -> type[Exception]:
    """The base of the HTTP library's errors: httpx's or httpx2's, depending on huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def resumed(ask: Callable[[], T]) -> T:
    """The result of `ask`, which is repeated if the connection drops, as proxies cause between two requests.

    The client itself retries only while it receives the body of a file.  Downloaded data is kept.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for _ in range(ATTEMPTS - 1):
        try:
            return ask()
        except HfHubHTTPError:  # the server has answered
            raise
        except transport_error() as error:
            if type(error).__name__ in NOBODY_THERE:
                raise
            time.sleep(PAUSE_S)
    return ask()
