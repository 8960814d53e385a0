"""The prompt of a run: a text, and its token ids by the checkpoint's tokenizer.

The default text, in `text/`, is a megabyte of English reference prose that never changes; README.md
there names its source.  transformers loads tokenizers; an error names the file and quotes the
library's message.
"""

from __future__ import annotations

import hashlib
import io
import lzma
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import torch

from ssdprof.checkpoint import transformers
from ssdprof.checkpoint.meta import refusals
from ssdprof.core.target import Prompt
from ssdprof.errors import BadInputError, library_message, unreadable
from ssdprof.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

PromptKind = Literal["default", "file", "random"]
HELD_OUT_BYTES = 100_000  # the first tenth: the demo model was not trained on it
CONFIG = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"
_TEXT = Path(__file__).with_name("text")
_DEFAULT = "ssdprof's default text: reference documentation of CPython 3.11.7"
LONGEST_TEXT = 2**24  # tokens; no warning about the trained length
CHARACTERS_PER_TOKEN = 8  # of the text that is read first; English has 4 to 5
MARGIN = 64  # tokens that may change when the text behind them is cut off
_AGAIN = "Fetch or copy the file again, or name another tokenizer with --tokenizer."


# --- the default text


def default_text() -> bytes:
    """The whole text, UTF-8.  Raises BadInputError if the installed file is damaged."""
    file = _TEXT / "text.txt.xz"
    try:
        return lzma.decompress(file.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise BadInputError(
            "The default text that ships with ssdprof is damaged.",
            "Install ssdprof again, or give a text of your own with --prompt-file.",
        ) from error


def held_out_text() -> bytes:
    """The part on which the demo model is evaluated.  It comes first, so that short prompts are new
    to that model.
    """
    return default_text()[:HELD_OUT_BYTES]


def training_text() -> bytes:
    """The part on which the demo model was trained."""
    return default_text()[HELD_OUT_BYTES:]


# --- tokenizers


def _load(folder: Path) -> Tokenizer:
    """The tokenizer, without remote code; tokenizer.json if its class is unavailable.
    BadInputError if damaged.
    """
    if (folder / CONFIG).is_file():
        read_object(folder / CONFIG, f"{CONFIG} of the checkpoint", _AGAIN)
    with refusals("the tokenizer", _AGAIN):
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            file = folder / VOCABULARY
            if not file.is_file():
                raise BadInputError(
                    "The checkpoint has no tokenizer that can be loaded: "
                    f"{library_message(error)}.",
                    "Name a repository that has the right one with --tokenizer.",
                ) from error
            loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
        loaded.model_max_length = LONGEST_TEXT
        len(loaded)  # raises for a vocabulary that it cannot use
    return loaded


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, with the special tokens that the tokenizer adds by default."""
    with refusals("the tokenizer", _AGAIN):
        ids: list[int] = tokenizer(text)["input_ids"]
    return ids


# --- prompts


def build_prompt(
    tokenizer_folder: Path | None,
    seqlen: int,
    *,
    kind: PromptKind = "default",
    file: Path | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    batch: int = 1,
    packed: Sequence[int] = (),
    unread: str = "",
) -> tuple[torch.Tensor, Prompt]:
    """Token ids (batch, seqlen) int64 on the CPU, and the record that describes them.

    tokenizer_folder: None if there is no tokenizer; then only kind "random" works, and draws from
    `vocab_size` ids.  unread: a file of a tokenizer that ssdprof does not read.
    kind: "default" is the text that ships with ssdprof, "file" the UTF-8 text in `file`, "random"
        draws uniformly from the tokenizer's vocabulary, special tokens left out, with `seed`.
    batch: rows, each from another place of the text.  packed: lengths of sequences, `seqlen` in
        all, packed into one row, each from another place.
    Text is encoded as the tokenizer does by default: a tokenizer that starts a text with a special
    token does so here, before every row and packed sequence.  One prompt is the first `seqlen`
    tokens.  Several prompts follow each other in the text, and overlap if it is too short.  A text
    is never repeated.

    Raises BadInputError: no usable tokenizer; a file that is missing, empty or not UTF-8; too short
    a text.
    MissingCapabilityError: a file that may not be read.
    """
    if (kind == "file") != (file is not None):
        raise BadInputError(
            "--prompt-file and another kind of prompt cannot be combined.",
            "Give --prompt-file alone.",
        )
    if tokenizer_folder is None:
        tokenizer = None
        tokenizer_words = f"none, {vocab_size or 0:,} tokens"
    else:
        tokenizer = _load(tokenizer_folder)
        tokenizer_words = f"{_identified(tokenizer_folder, tokenizer)}, {len(tokenizer):,} tokens"
    lengths = tuple(packed) or (seqlen,) * batch
    if kind == "random":
        ids = _random_ids(tokenizer, vocab_size, sum(lengths), seed)
        source = (
            f"uniformly random token ids, seed {seed}: good for timing; the values inside the "
            "model, and so the accuracy, are not those of text"
        )
    elif tokenizer is None:
        raise _no_tokenizer(unread)
    else:
        ids, source = _text_ids(tokenizer, file, lengths)
    prompt = Prompt(
        kind=kind,
        source=source,
        tokenizer=tokenizer_words,
        seqlen=seqlen,
        batch=batch,
        token_sha256=hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
    )
    return ids.view(batch, seqlen), prompt


def _no_tokenizer(unread: str) -> BadInputError:
    """The error for a text without a tokenizer to encode it.  unread: see `build_prompt`."""
    what = "The checkpoint has no tokenizer."
    if unread:
        what = (
            f"The checkpoint's tokenizer is of a kind that ssdprof does not read: {unread}; it "
            "runs no remote code."
        )
    return BadInputError(what, "Name one with --tokenizer, or take random tokens: --prompt random.")


def _identified(folder: Path, tokenizer: Tokenizer) -> str:
    """A tokenizer by its content: the folder's name is specific to this machine."""
    file = folder / VOCABULARY
    if not file.is_file():
        return type(tokenizer).__name__
    return f"{VOCABULARY} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def _text_ids(
    tokenizer: Tokenizer, file: Path | None, lengths: Sequence[int]
) -> tuple[torch.Tensor, str]:
    """Ids (sum of lengths) of the default text or of a file, and a phrase on their source."""
    name = "The default text" if file is None else f"The prompt file {file.name}"
    try:
        with (
            file.open(encoding="utf-8-sig")
            if file
            else io.StringIO(default_text().decode("utf-8")) as stream
        ):
            ids = _first_ids(tokenizer, stream, lengths, name)
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{name} is not UTF-8 text: {error.reason}.", "Give a text file."
        ) from error
    except OSError as error:
        raise unreadable(name, error, "Give the path of a text file.") from error
    pieces, how = _pieces(tokenizer, ids, lengths)
    source = f"the user's file {file.name}" if file else _DEFAULT
    return torch.tensor(pieces), source + how


def _random_ids(
    tokenizer: Tokenizer | None, vocab_size: int | None, seqlen: int, seed: int
) -> torch.Tensor:
    """Ids (seqlen) of the tokenizer's vocabulary, special tokens left out, else of `vocab_size`
    ids.
    """
    vocabulary: Sequence[int] = range(vocab_size or 0)  # no table: a config may say any number
    if tokenizer is not None:
        with refusals("the tokenizer", _AGAIN):
            vocabulary = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
    if not vocabulary:
        raise BadInputError(
            "There is no vocabulary to draw random tokens from.",
            "Name a tokenizer with --tokenizer.",
        )
    drawn = torch.randint(len(vocabulary), (seqlen,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([vocabulary[index] for index in drawn.tolist()])


def _first_ids(
    tokenizer: Tokenizer, stream: TextIO, lengths: Sequence[int], name: str
) -> list[int]:
    """The first `sum(lengths)` ids of the stream, or all if it is shorter but enough for different
    pieces.
    """
    content = ""
    seqlen = sum(lengths)
    least = max(lengths) + len(lengths) - 1
    wanted = CHARACTERS_PER_TOKEN * seqlen
    while True:
        content += stream.read(wanted - len(content))
        ids = _encode(tokenizer, content)
        ended = len(content) < wanted
        if ended or len(ids) >= seqlen + MARGIN:
            break
        wanted *= 2
    if ended and not content.strip():
        raise BadInputError(
            f"{name} is empty.", "Give a text of at least as many tokens as --seq asks for."
        )
    if not ids:
        raise BadInputError(
            f"The checkpoint's tokenizer makes no tokens of {name[0].lower()}{name[1:]}.", _AGAIN
        )
    if len(ids) < least:
        several = f", for {len(lengths)} sequences that differ" if len(lengths) > 1 else ""
        shorter = "fewer or shorter sequences" if several else f"at most --seq {len(ids)}"
        raise BadInputError(
            f"{name} is too short: it gives {len(ids):,} tokens with this tokenizer, and {least:,} "
            f"are needed{several}.",
            f"Ask for {shorter}, give a longer text with --prompt-file, or take --prompt random "
            "for times alone.",
        )
    return ids[:seqlen]


def _pieces(
    tokenizer: Tokenizer, ids: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], str]:
    """Pieces of `ids`, overlapping if they must, each with the special tokens of a text; a phrase
    on the cuts.
    """
    if len(lengths) == 1:
        return list(ids[: lengths[0]]), ""
    # special tokens, of which a tokenizer may put some behind a text
    alone = _encode(tokenizer, "")
    count = 0
    for special, token in zip(alone, ids, strict=False):
        if special != token:
            break
        count += 1
    opening, body = alone[:count], ids[count:]
    inside = [max(length - len(opening), 0) for length in lengths]
    starts = [0, *accumulate(inside[:-1])]
    together, longest = sum(inside), max(inside)
    overlap = together > len(body)
    if overlap:
        starts = [start * (len(body) - longest) // (together - longest) for start in starts]
    pieces: list[int] = []
    for start, length, whole in zip(starts, inside, lengths, strict=True):
        pieces += [*opening[:whole], *body[start : start + length]]
    how = (
        "that overlap, because the text is too short for all of them"
        if overlap
        else "one after the other"
    )
    return pieces, f", {len(lengths)} pieces of it {how}"
