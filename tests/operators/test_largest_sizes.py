"""An operator's largest sizes are those of its kernels.  A config is judged by them before a download."""

from __future__ import annotations

import pytest
import torch

from ssdprof import kernels, operators
from ssdprof.kernels import GDNInputs, Precision, SSDInputs, UnsupportedError


def ssd(dstate: int) -> SSDInputs:
    B = torch.zeros(1, 1, 1, dstate)
    return SSDInputs(x=torch.zeros(1, 1, 1, 16), dt=torch.zeros(1, 1, 1), A=-torch.ones(1), B=B, C=B, chunk_size=16)


def gdn(key_dim: int, value_dim: int) -> GDNInputs:
    k, g = torch.zeros(1, 1, 1, key_dim), torch.zeros(1, 1, 1)
    return GDNInputs(q=k, k=k, v=torch.zeros(1, 1, 1, value_dim), g=g, beta=g)


@pytest.mark.parametrize("name", ["unfused", "fused", "recurrent"])
def test_an_ssd_kernel_takes_the_largest_state_and_no_larger_one(name: str) -> None:
    most = operators.get("ssd").largest["dstate"]
    implementation = kernels.get("ssd", name)
    out, _ = implementation.run(ssd(most), Precision())
    assert out.shape == (1, 1, 1, 16)
    with pytest.raises(UnsupportedError, match="dstate is at most"):
        implementation.run(ssd(most + 1), Precision())


def test_gdn_inputs_have_the_largest_dimensions_and_no_larger_ones() -> None:
    largest = operators.get("gdn").largest
    K, V = largest["key_dim"], largest["value_dim"]
    gdn(K, V)
    with pytest.raises(ValueError, match=f"at most {K}"):
        gdn(K + 1, V)
    with pytest.raises(ValueError, match=f"at most {V}"):
        gdn(K, V + 1)
