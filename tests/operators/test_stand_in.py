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
    """Implementations by name that replace the bundled ones: an exception is raised, another value is the output."""
    found: dict[str, Any] = {}

    def get(_operator: str, name: str) -> SimpleNamespace:
        def run(_inputs: Any, _precision: Any) -> Any:
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name], None

        return SimpleNamespace(run=run)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "names", lambda _: list(found))
    monkeypatch.setattr(kernels, "get", get)
    return found


REFUSED = UnsupportedError("K of 7")


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({"reference": "reference", "unfused": "unfused", "fused": "fused"}, "fused"),
        ({"unfused": "unfused", "fused": REFUSED}, "unfused"),
    ],
)
def test_fused_is_preferred_and_unfused_computes_what_it_refuses(
    registered: dict[str, Any], kernels: dict[str, Any], expected: str
) -> None:
    registered.update(kernels)
    assert run_kernels("gdn", None, DEVICE) == (expected, None)


def test_what_none_computes_is_refused_with_every_reason_and_other_errors_pass(registered: dict[str, Any]) -> None:
    registered.update(reference="reference", fused=REFUSED)
    with pytest.raises(BadInputError, match=r"No GDN .*\(fused: K of 7\)"):
        run_kernels("gdn", None, DEVICE)
    registered.update(fused=RuntimeError("broken"), unfused="unfused")
    with pytest.raises(RuntimeError, match="broken"):
        run_kernels("gdn", None, DEVICE)
