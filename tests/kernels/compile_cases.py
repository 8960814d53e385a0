"""The launches that tests compile without a GPU: tables of label -> launch, on torch's meta
device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from compile_target import on_meta
from kernel_cases import BF16, EXACT, FP16, FP32, RELAXED, RELAXED_FP32, GDNCase, KDACase, SSDCase
from targets import GDN_ON_HOPPER
from torch import Tensor

from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import hopper_launch as gdn_hopper_launch
from ssdprof.kernels.gdn.portable import portable_launch as gdn_portable_launch
from ssdprof.kernels.gdn.recurrent import blocks_of, three_stages
from ssdprof.kernels.gdn.recurrent import recurrent_launch as gdn_recurrent_launch
from ssdprof.kernels.gdn.unfused.pipeline import six_stages
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.kda.fused import KDAPortableConfig
from ssdprof.kernels.kda.fused import portable_launch as kda_portable_launch
from ssdprof.kernels.kda.hopper.launch import WHOLE_CONFIG, KDAHopperConfig, whole_launch
from ssdprof.kernels.kda.hopper.launch import hopper_launch as kda_hopper_launch
from ssdprof.kernels.kda.unfused import six_stages as kda_six_stages
from ssdprof.kernels.mixer import causal_conv1d, gated_rms_norm
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.hopper.launch import hopper_launch as ssd_hopper_launch
from ssdprof.kernels.ssd.portable import portable_launch as ssd_portable_launch
from ssdprof.kernels.ssd.recurrent import recurrent_launch, two_stages
from ssdprof.kernels.ssd.unfused import five_stages
from ssdprof.kernels.stored_states import Stepping
from ssdprof.kernels.tensors import contiguous_copy
from ssdprof.operators.decode_states import parse_state_format

Launches = dict[str, Callable[[], Any]]


def each(launch: Callable[..., Any], cases: Mapping[str, Any]) -> Launches:
    return {
        label: partial(launch, *(case if isinstance(case, tuple) else (case,)))
        for label, case in cases.items()
    }


def capability() -> int:
    return int(triton.runtime.driver.active.get_current_target().arch)


# --- SSD


def ssd_portable(case: SSDCase, precision: Precision, config: SSDPortableConfig | None = None):
    inputs = on_meta(case.inputs())
    config = config or SSDPortableConfig.choose(inputs, divmod(capability(), 10), precision)
    ssd_portable_launch(inputs, precision, config)(inputs)


def ssd_unfused(case: SSDCase, precision: Precision):
    five_stages(on_meta(case.inputs()), precision)


def ssd_hopper(case: SSDCase, precision: Precision, segments: Cut):
    inputs = on_meta(case.inputs())
    config = SSDHopperConfig.choose(inputs, sm_count=132, batch_invariant=False)
    ssd_hopper_launch(inputs, precision, replace(config, **vars(segments)))(inputs)


def ssd_recurrent(case: SSDCase, state_every: int = 0):
    inputs = replace(on_meta(case.inputs()), state_every=state_every)
    recurrent_launch(inputs)(inputs)


def drafted_in_place(case: GDNCase | SSDCase):
    """Inputs with a slot of a pool for the state after each token."""
    inputs = on_meta(case.inputs())
    table = torch.empty(inputs.sequences, inputs.length, dtype=torch.int32, device="meta")
    return replace(inputs, state_indices=table, accepted=table[:, 0], write_indices=table)


def ssd_in_place(case: SSDCase):
    inputs = drafted_in_place(case)
    recurrent_launch(inputs, in_place=True)(inputs)


def ssd_step(case: SSDCase):
    two_stages(on_meta(case.inputs()))


P64 = SSDCase(seqlen=1000, heads=2, headdim=64, dstate=128, chunk_size=256, dtype=BF16)
PACKED = dict(lengths=(600, 9), initial_states=True, gate=True, skip="(h, p)")
MAMBA2 = SSDCase(heads=2, headdim=64, dstate=128, seqlen=1024, dtype=BF16)
SHIPPED_PORTABLE: dict[str, tuple[SSDCase, Precision]] = {
    "fp32, n 64": (P64.but(dstate=64, dtype=FP32), EXACT),
    "fp32, n 128": (P64.but(dtype=FP32), EXACT),
    "fp32, n 256": (P64.but(dstate=256, dtype=FP32), EXACT),
    "bf16, p 32": (P64.but(headdim=32), EXACT),
    "fp32, n 64, relaxed": (P64.but(dstate=64, dtype=FP32), RELAXED_FP32),
    "fp32, n 256, relaxed": (P64.but(dstate=256, dtype=FP32), RELAXED_FP32),
    "bf16": (P64.but(seqlen=1024), EXACT), "bf16, gate": (P64.but(seqlen=1024, gate=True), EXACT),
    "fp16, p 80, packed, relaxed": (P64.but(headdim=80, dtype=FP16, **PACKED), RELAXED),
    "bf16, n 256": (P64.but(dstate=256), EXACT),
    "bf16, p 128, n 256, packed": (P64.but(headdim=128, dstate=256, **PACKED), EXACT),
}  # fmt: skip
SHIPPED_UNFUSED: dict[str, tuple[SSDCase, Precision]] = {
    "fp32": (P64.but(dtype=FP32), EXACT), "bf16": (P64, EXACT),
    "bf16, n 256": (P64.but(dstate=256), EXACT),
    "fp16, packed, relaxed": (P64.but(dtype=FP16, **PACKED), RELAXED),
    "bf16, n 256, packed": (P64.but(dstate=256, **PACKED), EXACT),
    "bf16, p 128, n 64": (P64.but(headdim=128, dstate=64), EXACT),
    "bf16, p 128": (P64.but(headdim=128), EXACT),
    "bf16, p 128, n 256": (P64.but(headdim=128, dstate=256), EXACT),
}  # fmt: skip
SHIPPED = {
    f"portable: {label}": launch for label, launch in each(ssd_portable, SHIPPED_PORTABLE).items()
}
SHIPPED |= {
    f"unfused: {label}": launch for label, launch in each(ssd_unfused, SHIPPED_UNFUSED).items()
}

FOR_UNFUSED = SSDCase(heads=16, headdim=64, dstate=128, chunk_size=256, dtype=BF16)
SHORT_PACK = PACKED | dict(lengths=(40, 9))
SSD_UNFUSED = each(
    ssd_unfused,
    {
        "mamba2 bf16 exact": (FOR_UNFUSED, EXACT),
        "mamba2 fp32 exact": (FOR_UNFUSED.but(dtype=FP32), EXACT),
        "packed fp16 relaxed": (FOR_UNFUSED.but(**SHORT_PACK, dtype=FP16), RELAXED),
        "largest bf16 exact": (
            FOR_UNFUSED.but(heads=2, headdim=128, dstate=256, **SHORT_PACK),
            EXACT,
        ),
    },
)

SSD_PORTABLE = each(
    ssd_portable,
    {
        "mamba2 bf16 exact": (MAMBA2, EXACT),
        "ragged bf16 exact": (MAMBA2.but(seqlen=1000), EXACT),
        "gated bf16 exact": (MAMBA2.but(gate=True), EXACT),
        "without D bf16 exact": (MAMBA2.but(skip=""), EXACT),
        "packed fp16 relaxed": (MAMBA2.but(**PACKED, dtype=FP16), RELAXED),
        "mamba2 fp32 exact": (MAMBA2.but(seqlen=1000, dtype=FP32), EXACT),
        "mamba2 fp32 relaxed": (MAMBA2.but(seqlen=1000, dtype=FP32), RELAXED_FP32),
        "n 64 fp32 relaxed": (MAMBA2.but(dstate=64, dtype=FP32), RELAXED_FP32),
        "p 80 bf16 exact": (MAMBA2.but(seqlen=1000, headdim=80), EXACT),
        "n 256 bf16 exact": (MAMBA2.but(seqlen=1000, dstate=256), EXACT),
        "n 8 bf16 exact": (MAMBA2.but(seqlen=1000, dstate=8), EXACT),
        "n 48 bf16 exact": (MAMBA2.but(seqlen=1000, dstate=48), EXACT),
    },
)
COMMON = {"mamba2 bf16 exact": SSD_PORTABLE["mamba2 bf16 exact"]}

CUT = Cut(segment=4)
ALONE = Cut(segment=3, long_count=1, long_segment=9, recompute=True)
WHOLE = Cut(segment=16)
SHARES = Cut(segment=16, shares=4)
FOUR = MAMBA2.but(heads=4)
HYBRID = FOUR.but(headdim=80, lengths=(600, 9), initial_states=True)
BATCH = FOUR.but(batch=3)
WIDE = dict(heads=3, dstate=256)
SSD_HOPPER = each(
    ssd_hopper,
    {
        "mamba2 bf16 exact": (FOUR, EXACT, CUT),
        "mamba2 bf16 exact, alone": (FOUR, EXACT, ALONE),
        "mamba2 fp16 exact": (FOUR.but(dtype=FP16), EXACT, CUT),
        "mamba2 fp16 relaxed": (FOUR.but(dtype=FP16), RELAXED, CUT),
        "mamba2 bf16 exact, one segment": (FOUR, EXACT, WHOLE),
        "mamba2 bf16 exact, shares": (BATCH, EXACT, SHARES),
        "mamba2 fp16 relaxed, shares": (BATCH.but(dtype=FP16), RELAXED, SHARES),
        "packed bf16 exact": (HYBRID.but(headdim=64, initial_states=False), EXACT, CUT),
        "packed p 80 bf16": (HYBRID, EXACT, CUT),
        "p 80 bf16, shares": (BATCH.but(headdim=80, initial_states=True), EXACT, SHARES),
        "p 128 n 64 bf16": (FOUR.but(heads=2, headdim=128, dstate=64), EXACT, CUT),
        "n 256 bf16, one segment": (FOUR.but(**WIDE), EXACT, WHOLE),
        "n 256 bf16, shares": (BATCH.but(**WIDE), EXACT, SHARES),
        "n 256 fp16 relaxed, shares": (BATCH.but(dtype=FP16, **WIDE), RELAXED, SHARES),
        "p 128 n 256 bf16": (FOUR.but(headdim=128, **WIDE), EXACT, CUT),
        "n 256 fp16 relaxed": (FOUR.but(dtype=FP16, **WIDE), RELAXED, CUT),
        "packed p 80 n 256 bf16": (HYBRID.but(**WIDE), EXACT, CUT),
    },
)

TOKEN = SSDCase(
    batch=2, seqlen=1, heads=4, headdim=64, dstate=128, dtype=BF16, gate=True, initial_states=True
)
PLAIN_TOKEN = TOKEN.but(dtype=FP32, initial_states=False, gate=False, skip="(h, p)")


def convolution(
    x: Tensor,
    *,
    bias: bool = True,
    state: bool = False,
    channels: int = 256,
    dtype: torch.dtype = BF16,
):
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one = meta(channels) if bias else None
    initial = meta(x.shape[0], channels, 3) if state else None
    causal_conv1d(x, meta(channels, 4), one, initial_state=initial, wants_final_state=state)


def norm(x: Tensor, gate: Tensor, group_size: int, *, norm_first: bool = False):
    weight = torch.empty(x.shape[2], dtype=BF16, device="meta")
    gated_rms_norm(x, gate, weight, eps=1e-5, group_size=group_size, norm_first=norm_first)


def view(width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Columns of a projection."""
    return torch.empty_strided(
        (1, 1024, width), (1024 * 10576, 10576, 1), dtype=dtype, device="meta"
    )


def plain(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=BF16, device="meta")


SSD_SMALL: Launches = {
    **each(
        ssd_recurrent,
        {
            "recurrent bf16": TOKEN,
            "recurrent fp32, no state": PLAIN_TOKEN,
            "recurrent packed": TOKEN.but(batch=1, lengths=(3, 2)),
        },
    ),
    "recurrent in place": partial(ssd_in_place, TOKEN.but(seqlen=3, initial_states=True)),
    **each(ssd_step, {"step bf16": TOKEN, "step fp32, no state": PLAIN_TOKEN}),
    **{
        f"convolution {state}": partial(convolution, plain(2, 100, 256), state=state)
        for state in (False, True)
    },
    "norm False": partial(norm, plain(2, 100, 512), plain(2, 100, 512), 512),
    "norm True": partial(norm, plain(2, 100, 512), plain(2, 100, 512), 128, norm_first=True),
    "rows": partial(contiguous_copy, plain(1, 4, 64, 96).permute(0, 3, 1, 2)),
}


# --- GDN


def gdn_portable(case: GDNCase, **changes):
    inputs = on_meta(case.inputs())
    config = GDNPortableConfig.choose(inputs, divmod(capability(), 10), 132)
    gdn_portable_launch(inputs, EXACT, replace(config, **changes), state_v_first=False)(inputs)


def gdn_unfused(case: GDNCase, precision: Precision):
    six_stages(on_meta(case.inputs()), precision)


def gdn_hopper(case: GDNCase, config: GDNHopperConfig):
    inputs = on_meta(case.inputs(beta=case.inputs().beta.float()))
    gdn_hopper_launch(inputs, config)(inputs)


def gdn_recurrent(case: GDNCase, *, wide: bool = False):
    inputs = on_meta(case.inputs())
    inputs = replace(inputs, state_every=int(wide))
    gdn_recurrent_launch(inputs, blocks_of(inputs, wide=wide))(inputs)


def gdn_in_place(case: GDNCase):
    inputs = drafted_in_place(case)
    gdn_recurrent_launch(inputs, blocks_of(inputs), in_place=True)(inputs)


def stepped(case: GDNCase | SSDCase, name: str):
    """Token by token, with states in a format."""
    stepping = Stepping(parse_state_format(name), 1, 0)
    inputs = drafted_in_place(case)
    if isinstance(case, SSDCase):
        recurrent_launch(inputs, in_place=True, stepping=stepping)(inputs)
    else:
        blocks = blocks_of(inputs, stepping=stepping)
        gdn_recurrent_launch(inputs, blocks, in_place=True, stepping=stepping)(inputs)


def gdn_step(case: GDNCase):
    three_stages(on_meta(case.inputs()))


QWEN = GDNCase(key_heads=2, values_per_key=2, key_dim=128, value_dim=128, seqlen=256, dtype=BF16)
LARGEST = QWEN.but(key_heads=1, values_per_key=1, key_dim=256, value_dim=256)
SMALLEST = QWEN.but(values_per_key=1, key_dim=16)
EIGHT_BYTES = QWEN.but(key_heads=3, values_per_key=1, key_dim=100, value_dim=60)
GDN_PACK = dict(lengths=(40, 9, 0, 200), initial_states=True)
GDN_UNFUSED = each(
    gdn_unfused,
    {
        "qwen bf16 exact": (QWEN, EXACT),
        "qwen fp32 exact": (QWEN.but(dtype=FP32), EXACT),
        "qwen packed fp16 relaxed": (QWEN.but(**GDN_PACK, dtype=FP16), RELAXED_FP32),
        "qwen fp32 relaxed": (QWEN.but(dtype=FP32), RELAXED_FP32),
        "smallest fp32 exact": (SMALLEST.but(value_dim=16, dtype=FP32), EXACT),
        "smallest of K fp32 exact": (SMALLEST.but(value_dim=64, dtype=FP32), EXACT),
        "smallest of V fp32 exact": (QWEN.but(value_dim=16, dtype=FP32), EXACT),
        "eight bytes at once bf16 exact": (EIGHT_BYTES, EXACT),
        "eight bytes at once packed fp16 exact": (EIGHT_BYTES.but(**GDN_PACK, dtype=FP16), EXACT),
        "olmo bf16 exact": (QWEN.but(values_per_key=1, key_dim=96, value_dim=192), EXACT),
        "largest bf16 exact": (LARGEST, EXACT),
        "largest packed fp32 exact": (LARGEST.but(**GDN_PACK, dtype=FP32), EXACT),
    },
)

LAB = QWEN.but(key_heads=16)
LONG = dict(lengths=(4500,), initial_states=True)
PAIR = dict(lengths=(600, 9), initial_states=True)
GDN_PORTABLE = each(
    gdn_portable,
    {
        "qwen": LAB.but(seqlen=2048),
        "qwen, batch": LAB.but(seqlen=1024, batch=32),
        "qwen, packed": LAB.but(**PAIR, dtype=FP16),
        "qwen, wide and cut": LAB.but(**LONG),
        "a rank of eight, cut": QWEN.but(values_per_key=4, seqlen=8192),
        "olmo": QWEN.but(key_heads=30, values_per_key=1, key_dim=96, value_dim=192, seqlen=2000),
        "60": GDNCase(key_heads=4, key_dim=60, value_dim=60, seqlen=1000, l2norm=False, dtype=FP16),
        "16": GDNCase(key_heads=4, key_dim=16, value_dim=16, seqlen=1024, batch=8, dtype=BF16),
        "32": GDNCase(key_heads=4, key_dim=32, value_dim=32, seqlen=4096, dtype=BF16),
        "192, cut": GDNCase(key_heads=2, key_dim=192, value_dim=192, seqlen=8192, dtype=BF16),
        "200 and 100, packed": GDNCase(key_heads=2, key_dim=200, value_dim=100, **PAIR, dtype=FP16),
        "256": GDNCase(key_heads=2, key_dim=256, value_dim=256, seqlen=1024, dtype=BF16),
        "256 and 64, wide and cut": GDNCase(
            key_heads=2, key_dim=256, value_dim=64, **LONG, dtype=BF16
        ),
        "qwen fp32": QWEN.but(values_per_key=1, dtype=FP32),
    },
)

STAYS = GDNHopperConfig(segment=8, persistent_programs=2)
GDN_FOUR = GDNHopperConfig(segment=4)
PARTS = GDNHopperConfig(segment=4, transition_parts=2, longest_first_pass=3)
ROWS = GDNHopperConfig(segment=1, transition_parts=1, longest_first_pass=3)
HOPPER = GDNCase(**GDN_ON_HOPPER | dict(seqlen=512, key_heads=2))
PACK = GDNCase(**GDN_ON_HOPPER, lengths=(300, 9), initial_states=True)
GDN_HOPPER = each(
    gdn_hopper,
    {
        "bf16": (HOPPER, GDN_FOUR),
        "fp16, normalised": (HOPPER.but(dtype=FP16, l2norm=True), GDN_FOUR),
        "three heads a key head, normalised": (HOPPER.but(values_per_key=3, l2norm=True), GDN_FOUR),
        "programs that stay, initial state": (HOPPER.but(batch=3, initial_states=True), STAYS),
        "packed, initial state": (PACK, GDN_FOUR),
        "longer first segments": (HOPPER, GDNHopperConfig(segment=4, first_segment_extra=True)),
        "slow heads": (HOPPER, PARTS),
        "slow heads, 256 rows": (HOPPER.but(seqlen=2048), ROWS),
        "slow heads, 512 rows": (HOPPER.but(seqlen=8192), ROWS),
        "slow heads, packed, normalised, initial state": (
            PACK.but(lengths=(700, 9), l2norm=True),
            PARTS,
        ),
    },
)

DELTA = QWEN.but(batch=2, seqlen=1)
DELTAS = {"bf16": DELTA, "fp32": DELTA.but(dtype=FP32), "K 256": DELTA.but(key_dim=256)}
GDN_SMALL: Launches = {
    **{f"recurrent {label}": partial(gdn_recurrent, case) for label, case in DELTAS.items()},
    "recurrent tokens": partial(gdn_recurrent, DELTA.but(seqlen=8, initial_states=True)),
    "recurrent in place": partial(gdn_in_place, DELTA.but(seqlen=3, initial_states=True)),
    **{f"step {label}": partial(gdn_step, case) for label, case in DELTAS.items()},
}
# states in registers, and the largest steps
SMALL_LIMITS: Launches = {
    "recurrent qwen": partial(gdn_recurrent, LAB.but(seqlen=1, batch=8, initial_states=True)),
    "recurrent every state": partial(
        gdn_recurrent, LAB.but(seqlen=8, initial_states=True), wide=True
    ),
    "recurrent 256": partial(gdn_recurrent, LARGEST.but(seqlen=8, initial_states=True, dtype=FP32)),
    "recurrent 256 with states": partial(gdn_recurrent, LARGEST.but(seqlen=1, initial_states=True)),
    "step largest": partial(gdn_step, LARGEST.but(seqlen=1, initial_states=True, dtype=FP32)),
    "ssd recurrent every state": partial(ssd_recurrent, TOKEN.but(seqlen=8), 1),
    "ssd step largest": partial(
        ssd_step, TOKEN.but(batch=1, heads=2, headdim=128, dstate=256, dtype=FP32)
    ),
    **{
        f"{case.__class__.__name__} {name} states": partial(stepped, case, name)
        for case in (
            DELTA.but(seqlen=64, initial_states=True),
            KDACase(key_dim=128, value_dim=128, seqlen=64, dtype=BF16, initial_states=True),
            TOKEN.but(seqlen=64),
        )
        for name in ("fp16-stochastic", "fp8", "int8-carried", "int8-carried:head")
    },
    "convolution of a prompt": partial(convolution, view(5376), channels=5376),
    "convolution of a segment": partial(
        convolution, view(5376), channels=5376, bias=False, state=True
    ),
    "convolution in fp32": partial(
        convolution, view(5376, FP32), channels=5376, state=True, dtype=FP32
    ),
    "norm of mamba2-2.7b": partial(norm, plain(1, 1024, 5120), view(5120), 5120),
    "norm in groups of 1024": partial(norm, plain(1, 1024, 8192), view(8192), 1024),
    "norm of heads of 128": partial(norm, plain(1, 1024, 128), view(128), 128, norm_first=True),
}
BROKEN: Launches = {
    **each(
        ssd_portable,
        {
            "fp32": (
                MAMBA2.but(dtype=FP32),
                EXACT,
                SSDPortableConfig(chunk=32, block_p=64, state_stages=2),
            ),
            "rows of 64 bytes": (
                MAMBA2.but(gate=True),
                EXACT,
                SSDPortableConfig(block_p=32, state_stages=2, scan_stages=1),
            ),
        },
    )
}

# --- KDA


def kda_unfused(case: KDACase, precision: Precision):
    kda_six_stages(on_meta(case.inputs()), precision)


def kda_portable(case: KDACase, **changes):
    inputs = on_meta(case.inputs())
    config = replace(KDAPortableConfig.choose(inputs), **changes)
    kda_portable_launch(inputs, EXACT, config, state_v_first=False)(inputs)


def kda_hopper(case: KDACase):
    inputs = on_meta(case.inputs())
    kda_hopper_launch(inputs, KDAHopperConfig.choose(inputs), state_v_first=False)(inputs)


def kda_whole(case: KDACase, gates: torch.dtype = FP32):
    inputs = on_meta(case.inputs())
    inputs = replace(inputs, g=inputs.g.to(gates))
    whole_launch(inputs, WHOLE_CONFIG, state_v_first=False)(inputs)


KIMI = KDACase(key_heads=2, key_dim=128, value_dim=128, seqlen=256, dtype=BF16)
KDA_UNFUSED = each(
    kda_unfused,
    {
        "kimi bf16": (KIMI, EXACT),
        "kimi bf16, normalised before": (KIMI.but(l2norm=False), EXACT),
        "kimi fp32": (KIMI.but(dtype=FP32), EXACT),
        "kimi packed fp16": (KIMI.but(**GDN_PACK, dtype=FP16), EXACT),
        "smallest fp32": (KIMI.but(key_dim=16, value_dim=16, dtype=FP32), EXACT),
        "K 96, V 192": (KIMI.but(key_dim=96, value_dim=192), EXACT),
        "largest bf16": (KIMI.but(key_heads=1, key_dim=256, value_dim=256), EXACT),
        "largest fp32": (KIMI.but(key_heads=1, key_dim=256, value_dim=256, dtype=FP32), EXACT),
    },
)
KDA_PORTABLE = each(
    kda_portable,
    {
        "kimi": KIMI,
        "kimi, batch": KIMI.but(batch=70),
        "kimi, normalised before": KIMI.but(l2norm=False),
        "kimi packed fp16": KIMI.but(**GDN_PACK, dtype=FP16),
        "kimi fp32": KIMI.but(dtype=FP32),
        "16": KIMI.but(key_dim=16, value_dim=16),
        "K 60, V 100": KIMI.but(key_dim=60, value_dim=100, seqlen=1000),
        "largest": KIMI.but(key_heads=1, key_dim=256, value_dim=256),
    },
)
KDA_HOPPER = each(
    kda_hopper,
    {
        "kimi": KIMI,
        "kimi, batch": KIMI.but(batch=70),
        "kimi packed fp16": KIMI.but(**GDN_PACK, dtype=FP16),
        "V 64, grouped": KIMI.but(value_dim=64, key_heads=1, values_per_key=2, initial_states=True),
        "raw gates": KIMI.but(gates="raw"),
        "raw bounded gates": KIMI.but(gates="raw, bounded"),
        "raw gates, fp16": KIMI.but(**GDN_PACK, dtype=FP16, gates="raw"),
    },
) | each(
    kda_whole,
    {
        "whole": KIMI,
        "whole, packed, grouped": KIMI.but(**GDN_PACK, values_per_key=2),
        "whole, bf16 gates": (KIMI.but(batch=70), BF16),
        "whole, raw gates": (KIMI.but(gates="raw"), BF16),
        "whole, raw bounded gates": (KIMI.but(gates="raw, bounded"), BF16),
    },
)
KDA_TOKEN = KIMI.but(batch=2, seqlen=1, initial_states=True)
KDA_SMALL: Launches = {
    "recurrent bf16": partial(gdn_recurrent, KDA_TOKEN),
    "recurrent tokens": partial(gdn_recurrent, KDA_TOKEN.but(seqlen=8)),
    "recurrent 256": partial(
        gdn_recurrent, KDA_TOKEN.but(key_dim=256, value_dim=256, seqlen=8, dtype=FP32)
    ),
    "step bf16": partial(gdn_step, KDA_TOKEN),
    "step largest": partial(gdn_step, KDA_TOKEN.but(key_dim=256, value_dim=256, dtype=FP32)),
}

# whose machine code for sm_90 is recorded
TABLES = (
    "SHIPPED",
    "SSD_UNFUSED",
    "SSD_PORTABLE",
    "SSD_HOPPER",
    "SSD_SMALL",
    "GDN_UNFUSED",
    "GDN_PORTABLE",
    "GDN_HOPPER",
    "GDN_SMALL",
    "KDA_UNFUSED",
    "KDA_PORTABLE",
    "KDA_HOPPER",
    "KDA_SMALL",
)
