"""The implementation of a name, and the error for an unknown name; which of ours computes the
operator in a model.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.operators import get
from ssdprof.operators.implementations import (
    kind_of,
    known,
    own_precisions,
    refuse_two_checkouts,
    resolve,
    resolver,
)
from ssdprof.operators.operator import computed

SSD = get("ssd")
GDN = get("gdn")
CPU = torch.device("cpu")
RELAXED = Precision.named("relaxed, bf16 states")

MODULE = """
from dataclasses import dataclass

def plain(inputs):
    return inputs.x, inputs.x

def told(inputs, *, precision):
    return precision, precision

def for_gdn(inputs: "GDNInputs"):
    return inputs

class Nested:
    @staticmethod
    def kernel(inputs):
        return inputs.x, inputs.x

number = 3
"""


@dataclass(frozen=True)
class Inputs:
    """Inputs of an operator."""

    x: torch.Tensor
    device: torch.device | None = None


@pytest.fixture(autouse=True)
def here(users_folder: Path) -> Path:
    (users_folder / "kernels_of_a_user.py").write_text(MODULE)
    (users_folder / "broken_module.py").write_text("import no_such_library\n")
    (users_folder / "leaving_module.py").write_text("raise SystemExit('gone')\n")
    (users_folder / "skipping_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_library')\n"
    )
    return users_folder


def install(folder: Path, distribution: str, **points: str):
    """Writes the files of an installed distribution that registers entry points."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[ssdprof.implementations]", *lines, ""]))


def test_a_checkout_is_named_with_the_library(here: Path):
    with pytest.raises(BadInputError) as told:
        resolve(SSD, "published")
    assert told.value.hint == "Give a checkout of github.com/RishiAstra/mamba: published=DIRECTORY."
    absent = resolve(SSD, f"published={here}").absent
    assert (
        "cannot be imported from its checkout: there is no mamba_ssm/ops/triton/softplus.py"
        in absent
    )
    with pytest.raises(BadInputError, match=r"There is no folder .*nowhere") as told:
        resolve(SSD, f"published={here / 'nowhere'}")
    assert told.value.hint == "Give a checkout of github.com/RishiAstra/mamba."
    with pytest.raises(BadInputError, match="mamba_ssm is taken as installed"):
        resolve(SSD, f"mamba_ssm={here}")
    with pytest.raises(BadInputError, match="'fused' is not a library of ssd"):
        resolve(SSD, f"fused={here}")


def test_a_library_has_one_checkout_in_a_command(here: Path):
    get_once = resolver(torch.device("cpu"))
    (here / "a").mkdir()
    first = get_once("ssd", f"published={here}")
    assert get_once("ssd", f"published={here}") is get_once("ssd", "published") is first
    with pytest.raises(BadInputError, match="published is named with two checkouts"):
        get_once("ssd", f"published={here / 'a'}")
    refuse_two_checkouts(["fused", "published=a", "published=a"])
    with pytest.raises(BadInputError, match="published is named with two checkouts"):
        refuse_two_checkouts(["published=a", "fused", "published=b"])


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        BadInputError, match=r"There is no implementation 'fussed' of ssd\."
    ) as told:
        resolve(SSD, "fussed")
    assert told.value.hint.startswith("Did you mean fused?")
    assert "flash_qla" in known(GDN)
    assert "flash_qla" not in known(SSD)
    with pytest.raises(BadInputError, match=r"'flash_qla' of ssd: it is one of gdn\."):
        resolve(SSD, "flash_qla")


def test_a_function_of_the_current_directory(here: Path):
    found = resolve(SSD, "kernels_of_a_user:plain")
    assert (found.kind, found.version) == ("own", "kernels_of_a_user:plain")
    x = torch.ones(1)
    assert found.run(Inputs(x, x.device), Precision()) == (x, x)
    assert own_precisions(found, "bf16", (Precision(), RELAXED)) == (Precision(),)
    assert sys.path[-1] == str(here), (
        "what is imported later is found too, and hides no installed module"
    )
    assert resolve(SSD, "kernels_of_a_user:Nested.kernel").kind == "own"


def test_a_function_that_is_told_the_precision_runs_at_all_that_are_wanted():
    found = resolve(SSD, "kernels_of_a_user:told")
    assert own_precisions(found, "bf16", (Precision(), RELAXED)) == (Precision(), RELAXED)
    with pytest.raises(TypeError, match="must return tensors, and out is Precision"):
        found.run(Inputs(torch.ones(1), CPU), Precision())


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cpu", -1)])
def test_an_own_kernel_is_called_on_the_gpu_of_its_inputs(monkeypatch, device, index):
    """Triton launches on the current GPU, which can be another one in a rank of torchrun or a
    placed model.
    """
    current = []

    @contextmanager
    def on(index: int) -> Iterator[None]:
        current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", on)
    resolve(SSD, "kernels_of_a_user:plain").run(
        Inputs(torch.ones(1), torch.device(device)), Precision()
    )
    assert current == [index]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "broken_module:f",
            "The module of broken_module:f cannot be imported: No module named 'no_such_library'",
        ),
        ("leaving_module:f", "The module of leaving_module:f cannot be imported: SystemExit: gone"),
        (
            "skipping_module:f",
            (
                "The module of skipping_module:f cannot be imported: could not import "
                "'no_such_library'"
            ),
        ),
        ("nowhere:f", "The module of nowhere:f cannot be imported: No module named 'nowhere'"),
        ("kernels_of_a_user:g", "has no 'g'"),
        ("kernels_of_a_user:", "'kernels_of_a_user:' names no function."),
        (":g", "':g' names no module."),
        ("kernels_of_a_user:number", "is not a function, but of type int"),
        ("kernels_of_a_user:for_gdn", "takes GDNInputs, and these layers are Mamba-2"),
    ],
)
def test_an_own_kernel_that_cannot_be_had(word, message):
    with pytest.raises(BadInputError) as told:
        resolve(SSD, word)
    assert message in told.value.message
    assert told.value.hint


def test_an_entry_point_has_a_name_of_its_own(here: Path, monkeypatch):
    install(
        here / "site", "a-kernel", mine="kernels_of_a_user:plain", fused="kernels_of_a_user:told"
    )
    monkeypatch.syspath_prepend(here / "site")
    found = resolve(SSD, "mine")
    assert (found.name, found.kind, found.version) == ("mine", "own", "kernels_of_a_user:plain")
    assert resolve(SSD, "fused").kind == "bundled", (
        "an installed package takes no name of ssdprof's"
    )
    assert "mine" in known(GDN)


def test_an_entry_point_that_cannot_be_loaded_is_named(here: Path, monkeypatch):
    install(here / "site", "a-kernel", mine="broken_module:f")
    monkeypatch.syspath_prepend(here / "site")
    with pytest.raises(
        BadInputError, match=r"The entry point 'mine' cannot be loaded\.  The module of broken_mod"
    ):
        resolve(SSD, "mine")


def test_the_kind_of_a_name_needs_no_import():
    words = ("fused", "mamba_ssm", "published=/nowhere", "nowhere:f", "an_entry_point")
    assert [kind_of(SSD, word) for word in words] == ["bundled", "library", "library", "own", "own"]
    assert kind_of(GDN, "fused_portable") == "bundled"


def test_an_entry_point_of_two_distributions_is_not_chosen_for_the_user(here: Path, monkeypatch):
    install(here / "one", "one", mine="kernels_of_a_user:plain")
    install(here / "two", "two", mine="kernels_of_a_user:told")
    monkeypatch.syspath_prepend(here / "one")
    monkeypatch.syspath_prepend(here / "two")
    with pytest.raises(BadInputError, match="Several installed packages register 'mine'") as told:
        resolve(SSD, "mine")
    assert "kernels_of_a_user:plain" in told.value.hint
    assert "kernels_of_a_user:told" in told.value.hint


# --- our kernels in a model


@pytest.fixture
def registered(monkeypatch) -> dict[str, Any]:
    """Implementations by name that replace the bundled ones: an exception is raised, another value
    is the output.
    """
    found = {}

    def get(_operator: str, name: str) -> SimpleNamespace:
        def run(_inputs, _precision):
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name], None

        return SimpleNamespace(run=run)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "names", lambda _: list(found))
    monkeypatch.setattr(kernels, "get", get)
    return found


REFUSED = UnsupportedError("K of 7")
ON_GPU = SimpleNamespace(operator="gdn", device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reference": "reference", "unfused": "unfused", "fused": "fused"}, "fused"),
        ({"unfused": "unfused", "fused": REFUSED}, "unfused"),
    ],
)
def test_fused_is_preferred_and_unfused_computes_what_it_refuses(
    registered: dict[str, Any], given, expected
):
    registered.update(given)
    assert computed(print, ON_GPU) == (expected, None)


def test_what_none_computes_is_refused_with_every_reason_and_other_errors_pass(
    registered: dict[str, Any],
):
    registered.update(reference="reference", fused=REFUSED)
    with pytest.raises(BadInputError, match=r"No GDN .*\(fused: K of 7\)"):
        computed(print, ON_GPU)
    registered.update(fused=RuntimeError("broken"), unfused="unfused")
    with pytest.raises(RuntimeError, match="broken"):
        computed(print, ON_GPU)
