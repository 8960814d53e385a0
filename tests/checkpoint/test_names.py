"""Names that users type for models and layers, and the table of families."""

import pytest

from ssdprof.checkpoint.hub import parse_repo
from ssdprof.checkpoint.model import open_model
from ssdprof.checkpoint.names import (
    FAMILIES,
    close_names,
    family_named,
    select_indices,
    siblings_that_fit,
)
from ssdprof.errors import BadInputError

TINY = "ibm-granite/granite-4.0-h-tiny"
LAYERS = (0, 1, 3, 4, 6, 7)  # of a hybrid: attention at 2 and 5


@pytest.mark.parametrize(
    ("typed", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1", "org/name", "v1"),
        (TINY.upper(), TINY, None),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/tree/v1", "org/name", "v1"),
        ("https://huggingface.co/org/name/tree/refs/pr/12", "org/name", "refs/pr/12"),
        ("https://huggingface.co/org/name/blob/main/config.json", "org/name", "main"),
    ],
)
def test_names_and_addresses(typed, repo, revision):
    assert parse_repo(typed, None) == (repo, revision)
    assert parse_repo(typed, revision) == (repo, revision)


@pytest.mark.parametrize(
    ("typed", "revision", "words"),
    [
        ("org/name@v1", "v2", "names the revision v1, and --revision another: v2"),
        ("https://hf.co/datasets/a/b", None, "is not the address of a model"),
        ("https://hf.co/org", None, "Cannot parse URL 'https://hf.co/org'"),
        ("Demo", None, "ships with ssdprof is demo"),
        ("demo@v1", None, "ships with ssdprof is demo"),
        ("", None, "name is empty"),
        ("org/name", " ", "revision is empty"),
        ("demo", "v1", "is local and has no revisions"),
        (".", "v1", "is local and has no revisions"),
    ],
)
def test_names_that_are_refused_at_once(typed, revision, words):
    with pytest.raises(BadInputError, match=words):
        open_model(typed, revision=revision)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("allenai/olmo-hybird-7b", "allenai/Olmo-Hybrid-7B"),
        ("granite-4.0-h-tinny", TINY),
        ("hybird", "allenai/Olmo-Hybrid-7B"),
        ("state-space/mamba2-2.7b", "state-spaces/mamba2-2.7b"),
        ("Qwen/Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("ibm/granite-4.0-h-tiny", TINY),
        ("demoo", "demo"),
    ],
)
def test_a_typo_finds_what_was_meant(typed, meant):
    assert close_names(typed)[0] == meant


@pytest.mark.parametrize("typed", ["org/", "org/nothing", "meta-llama/Llama-3.1-8B", "xyz"])
def test_a_name_unlike_any_finds_nothing(typed):
    assert close_names(typed) == []


# --- families


def test_every_row_is_of_a_supported_type_and_has_its_flagship():
    for row in FAMILIES:
        assert bool(row.typed) == bool(row.flagship)
        assert row.flagship is None or row.flagship in [member.repo for member in row.checkpoints]
        sizes = [member.parameters for member in row.checkpoints]
        assert sizes == sorted(sizes)
    repos = [member.repo for row in FAMILIES for member in row.checkpoints]
    assert len(repos) == len(set(repos))
    assert not set(repos) & {name for row in FAMILIES for name in row.typed}


def test_what_users_type_names_a_family_and_a_repo_does_not():
    family = family_named("ibm-granite/granite-4.0")
    assert family.flagship == "ibm-granite/granite-4.0-h-small"
    assert family_named("IBM-Granite/Granite-4.0") is family
    assert family_named("ibm-granite/granite-4.0-h-small") is None
    assert family_named("granite") is None


def test_siblings_that_fit_are_the_largest_first_and_without_the_model_itself():
    for budget, names in (
        (7_000_000_000, ["micro", "1b", "350m"]),
        (10**15, ["tiny", "micro", "1b", "350m"]),
        (10, []),
    ):
        fitting = siblings_that_fit("ibm-granite/granite-4.0-h-small", budget)
        assert [member.repo.rpartition("-")[2] for member in fitting] == names
    assert siblings_that_fit("someone/else", 10**15) == ()


# --- layers


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        ("all", [0, 1, 3, 4, 6, 7]),
        ("first:3", [0, 1, 3]),
        ("FIRST:1", [0]),
        ("every:2", [0, 3, 6]),
        ("7,3", [3, 7]),
        (" 3 , 7, 3 ", [3, 7]),
        ("0-3", [0, 1, 3]),
        ("3-7", [3, 4, 6, 7]),
        (" 0 - 1 , 7 ", [0, 1, 7]),
        ("6-6,0", [0, 6]),
    ],
)
def test_selects(spec, indices):
    assert list(select_indices(spec, LAYERS)) == indices


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("3,9,2", r"Layers 9, 2 .* 6: 0, 1, 3, 4, 6, 7"),
        ("8-9,2-2,3", r"Layers 8-9, 2-2 have no SSD"),
        ("first:7", "first:7: the model has 6: 0, 1"),
    ],
)
def test_a_selection_that_is_not_there_is_named_and_the_layers_are_listed(spec, words):
    with pytest.raises(BadInputError, match=words):
        select_indices(spec, LAYERS)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "first:",
        "first:-1",
        "first:0",
        "every:x",
        "every:00",
        "3-",
        "3-7-9",
        "7-3",
        "3,,7",
        "3,",
        "-3",
        "3.5",
    ],
)
def test_a_spec_that_cannot_be_read(spec):
    with pytest.raises(BadInputError, match="cannot be read") as raised:
        select_indices(spec, LAYERS)
    assert "every:K" in raised.value.hint
