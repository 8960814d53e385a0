"""The committed configurations: those of 14,000 calls are of November 2026; every call gets a row
of a table, and every row is used.

They are frozen as one hash for each implementation.  An intended change of a choice changes the
hash of its
implementation: the failed test shows the new one.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kernel_cases import EXACT, SSDCase

from ssdprof import kernels
from ssdprof.kernels import device
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import (
    BMM_CHUNK,
    CHUNK_SCAN,
    CHUNK_STATE,
    HOPPER,
    PORTABLE,
    ConfigTable,
    SSDPortableConfig,
    first_fit,
)
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count

CALLS = {"hopper": 2000}  # for each implementation of each operator; of others 1,000
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GPUS = (((9, 0), 132), ((9, 0), 114), ((8, 0), 108), ((8, 9), 58), ((10, 0), 148), ((12, 0), 170))
PRECISIONS = [
    Precision(intermediates=i, state_dtype=d)  # type: ignore[arg-type]
    for i in ("exact", "relaxed")
    for d in DTYPES
]
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 500, 1024, 2000, 4096, 8192, 30000, 65536, 262144)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shape_of(draw: random.Random) -> tuple[int, int, int, torch.Tensor | None]:
    """(batch, length, sequences, cu_seqlens); a third of the calls are decode steps."""
    sequences = draw.choice((1, 2, 3, 8, 64, 300))
    length = draw.choice(LENGTHS)
    if draw.random() < 0.3:
        return sequences, 1, sequences, None
    if draw.random() < 0.3:
        return 1, length, sequences, meta(sequences + 1, dtype=torch.int32)
    return sequences, length, sequences, None


def ssd_inputs(draw: random.Random) -> kernels.SSDInputs:
    b, l, sequences, cu_seqlens = shape_of(draw)
    g = draw.choice((1, 2, 8))
    p = draw.choice((16, 32, 64, 80, 128))
    n = draw.choice((16, 64, 128, 192, 256))
    dtype = draw.choice(DTYPES)
    h = g * draw.choice((1, 4, 10, 16))
    x = meta(b, l, h, p, dtype=dtype)
    B = meta(b, l, g, n, dtype=dtype)
    return kernels.SSDInputs.unchecked(
        x=x,
        dt=meta(b, l, h),
        A=meta(h),
        B=B,
        C=B,
        chunk_size=draw.choice((8, 64, 100, 256)),
        D=None,
        z=draw.choice((None, x)),
        dt_bias=None,
        dt_softplus=True,
        dt_limit=(0.0, float("inf")),
        initial_states=draw.choice((None, meta(sequences, h, p, n))),
        cu_seqlens=cu_seqlens,
    )


def gdn_inputs(draw: random.Random) -> kernels.GDNInputs:
    b, t, sequences, cu_seqlens = shape_of(draw)
    h = draw.choice((1, 2, 4, 16))
    dtype = draw.choice(DTYPES)
    hv = h * draw.choice((1, 2, 3, 4))
    k = draw.choice((16, 32, 64, 96, 128, 192, 256))
    v = draw.choice((16, 64, 128, 256))
    q = meta(b, t, h, k, dtype=dtype)
    return kernels.GDNInputs.unchecked(
        q=q,
        k=q,
        v=meta(b, t, hv, v, dtype=dtype),
        g=meta(b, t, hv),
        beta=meta(b, t, hv),
        scale=None,
        initial_state=draw.choice((None, meta(sequences, hv, k, v))),
        use_qk_l2norm=draw.choice((True, False)),
        chunk_size=draw.choice((16, 32, 64)),
        cu_seqlens=cu_seqlens,
    )


def planned(operator: str, name: str, inputs, draw: random.Random):
    """The plan, or the refusal."""
    try:
        return asdict(kernels.get(operator, name).plan(inputs, draw.choice(PRECISIONS)))
    except kernels.UnsupportedError as error:
        return str(error)


def portable(operator: str, _name: str, inputs, draw: random.Random):
    """The portable kernel's configuration on some GPU."""
    gpu, sms = draw.choice(GPUS)
    if operator == "ssd":
        return asdict(SSDPortableConfig.choose(inputs, gpu, EXACT))
    return asdict(GDNPortableConfig.choose(inputs, gpu, sms, batch_invariant=draw.random() < 0.3))


def hopper(operator: str, _name: str, inputs, draw: random.Random):
    """The Hopper kernel's configuration, for inputs that it may refuse."""
    if operator == "ssd" and not program_count(inputs):
        return "half a pair of heads"
    config = SSDHopperConfig if operator == "ssd" else GDNHopperConfig
    return asdict(
        config.choose(inputs, draw.choice((78, 132)), batch_invariant=draw.random() < 0.3)
    )


DRAWN: dict[str, Callable[[random.Random], Any]] = {"ssd": ssd_inputs, "gdn": gdn_inputs}
FROZEN = {
    ("ssd", "unfused"): "25aacd5d480f591b", ("ssd", "fused"): "8361a89467bd8a43",
    ("ssd", "portable"): "7b8996b7e0a8149a", ("ssd", "hopper"): "5316fca23e66160a",
    ("ssd", "recurrent"): "d534f25ac8ca1043", ("ssd", "unfused_step"): "9a81421c82281b7c",
    ("gdn", "unfused"): "45efeb3d529ef775", ("gdn", "fused"): "0babb6e9e63fda88",
    ("gdn", "portable"): "87e51a757b1ca4b2", ("gdn", "hopper"): "943769517c68cddd",
    ("gdn", "recurrent"): "f7e73c3e6e3553c5", ("gdn", "unfused_step"): "33f7b9b9b9ad5b47",
}  # fmt: skip


def choices(operator: str, name: str) -> Iterator[str]:
    draw = random.Random(f"{operator} {name}")
    choose = {"portable": portable, "hopper": hopper}.get(name, planned)
    for _ in range(CALLS.get(name, 1000)):
        yield repr(choose(operator, name, DRAWN[operator](draw), draw))


SLOW = ("ssd", "hopper")


@pytest.mark.parametrize(
    ("operator", "name"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one == SLOW)) for one in FROZEN],
)
def test_the_choices_are_the_frozen_ones(operator, name):
    digest = hashlib.sha256("\n".join(choices(operator, name)).encode()).hexdigest()[:16]
    assert digest == FROZEN[operator, name]


# --- SSD's tables

TABLE_CALLS = [
    dict(major=major, fp32=fp32, headdim=headdim, dstate=dstate, gate=gate)
    for major, fp32, headdim, dstate, gate in product(
        (8, 9, 10, 12, 13),
        (False, True),
        (1, 16, 64, 80, 128, 256),
        (16, 64, 128, 256),
        (False, True),
    )
]
TABLES: dict[str, ConfigTable] = {
    "HOPPER": HOPPER,
    "PORTABLE": PORTABLE,
    "CHUNK_STATE": CHUNK_STATE,
    "BMM_CHUNK": BMM_CHUNK,
    "CHUNK_SCAN": CHUNK_SCAN,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_call_has_a_row_and_every_row_a_call(table: ConfigTable):
    taken = [
        first_fit(table, **call, exact=exact) for call in TABLE_CALLS for exact in (True, False)
    ]
    assert all(any(row is one for one in taken) for row in table)
    assert all(why for _, _, why in table)


def test_fp32_sums_over_n_are_short():
    """benchmarks/log/ssd.md#row-60: a tensor core rounds towards zero whenever it adds products."""
    assert all(first_fit(PORTABLE, **call)[1].block_n <= 64 for call in TABLE_CALLS if call["fp32"])


def test_no_product_on_hopper_has_rows_whose_addresses_ptxas_loses():
    """benchmarks/log/ssd.md#row-57.  Products of less than 64 rows take their operands from
    registers.
    """
    for call in (call for call in TABLE_CALLS if call["major"] == 9):
        tile = first_fit(PORTABLE, **call)[1]
        width = min(tile.block_p, triton.next_power_of_2(call["headdim"])) * (
            4 if call["fp32"] else 2
        )
        assert tile.chunk < 64 or width >= 128, call


def test_a_reason_goes_with_the_choice():
    inputs = SSDCase(dtype=torch.bfloat16, headdim=64, dstate=128).inputs()
    assert SSDPortableConfig.choose(inputs, (8, 0), EXACT).reason == PORTABLE[-2][2]
    assert SSDHopperConfig.choose(inputs, 132, batch_invariant=False).reason.endswith(HOPPER[0][2])


def test_configurations_are_looked_up_by_the_name_of_the_gpu(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=f"GPU {device}")
    )
    tensors = [torch.zeros(1), SimpleNamespace(is_cuda=True, device=1)]
    assert [device.gpu_name(tensor) for tensor in tensors] == ["cpu", "GPU 1"]
