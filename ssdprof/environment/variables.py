"""Environment variables that the hub's client reads when it is imported: checked before that."""

import os

from ssdprof.errors import BadInputError

_SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")


def check() -> None:
    """BadInputError for a number of seconds that is none, which the client refuses without its
    name.
    """
    for name in _SECONDS:
        value = os.environ.get(name, "")
        if value and not value.strip().isdecimal():
            raise BadInputError(
                f"{name}={value!r} is not a number of seconds.",
                f"Give a whole number, or run: unset {name}",
            )
