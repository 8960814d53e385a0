"""The table of families: the names that users type, the models that fit, and no cost to read it."""

from __future__ import annotations

import subprocess
import sys

from ssdprof.checkpoint.families import FAMILIES, family_named, known, siblings_that_fit
from ssdprof.checkpoint.model_types import MODEL_TYPES


def test_every_row_is_of_a_supported_type_and_has_its_flagship() -> None:
    for row in FAMILIES:
        assert MODEL_TYPES[row.model_type].operator == row.operator
        assert bool(row.typed) == bool(row.flagship)
        assert row.flagship is None or row.flagship in [member.repo for member in row.checkpoints]
        sizes = [member.parameters for member in row.checkpoints]
        assert sizes == sorted(sizes)
    repos = [member.repo for row in FAMILIES for member in row.checkpoints]
    assert len(repos) == len(set(repos))
    assert not set(repos) & {name for row in FAMILIES for name in row.typed}


def test_what_users_type_names_a_family_and_a_repo_does_not() -> None:
    family = family_named("ibm-granite/granite-4.0")
    assert family is not None
    assert family.flagship == "ibm-granite/granite-4.0-h-small"
    assert family_named("IBM-Granite/Granite-4.0") is family
    assert family_named("ibm-granite/granite-4.0-h-small") is None
    assert family_named("granite") is None


def test_siblings_that_fit_are_the_largest_first_and_without_the_model_itself() -> None:
    fitting = siblings_that_fit("ibm-granite/granite-4.0-h-small", 7_000_000_000)
    assert [member.repo.rpartition("-")[2] for member in fitting] == ["micro", "1b", "350m"]
    assert siblings_that_fit("ibm-granite/granite-4.0-h-tiny", 10) == ()
    assert siblings_that_fit("someone/else", 10**15) == ()
    everything = siblings_that_fit("ibm-granite/granite-4.0-h-small", 10**15)
    assert "ibm-granite/granite-4.0-h-small" not in [member.repo for member in everything]


def test_known_checkpoints_say_where_their_size_is_from() -> None:
    assert all(member.parameters_from for row in FAMILIES for member in row.checkpoints)
    mamba = known("state-spaces/mamba2-2.7b")
    assert mamba is not None
    assert (mamba.trained_context, mamba.weight_bytes) == (2048, 5_400_000_000)


def test_the_table_and_the_descriptions_import_no_heavy_package() -> None:
    code = (
        "import sys, ssdprof.checkpoint.families, ssdprof.checkpoint.located, ssdprof.checkpoint.fetched\n"
        "print(*sorted({'torch', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
