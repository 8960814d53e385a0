"""The names that users type for a model."""

import subprocess
import sys

import pytest

from ssdprof.checkpoint.located import locate
from ssdprof.checkpoint.names import close_names, parse_repo
from ssdprof.errors import BadInputError

TINY = "ibm-granite/granite-4.0-h-tiny"


@pytest.mark.parametrize(
    ("typed", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1", "org/name", "v1"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("https://huggingface.co/org/name/tree/v1", "org/name", "v1"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name/tree/refs/pr/12", "org/name", "refs/pr/12"),
        ("https://huggingface.co/org/name/blob/main/config.json", "org/name", "main"),
        ("http://localhost:80/org/name/resolve/v1/config.json?download=true#top", "org/name", "v1"),
        (TINY.upper(), TINY, None),
    ],
)
def test_names_and_addresses(typed: str, repo: str, revision: str | None) -> None:
    name = parse_repo(typed, None)
    assert (name.repo_id, name.revision) == (repo, revision)
    assert parse_repo(typed, revision).revision == revision


def test_two_revisions() -> None:
    with pytest.raises(BadInputError, match="names the revision v1, and --revision another: v2"):
        parse_repo("org/name@v1", "v2")


@pytest.mark.parametrize(
    "typed", ["https://huggingface.co", "https://huggingface.co/org", "https://hf.co/datasets/a/b"]
)
def test_an_address_of_no_model(typed: str) -> None:
    with pytest.raises(BadInputError, match="is not the address of a model"):
        parse_repo(typed, None)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hybird", "allenai/Olmo-Hybrid-7B"),
        ("allenai/olmo-hybird-7b", "allenai/Olmo-Hybrid-7B"),
        ("Olmo-Hybird", "allenai/Olmo-Hybrid-7B"),
        ("granite-4.0-h-tinny", TINY),
        ("ibm/granite-4.0-h-tiny", TINY),
        ("state-space/mamba2-2.7b", "state-spaces/mamba2-2.7b"),
        ("demoo", "demo"),
    ],
)
def test_a_typo_finds_what_was_meant(typed: str, meant: str) -> None:
    assert close_names(typed)[0] == meant


@pytest.mark.parametrize("typed", ["org/nothing", "meta-llama/Llama-3.1-8B", "xyz"])
def test_a_name_unlike_any_finds_nothing(typed: str) -> None:
    assert close_names(typed) == []


@pytest.mark.parametrize("typed", ["Demo", "demo@v1"])
def test_the_demo_model_has_one_name(typed: str) -> None:
    with pytest.raises(BadInputError, match="ships with ssdprof is demo"):
        locate(typed)


@pytest.mark.parametrize("typed", ["", "  "])
def test_an_empty_name_is_not_the_current_folder(typed: str) -> None:
    with pytest.raises(BadInputError, match="name is empty"):
        locate(typed)


def test_names_are_judged_without_torch() -> None:
    code = (
        "import sys; from ssdprof.checkpoint.located import locate\n"
        "locate('demo')\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
