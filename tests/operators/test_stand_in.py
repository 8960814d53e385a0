"""The operator in a model on a GPU: our kernels in order of preference, and an error that names each refusal."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.operators.operator import run_kernels

DEVICE = torch.device("cuda")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Implementations by name that replace the bundled ones: an exception is raised, a result is returned."""
    found: dict[str, Any] = {}

    def get(_operator: str, name: str) -> SimpleNamespace:
        def run(_inputs: Any, _precision: Any) -> Any:
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        return SimpleNamespace(run=run)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "names", lambda _: list(found))
    monkeypatch.setattr(kernels, "get", get)
    return found


def test_fused_is_preferred(registered: dict[str, Any]) -> None:
    registered.update(reference=("reference", None), unfused=("unfused", None), fused=("fused", None))
    assert run_kernels("gdn", None, DEVICE) == ("fused", None)


def test_what_fused_refuses_unfused_computes(registered: dict[str, Any]) -> None:
    registered.update(unfused=("unfused", None), fused=UnsupportedError("K of 7"))
    assert run_kernels("gdn", None, DEVICE) == ("unfused", None)


def test_what_none_computes_is_refused_with_every_reason(registered: dict[str, Any]) -> None:
    registered.update(reference=("reference", None), fused=UnsupportedError("K of 7"))
    with pytest.raises(BadInputError, match=r"No GDN .*\(fused: K of 7; unfused: there is none\)"):
        run_kernels("gdn", None, DEVICE)


def test_errors_that_are_no_refusals_pass(registered: dict[str, Any]) -> None:
    registered.update(fused=RuntimeError("broken"), unfused=("unfused", None))
    with pytest.raises(RuntimeError, match="broken"):
        run_kernels("gdn", None, DEVICE)
