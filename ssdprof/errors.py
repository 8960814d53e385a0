"""The errors that a user can cause, each with a sentence, a hint and an exit code.

Here are also the functions that make text from other sources safe and short enough for a message.
"""

import difflib
import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from enum import IntEnum
from typing import Any
from urllib.parse import quote


class ExitCode(IntEnum):
    """The exit codes of a command that ran to its end, and of each `SsdprofError`.  `cli` has the
    code of an interrupted command and that of an internal error.
    """

    OK = 0
    GATE_FAILED = 1  # a case did not pass, or a limit that the user gave does not hold
    BAD_INPUT = 2  # wrong usage, unknown layer, corrupt capture, unsupported model
    MISSING_CAPABILITY = 3  # this machine lacks a GPU, memory, ncu or a permission
    MODEL_UNAVAILABLE = 4  # not found, gated, offline, truncated


class SsdprofError(Exception):
    """An error that the command line prints as two lines instead of a traceback.

    message: a sentence that says what is wrong.
    hint: a sentence that says what to do; may be empty.
    exit_code: that of the command; by default that of the class.

    Secrets in the sentences are masked.
    """

    exit_code: ExitCode = ExitCode.BAD_INPUT

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode | None = None) -> None:
        super().__init__(masked(message))
        self.message = masked(message)
        self.hint = masked(hint)
        if exit_code is not None:
            self.exit_code = exit_code


class BadInputError(SsdprofError):
    """The user asked for something that does not exist or cannot be read."""

    exit_code = ExitCode.BAD_INPUT


class MissingCapabilityError(SsdprofError):
    """This machine lacks something that the command needs."""

    exit_code = ExitCode.MISSING_CAPABILITY


class ModelUnavailableError(SsdprofError):
    """The checkpoint is not available."""

    exit_code = ExitCode.MODEL_UNAVAILABLE


# Errors that are not the fault of a user's file: a full disk, no permission, too many open files.
MACHINE_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EFBIG,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
    }
)


def unreadable(what: str, error: OSError, hint: str) -> SsdprofError:
    """The error for an unreadable file or folder.

    It is MissingCapabilityError if the user has no permission to read it, else BadInputError.

    what: names the file or folder, at the start of the sentence.
    hint: of the BadInputError; what to do if the file is missing or of another kind.
    """
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return MissingCapabilityError(
            f"{what} cannot be read: {reason}.", "Check its permissions and its owner."
        )
    return BadInputError(f"{what} cannot be read: {reason}.", hint)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the most similar known word if there is one, and all known
    words.  Empty if no word is known.
    """
    names = list(known)
    if not names:
        return ""
    alike = difflib.get_close_matches(word, names, n=1)
    guess = f"Did you mean {alike[0]}?  " if alike else ""
    return f"{guess}Choose from: {', '.join(names)}."


def masked(text: str) -> str:
    """The text without access tokens of the hub, and without user names and passwords in the
    addresses of servers.

    These are masked in addresses that do not parse, too, as without a scheme or with a slash in the
    password.
    """
    for secret, replacement in _secrets().items():
        text = text.replace(secret, replacement)
    # shorter words may be part of a path, such as hf_models
    text = re.sub(r"hf_[A-Za-z0-9]{20,}", "hf_...", text)
    # https://user:password@host, https://user:pass/word@host
    text = re.sub(r"(?<=://)([^/\s]*|[^\s'\"]*:[^\s'\"]*)@", "...@", text)
    # user:password@host, without a scheme
    return re.sub(r"(?<![^\s'\"=(])[^\s'\":=(@]+:(?!//)[^\s'\"]*@(?=[\w.\[])", "...@", text)


# environment variables, in capitals, that hold addresses
_ADDRESSES = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
# environment variables that hold access tokens
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHORTEST_TOKEN = 8  # characters; a shorter value could be a part of any word


def _secrets() -> dict[str, str]:
    """Secrets that this process knows -> what is shown instead.

    They are the access tokens, and the users and passwords in addresses of environment variables
    and of the command line, as typed and as a library quotes them.  A path before the revision of a
    repo, as in https://huggingface.co/org/name@v1, is neither.
    """
    values = {name.upper(): value for name, value in os.environ.items()}
    addresses = [values[name] for name in _ADDRESSES if name in values]
    # http://user@host, user:password@host
    addresses += [word for word in sys.argv[1:] if re.search(r"://[^/]*@|:(?!//).*@", word)]
    users = [address.rpartition("://")[2].rpartition("@")[0] for address in addresses]
    users += [quote(user, safe=":") for user in users]
    tokens = [values[name] for name in _TOKENS if len(values.get(name, "")) >= _SHORTEST_TOKEN]
    # a library may show a user and a password without the host
    passwords = [user for user in users if ":" in user]
    in_addresses = {f"{user}@": "...@" for user in users if user}
    return in_addresses | dict.fromkeys((*passwords, *tokens), "...")


def how_ended(exit_code: int) -> str:
    """How a process ended: "exit code 3", "SIGSEGV"; "signal 35" for a signal without a name.

    exit_code: as `subprocess` gives it, negative for a signal.
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    names = {known.value: known.name for known in signal.Signals}
    return names.get(-exit_code, f"signal {-exit_code}")


# characters, of a library's message
LONGEST_WORD = 200  # long enough for most paths
LONGEST_SENTENCE = 1000


# what would control a terminal, or begin a command in the log of GitHub Actions
HARMFUL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    r"|^\s*:(?=:)|(?<=##)\[",
    re.MULTILINE,
)


def harmless(text: str) -> str:
    """The text with escapes for what would control a terminal or the log of GitHub Actions."""
    return HARMFUL.sub(escaped, text)


def escaped(match: re.Match[str]) -> str:
    """A match of `HARMFUL` with its last character as an escape, which makes it harmless."""
    return match[0][:-1] + _escape(match[0][-1])


def _escape(character: str) -> str:
    """The code of a character: \\x1b, \\ud800, \\U000e0001."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def printable(text: str) -> str:
    """The text on one line: single spaces in place of white space, and an escape for each other
    character that is not printable: \\x1b, \\ud800.
    """
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else _escape(char) for char in line)


# The start of parts of messages of torch and transformers that do not help a user: "Exception
# raised from run at module.cpp:12 ...", "CUDA kernel errors might be asynchronously reported ...".
_UNHELPFUL_PARTS = re.compile(
    "Exception raised from|If you were trying to load it from|Model type should be one of"
    "|Should have a `model_type` key|CUDA kernel errors might be|For debugging consider"
)

# What transformers writes before the fault of a config:
# "Validation error for field 'vocab_size':\n    TypeError: ",
# "Class validation error for validator 'check':\n    ValueError: ".
_CHECKER = re.compile(r"(Class v|V)alidation error for (field|validator) '\w+':\s+\w+: ")
# A list of all allowed names, at least seven: "('default', 'linear', ..., 'yarn')".
_KNOWN_NAMES = re.compile(r"\(('\w+', ){6,}'\w+'\)")


def library_message(error: BaseException) -> str:
    """The message of a library's error on one line, without full stops at its end.

    The type of the error comes before the message of a KeyError or an IndexError, which may be only
    a value, and before one of fewer than three words.  It stands alone if there is no message.
    Very long words and messages, which a damaged file may cause, are shortened.  Stacks of C++,
    lists of all known names, and advice on other errors are left out.  The message of pydantic's
    ValidationError is that of `first_fault`.
    """
    name = type(error).__name__
    # other libraries have errors of this name, too
    is_pydantics = name == "ValidationError" and type(error).__module__.startswith("pydantic_core")
    message = first_fault(error) if is_pydantics else str(error)
    message = _UNHELPFUL_PARTS.split(message)[0]
    message = _CHECKER.sub("", message)
    message = _KNOWN_NAMES.sub("the known ones", message)
    words = printable(message).rstrip(". ").split()
    text = " ".join(
        word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..." for word in words
    )
    if isinstance(error, LookupError) or len(words) < 3:
        text = f"{name}: {text}" if text else name
    return whole_words(text, LONGEST_SENTENCE)


# The start of pydantic's name of a fault -> what was expected.  Of "int_parsing" it is "int".
_KINDS = {
    "bool": "true or false",
    "dict": "a mapping",
    "finite": "a finite number",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "model": "a mapping",
    "string": "a text",
    "tuple": "a list",
}
# pydantic's name of a fault -> what was expected, with words of the fault
_LIMITS = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "of the form {pattern}",
    "too_long": "of length {max_length} or less",
    "too_short": "of length {min_length} or more",
    "union_tag_invalid": "one of {expected_tags}",
}
# The last part of a place, for a value that may have several types: it names one of them.
_ONE_OF_TYPES = re.compile(r"int|str|bool|function-.*")
_LONGEST_VALUE = 60  # characters


def first_fault(error: Any, whole: str = "the document") -> str:
    """The first fault that pydantic's ValidationError names, with its place, the value, and what
    was expected: "cases.0.batch is 'x', not an integer", "cases.0.status is missing".

    whole: the name in the sentence of a fault that is of the whole value, not of a part of it.
    """
    faults = error.errors(include_url=False)
    fault = faults[0]
    kind = fault["type"]
    context = fault.get("ctx", {})
    path = list(map(str, fault["loc"]))
    expected = [_expected(fault)]
    if path and _ONE_OF_TYPES.fullmatch(path[-1]):
        expected = [_expected(other) for other in faults if other["loc"][:-1] == fault["loc"][:-1]]
        path.pop()
    if kind.startswith("union_tag"):
        path.append(context["discriminator"].strip("'"))
    place = ".".join(path) or whole
    if kind in ("missing", "union_tag_not_found"):
        return f"{place} is missing"
    if kind == "extra_forbidden":
        return f"{place} is not a known key"
    found = context["tag"] if kind == "union_tag_invalid" else fault["input"]
    if kind != "value_error":
        return f"{place} is {_shown(found)}, not {' or '.join(dict.fromkeys(expected))}"
    if path and isinstance(found, str | int | float):
        place += f" is {_shown(found)}"
    return f"{place}: {context['error']}"


def explain_option(error: Any) -> None:
    """Replace pydantic's words in an error of Typer, whose newer versions have them, by ours."""
    cause = error.__cause__
    if type(cause).__name__ == "ValidationError":
        error.message = first_fault(cause, "it").removeprefix("it: ")


def _expected(fault: Any) -> str:
    """What a fault of pydantic's ValidationError says was expected."""
    limit = _LIMITS.get(fault["type"])
    if limit:
        return limit.format_map(fault["ctx"])
    return _KINDS.get(fault["type"].partition("_")[0], "valid")


def _shown(value: object) -> str:
    """A value of a JSON or TOML document in a sentence."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of length {len(value)}"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return whole_words(printable(repr(value)), _LONGEST_VALUE)


def whole_words(text: str, most: int) -> str:
    """The text; if it has more than `most` characters, its first words, or the start of a single
    long word, and the number of the characters that are left out.

    most: above 30, for the remark.
    """
    if len(text) <= most:
        return text
    start = text[: most - 30]  # with room for the remark
    start = start.rpartition(" ")[0] or start
    return f"{start} ({len(text) - len(start):,} characters more)"


_LONGEST_REASON = 200  # characters


def failed_import(error: Exception) -> SsdprofError | None:
    """The error for a library that cannot be imported; None for an error that has another cause.

    The most frequent cause is an environment variable that the library does not understand, such as
    TORCH_LOGS, so the hint names the variables of the libraries that were being imported.  It does
    not show their values, which may be secrets.
    """
    packages = dict.fromkeys(
        frame.f_globals["__name__"].partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    )
    libraries = [package for package in packages if package not in ("ssdprof", "__main__")]
    if not libraries:
        return None
    starts = [library.upper() for library in libraries]
    prefixes = (*starts, *(f"PY{start}" for start in starts))
    variables = [variable for variable in os.environ if variable.startswith(prefixes)]
    reason = whole_words(library_message(error), _LONGEST_REASON)
    hint = f"Install {libraries[0]} again."
    if variables:
        hint = (
            f"These variables are set; unset those that you do not need: {', '.join(variables)}.  "
            f"Otherwise install {libraries[0]} again."
        )
    return MissingCapabilityError(f"{libraries[0]} cannot be imported: {reason}.", hint)
