from typing import Any

import torch

from ssdprof.kernels.ssd.inputs import SSDInputs


def random_inputs(
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    seqlen: int = 100,
    heads: int = 4,
    headdim: int = 32,
    dstate: int = 16,
    groups: int = 2,
    seed: int = 0,
    **overrides: Any,
) -> SSDInputs:
    """Generated as a layer is initialised: normal x, B and C, steps 1e-3..1e-1 before the token's
    part, A in -16..-1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3, generator=generator))
    tokens = dict(
        x=normal(batch, seqlen, heads, headdim),
        dt=normal(batch, seqlen, heads),
        B=normal(batch, seqlen, groups, dstate),
        C=normal(batch, seqlen, groups, dstate),
    )
    tensors = {name: tensor.to(dtype) for name, tensor in tokens.items()}
    layer = {
        "A": -torch.linspace(1, 16, heads),
        "D": normal(heads),
        "dt_bias": step + torch.log(-torch.expm1(-step)),
    }
    options = {"chunk_size": 32, "dt_softplus": True}
    return SSDInputs(**tensors | layer | options | overrides)
