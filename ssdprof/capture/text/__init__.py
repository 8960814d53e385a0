"""The default text: a megabyte of English reference prose that never changes; README.md names its
source.
"""

import lzma
from importlib.resources import files

from ssdprof.errors import BadInputError

HELD_OUT_BYTES = 100_000  # the first tenth: the demo model was not trained on it


def load() -> bytes:
    """The whole text, UTF-8.  Raises BadInputError if the installed file is damaged."""
    try:
        return lzma.decompress(files(__name__).joinpath("text.txt.xz").read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise BadInputError(
            "The default text that ships with ssdprof is damaged.",
            "Install ssdprof again, or give a text of your own with --prompt-file.",
        ) from error


def held_out() -> bytes:
    """The part on which the demo model is evaluated.  It comes first, so that short prompts are new
    to that model.
    """
    return load()[:HELD_OUT_BYTES]


def training() -> bytes:
    """The part on which the demo model was trained."""
    return load()[HELD_OUT_BYTES:]
