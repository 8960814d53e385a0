"""Error messages for users: complete, on one line, and without secrets."""

from urllib.parse import quote

import pytest

from ssdprof.core.target import LayerRef
from ssdprof.errors import (
    BadInputError,
    harmless,
    how_ended,
    library_message,
    masked,
    printable,
    unreadable,
)


def test_a_signal_without_a_name():
    assert how_ended(-35) == "signal 35"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host:80/org/name", "http://...@host:80/org/name"),
        ("https://u:p@ss@host/a, https://v:q@other", "https://...@host/a, https://...@other"),
        ("http://user:s3/cret@127.0.0.1:9", "http://...@127.0.0.1:9"),
        ("HF_ENDPOINT='user:s3cret@127.0.0.1:9'", "HF_ENDPOINT='...@127.0.0.1:9'"),
        ("proxy user:p@ss@[::1]:3128", "proxy ...@[::1]:3128"),
        ("match@1e-3:99 and speedup@k:f:1.5", "match@1e-3:99 and speedup@k:f:1.5"),
        ("token hf_AbCd1234567890AbCd1234 was refused", "token hf_... was refused"),
        ("run hf_models/checkpoint", "run hf_models/checkpoint"),
        ("https://huggingface.co/org/name@v1", "https://huggingface.co/org/name@v1"),
        ("org/name@v1 by a@b.c", "org/name@v1 by a@b.c"),
    ],
)
def test_secrets_are_masked(text, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ssdprof", "https://huggingface.co/org/name@v1"])
    assert masked(text) == shown
    error = BadInputError(text, text)
    assert (error.message, error.hint, str(error)) == (shown, shown, shown)


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "https_proxy", "ALL_PROXY", "the command"])
@pytest.mark.parametrize("user", ["user:s3 cret", "u:p@s s/x", "a'b\"c", "u"])
def test_an_address_that_is_known_is_masked_whatever_is_in_it(variable, user, monkeypatch):
    address = f"http://{user}@127.0.0.1:9"
    if variable == "the command":
        monkeypatch.setattr("sys.argv", ["ssdprof", "run", address])
    else:
        monkeypatch.setenv(variable, address)
    quoted = f"http://{quote(user, safe=':')}@127.0.0.1:9"
    text = f"the hub at {address} is busy, {quoted} too: you must"
    shown = "the hub at http://...@127.0.0.1:9 is busy, http://...@127.0.0.1:9 too: you must"
    assert masked(text) == shown


def test_a_password_is_masked_without_a_scheme(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ssdprof", "run", "bob:p w@127.0.0.1:9/org/model"])
    assert masked("'bob:p w' is neither a hub id nor a folder") == (
        "'...' is neither a hub id nor a folder"
    )


def test_a_token_that_is_known_is_masked_in_any_form(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "api-key 12345678")
    assert masked("sent 'api-key 12345678'") == "sent '...'"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("swish_7"), "KeyError: 'swish_7'"),
        (RecursionError(), "RecursionError"),
        (ValueError("nan"), "ValueError: nan"),
        (TypeError("expected a float. "), "expected a float"),
        (type("ValidationError", (Exception,), {})("not of pydantic"), "not of pydantic"),
        (ValueError("a sentence of\n" * 50), ("a sentence of " * 50).strip()),
        (ValueError("word " * 5000), "word " * 194 + "(24,030 characters more)"),
        (ValueError("a value of " + "x" * 5000), "a value of " + "x" * 197 + "..."),
        (
            RuntimeError("It is too large\nException raised from f at g.h:79\nframe #0"),
            "It is too large",
        ),
        (
            ValueError("Validation error for field 'x':\n    TypeError: Field 'x' expected int"),
            "Field 'x' expected int",
        ),
        (
            ValueError(
                "Class validation error for validator 'check':\n    ValueError: types must be in "
                "('a', 'b', 'c', 'd', 'e', 'f', 'g') but got ['x']"
            ),
            "types must be in the known ones but got ['x']",
        ),
        (
            ValueError("No tokenizer here. If you were trying to load it from X"),
            "No tokenizer here",
        ),
    ],
)
def test_a_librarys_error_that_is_no_sentence(error, shown):
    assert library_message(error) == shown


def test_no_escape_sequence_reaches_the_terminal():
    assert printable("a\x1b[31m\n b\ud800µ") == r"a\x1b[31m b\ud800µ"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("demo\x1b]0;owned\x07\x1b[2J", r"demo\x1b]0;owned\x07\x1b[2J"),
        ("a\r::error::b", r"a\x0d::error::b"),
        (" ::error::b\n\t::set-output name=a::b", " \\x3a:error::b\n\t\\x3a:set-output name=a::b"),
        ("##[error]a", r"##\x5berror]a"),
        ("at::native\tµ\n\u202e\x9b\ud800", "at::native\tµ\n\\u202e\\x9b\\ud800"),
    ],
)
def test_no_text_controls_a_terminal_or_a_log(text, shown):
    assert (harmless(text), harmless(shown)) == (shown, shown)
    assert LayerRef(index=0, name=text, operator="").name == shown


def test_unreadable_is_not_missing():
    missing = unreadable(
        "The file a", FileNotFoundError(2, "No such file or directory"), "Name a file."
    )
    denied = unreadable("The file a", PermissionError(13, "Permission denied"), "Name a file.")
    assert (missing.exit_code, missing.hint) == (2, "Name a file.")
    assert (denied.exit_code, denied.message) == (
        3,
        "The file a cannot be read: Permission denied.",
    )
