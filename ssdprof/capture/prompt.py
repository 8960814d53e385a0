"""The prompt of a run: a text, and its token ids from the checkpoint's tokenizer.

The default text, in `text/`, is a megabyte of English reference prose that never changes; README.md
there names its source.  transformers loads tokenizers; an error quotes the message of transformers.
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
HELD_OUT_BYTES = 100_000  # the first tenth of the text, on which the demo model was not trained
CONFIG = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"
_TEXT = Path(__file__).with_name("text")
_DEFAULT = "ssdprof's default text: reference documentation of CPython 3.11.7"
LONGEST_TEXT = 2**24  # tokens up to which the tokenizer gives no warning about the trained length
CHARACTERS_PER_TOKEN = 8  # in the part of a text that is read first; English has 4 to 5
UNSETTLED_TOKENS = 64  # most tokens at the end of a part that may change if more text follows
_TOKENIZER_HINT = "Fetch or copy the file again, or name another tokenizer with --tokenizer."


# --- the default text


def default_text() -> bytes:
    """The whole text in UTF-8.  Raises BadInputError if the installed file is damaged."""
    file = _TEXT / "text.txt.xz"
    try:
        return lzma.decompress(file.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise BadInputError(
            "The default text that ships with ssdprof is damaged.",
            "Install ssdprof again, or give a text of your own with --prompt-file.",
        ) from error


def held_out_text() -> bytes:
    """The part of the text on which the demo model is evaluated.  It comes first, so that short
    prompts are new to that model.
    """
    return default_text()[:HELD_OUT_BYTES]


def training_text() -> bytes:
    """The part of the text on which the demo model was trained."""
    return default_text()[HELD_OUT_BYTES:]


# --- tokenizers


def _load(folder: Path) -> Tokenizer:
    """Load the tokenizer in a folder, without remote code; from tokenizer.json alone if its class
    cannot be loaded.  Raises BadInputError if there is none or it is damaged.
    """
    if (folder / CONFIG).is_file():
        read_object(folder / CONFIG, f"{CONFIG} of the checkpoint", _TOKENIZER_HINT)
    with refusals("the tokenizer", _TOKENIZER_HINT):
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
        len(loaded)  # raises an error for a damaged vocabulary
    return loaded


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds by default."""
    with refusals("the tokenizer", _TOKENIZER_HINT):
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

    tokenizer_folder: None: there is no tokenizer, and the only kind is "random", which draws from
        `vocab_size` ids.
    kind: "default" is the text that ships with ssdprof, "file" the UTF-8 text in `file`, "random"
        draws uniformly from the tokenizer's vocabulary without special tokens, with `seed`.
    batch: number of rows.  packed: lengths of sequences that are packed into one row, `seqlen` in
        sum.  unread: a file of a tokenizer that ssdprof does not read; empty if there is none.

    Text is encoded as the tokenizer does by default, so that every row and packed sequence may
    begin with a special token.  A single row is the first `seqlen` tokens.  Several rows or packed
    sequences follow each other in the text, and overlap if it is too short.

    Raises BadInputError if `kind` and `file` contradict each other, if there is no usable
    tokenizer, or nothing to draw from, if the file is missing, empty or not UTF-8, or if the text
    is too short; MissingCapabilityError if the file may not be read.
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
    """The error for a text if there is no tokenizer to encode it.  unread: see `build_prompt`."""
    message = "The checkpoint has no tokenizer."
    if unread:
        message = (
            f"The checkpoint's tokenizer is of a kind that ssdprof does not read: {unread}; it "
            "runs no remote code."
        )
    return BadInputError(
        message, "Name one with --tokenizer, or take random tokens: --prompt random."
    )


def _identified(folder: Path, tokenizer: Tokenizer) -> str:
    """Words that identify a tokenizer: the hash of its tokenizer.json, or its class if it has no
    such file.  The folder's name is specific to this machine.
    """
    file = folder / VOCABULARY
    if not file.is_file():
        return type(tokenizer).__name__
    return f"{VOCABULARY} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def _text_ids(
    tokenizer: Tokenizer, file: Path | None, lengths: Sequence[int]
) -> tuple[torch.Tensor, str]:
    """Token ids (sum of lengths) of the default text or of a file, and words on their source."""
    name = "The default text" if file is None else f"The prompt file {file.name}"
    try:
        stream: TextIO = (
            io.StringIO(default_text().decode("utf-8"))
            if file is None
            else file.open(encoding="utf-8-sig")
        )
        with stream:
            ids = _first_ids(tokenizer, stream, lengths, name)
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{name} is not UTF-8 text: {error.reason}.", "Give a text file."
        ) from error
    except OSError as error:
        raise unreadable(name, error, "Give the path of a text file.") from error
    pieces, remark = _pieces(tokenizer, ids, lengths)
    source = f"the user's file {file.name}" if file else _DEFAULT
    return torch.tensor(pieces), source + remark


def _random_ids(
    tokenizer: Tokenizer | None, vocab_size: int | None, seqlen: int, seed: int
) -> torch.Tensor:
    """Random token ids (seqlen) from the tokenizer's vocabulary without special tokens; without a
    tokenizer, from 0 to `vocab_size` - 1.  Raises BadInputError if there are none.
    """
    # a range, because a damaged config may say any number
    vocabulary: Sequence[int] = range(vocab_size or 0)
    if tokenizer is not None:
        with refusals("the tokenizer", _TOKENIZER_HINT):
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
    """The first `sum(lengths)` token ids of the text in the stream, or all of them if the text is
    shorter.  Raises BadInputError if it is empty, has no tokens, or is too short for pieces of
    these lengths that differ.

    name: of the text, for messages.
    """
    content = ""
    seqlen = sum(lengths)
    # the longest piece, if each piece begins only one token after the one before
    least = max(lengths) + len(lengths) - 1
    characters = CHARACTERS_PER_TOKEN * seqlen
    while True:
        content += stream.read(characters - len(content))
        ids = _encode(tokenizer, content)
        ended = len(content) < characters
        if ended or len(ids) >= seqlen + UNSETTLED_TOKENS:
            break
        characters *= 2
    if ended and not content.strip():
        raise BadInputError(
            f"{name} is empty.", "Give a text of at least as many tokens as --seq asks for."
        )
    if not ids:
        raise BadInputError(
            f"The checkpoint's tokenizer makes no tokens of {name[0].lower()}{name[1:]}.",
            _TOKENIZER_HINT,
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
    """Cut the ids of a text into pieces of these lengths, which overlap if the text is too short.
    Each begins with the special tokens with which the tokenizer begins a text.

    Returns the ids of all pieces, one after the other, and words on the cuts; empty for one piece.
    """
    if len(lengths) == 1:
        return list(ids[: lengths[0]]), ""
    # an empty text has all special tokens; those that the whole text begins with come first
    special = _encode(tokenizer, "")
    count = 0
    while count < min(len(special), len(ids)) and special[count] == ids[count]:
        count += 1
    opening, body = special[:count], ids[count:]
    body_lengths = [max(length - len(opening), 0) for length in lengths]
    starts = [0, *accumulate(body_lengths[:-1])]
    longest = max(body_lengths)
    words = "one after the other"
    if sum(body_lengths) > len(body):
        # at equal distances, up to rounding, of at least one token: `_first_ids` has refused a
        # shorter text
        latest = len(body) - longest  # where the longest piece would end with the text
        starts = [number * latest // (len(lengths) - 1) for number in range(len(lengths))]
        words = "that overlap, because the text is too short for all of them"
    pieces: list[int] = []
    for start, body_length, length in zip(starts, body_lengths, lengths, strict=True):
        pieces += [*opening[:length], *body[start : start + body_length]]
    return pieces, f", {len(lengths)} pieces of it {words}"
