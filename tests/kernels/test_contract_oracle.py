"""Every kernel is right, for every size, dtype and precision: in the interpreter, the emulator and
on a GPU.

Memory that no kernel has written holds NaN (`conftest.py`).
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import BF16, DTYPES, EXACT, FP16, FP32, PRECISIONS, RELAXED, GDNCase, SSDCase
from targets import (
    GDN_CUT,
    GDN_ON_HOPPER,
    GDN_PARTS,
    OLMO,
    SSD_EVERY,
    SSD_ON_HOPPER,
    SSD_TINY,
    TARGETS,
    WHOLE_PAST,
    Target,
    chosen,
    gdn_hopper_by,
    listed,
    ssd_hopper,
    ssd_portable,
    targets,
)
from verdict import assert_passes

from ssdprof import operators
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig

# --- right, for every size, dtype and precision

# What a generated case may have.  Lengths and sizes are such that the last chunk, segment or block
# is often a part of one.
SSD_SIZES: dict[str, tuple[Any, ...]] = dict(
    batch=(1, 2),
    seqlen=(15, 17, 33, 64, 70, 150),
    lengths=((), (), (0, 1, 33, 0, 64, 5, 0), (16, 40)),
    heads=(2, 4),
    groups=(1, 2),
    headdim=(16, 20, 32),
    dstate=(16, 24, 32),
    chunk_size=(16, 32, 128, 256),
    gate=(False, True),
    skip=("", "(h)", "(h, p)"),
    initial_states=(False, True),
    dt_limit=((0.0, torch.inf), (0.05, 0.1)),
    dtype=(FP32, FP32, BF16, FP16),
)
GDN_SIZES: dict[str, tuple[Any, ...]] = dict(
    batch=(1, 2),
    seqlen=(15, 17, 63, 64, 65, 130),
    lengths=((), (), (0, 1, 33, 0, 16, 15, 64, 0), (64, 64)),
    key_heads=(1, 2),
    values_per_key=(1, 2, 3),
    key_dim=(16, 20, 24, 32, 60),
    value_dim=(1, 12, 16, 28, 60, 120),
    gate=(0.0, 0.3, 50.0),
    largest_beta=(1.0, 2.0),
    l2norm=(False, True),
    initial_states=(False, True),
    chunk_size=(16, 32, 64, 64),
    dtype=(FP32, FP32, BF16, FP16),
)


def generated(kind, count: int, **fixed) -> list[Any]:
    """Cases of random sizes, the same in every process.  fixed: what they have in common."""
    draw = random.Random(str(fixed))
    sizes = SSD_SIZES if kind is SSDCase else GDN_SIZES
    return [
        kind(**{name: draw.choice(of) for name, of in sizes.items()} | fixed) for _ in range(count)
    ]


SSD = generated(SSDCase, 8)
GDN = generated(GDNCase, 8)
STEP = dict(seqlen=1, lengths=())
SHORT = dict(seqlen=9, lengths=())
SSD_STEPS = generated(SSDCase, 4, **STEP)
GDN_STEPS = generated(GDNCase, 4, **STEP)
PACK = (3, 0, 64, 200, 70)
# in the emulator; the Hopper kernels process 64 positions per chunk
SSD_EMULATED = [
    SSDCase(**SSD_ON_HOPPER | sizes)
    for sizes in (
        dict(seqlen=384),
        dict(batch=2, seqlen=333, initial_states=True),
        dict(lengths=PACK, initial_states=True),
        dict(headdim=80, heads=1, seqlen=200),
        dict(dstate=64, heads=4, groups=2, seqlen=200),
        dict(dstate=256, heads=1, seqlen=300, initial_states=True),
        dict(seqlen=130, skip="(h, p)"),
        dict(dtype=FP16, seqlen=200),
    )
]
RAGGED, PACKED = SSD_EMULATED[1:3]
CUTS = {
    "one segment": Cut(segment=9), "even": Cut(segment=2), "a chunk each": Cut(segment=1),
    "long ones first": Cut(long_count=2, long_segment=3, segment=1),
    "none waits": Cut(long_count=1, long_segment=3, segment=2, recompute=True),
}  # fmt: skip
WHOLE_SEQUENCES = GDNHopperConfig(segment=8)
LEADING = GDNHopperConfig(segment=2, first_segment_extra=True)
FOUR = GDNHopperConfig(segment=4)
WHOLE = replace(GDN_CUT, truncation_log2=WHOLE_PAST)
SLOW = dict(initial_states=True, gate=1e-4)
# sizes and configurations, in the emulator and, with more heads, on a GPU
GDN_EMULATED: list[tuple[dict[str, Any], GDNHopperConfig]] = [
    (dict(seqlen=64), GDNHopperConfig(segment=1)),
    (dict(seqlen=1, initial_states=True), GDNHopperConfig(segment=1)),
    (dict(batch=2, seqlen=330, initial_states=True), WHOLE),
    (dict(seqlen=200, key_heads=2, values_per_key=3), FOUR),
    (dict(seqlen=150, values_per_key=3, l2norm=True), FOUR),
    (dict(seqlen=200, values_per_key=4), FOUR),
    (dict(batch=3, seqlen=150), GDNHopperConfig(segment=3, persistent_programs=4)),
    (dict(seqlen=400), replace(FOUR, truncation_log2=WHOLE_PAST)),
    (dict(seqlen=400, initial_states=True, values_per_key=1), WHOLE_SEQUENCES),
    (dict(batch=2, seqlen=330, largest_beta=2.0), WHOLE_SEQUENCES),
    (dict(lengths=PACK, initial_states=True), WHOLE_SEQUENCES),
    (dict(batch=2, seqlen=700, gate=0.05, initial_states=True), replace(LEADING, segment=3)),
    (dict(seqlen=400, gate=0.0), LEADING),
    (dict(seqlen=330), replace(LEADING, segment=1)),
    (dict(seqlen=200, gate=0.0), GDN_CUT),
    (dict(seqlen=200, l2norm=True, key_heads=2), FOUR),
    (dict(seqlen=200, largest_beta=2.0), FOUR),
    (dict(seqlen=200, dtype=FP16, l2norm=True), FOUR),
    (dict(lengths=PACK, initial_states=True, l2norm=True), WHOLE),
    # heads that forget slowly
    (dict(seqlen=500, gate=0.0), GDN_PARTS),
    (
        dict(batch=2, seqlen=450) | SLOW,
        replace(GDN_PARTS, segment=3, transition_parts=1, longest_first_pass=2),
    ),
    (
        dict(seqlen=520, gate=1e-3, l2norm=True, values_per_key=1),
        replace(GDN_PARTS, segment=4, transition_parts=4),
    ),
    (
        dict(lengths=(3, 0, 64, 400, 200), l2norm=True) | SLOW,
        replace(GDN_PARTS, transition_programs=7),
    ),
    (dict(seqlen=330, gate=0.0, dtype=FP16, l2norm=True), GDN_PARTS),
]
SLICED = [
    OLMO, OLMO | dict(l2norm=True, largest_beta=2.0), OLMO | dict(batch=2, initial_states=True),
    OLMO | dict(lengths=(3, 0, 64, 70), initial_states=True), dict(key_dim=72, value_dim=120),
    dict(values_per_key=1, value_dim=256, initial_states=True),
]  # fmt: skip
# --- on a GPU
SSD_MODELS = {
    "mamba2-2.7b": dict(heads=80, headdim=64, dstate=128),
    "granite-4.0-h-small": dict(heads=128, headdim=64, dstate=128),
    "nemotron-3-nano": dict(heads=64, headdim=64, dstate=128, groups=8, chunk_size=128),
    "zamba2": dict(heads=16, headdim=64, dstate=64, groups=2),
    "p 80": dict(heads=8, headdim=80, dstate=128), "p 96": dict(heads=8, headdim=96, dstate=16),
    "p 128, n 256": dict(heads=8, headdim=128, dstate=256, groups=8),
    "p 32": dict(heads=8, headdim=32, dstate=128),
}  # fmt: skip
GDN_MODELS = [
    dict(key_heads=4, values_per_key=2, key_dim=128, value_dim=128),
    dict(key_heads=3, key_dim=96, value_dim=192, largest_beta=2.0),
    dict(values_per_key=2, key_dim=60, value_dim=60),
    *(dict(values_per_key=2, key_dim=dim, value_dim=dim) for dim in (16, 64, 100, 120, 192, 256)),
    dict(key_dim=256, value_dim=16),
    dict(key_dim=16, value_dim=256),
]
AROUND_256 = dict(lengths=(256, 0, 1, 513, 100, 0), initial_states=True)
LONG_PACK = (3, 0, 127, 570, 64, 236, 0)
SSD_HOPPER = [
    dict(seqlen=1), dict(batch=2, seqlen=63), dict(batch=3, seqlen=1024), dict(batch=2, seqlen=999),
    dict(heads=8, groups=2, seqlen=777), dict(seqlen=500, skip="(h, p)"), dict(seqlen=500, skip=""),
    dict(batch=2, seqlen=500, initial_states=True), dict(headdim=128, heads=3, seqlen=777),
    dict(headdim=80, seqlen=999), dict(dstate=64, groups=2, seqlen=900),
    dict(seqlen=700, dt_limit=(0.01, 0.05)), dict(seqlen=700, dt_limit=(0.0, 0.0)),
    dict(seqlen=700, dt_limit=(1e30, 1e30)), dict(lengths=LONG_PACK, initial_states=True),
]  # fmt: skip
SSD_HOPPER_256 = [
    dict(seqlen=1), dict(batch=2, seqlen=33), dict(batch=3, seqlen=1024),
    dict(batch=2, seqlen=999, skip="(h, p)", initial_states=True),
    dict(headdim=128, heads=3, seqlen=777), dict(headdim=80, heads=3, seqlen=999),
    dict(groups=4, seqlen=500), dict(lengths=LONG_PACK, initial_states=True),
]  # fmt: skip
LONG_CUT = replace(GDN_CUT, segment=8)
LONG_PARTS = GDNHopperConfig(segment=8, transition_parts=2, longest_first_pass=7)
MANY = dict(key_heads=16)
FEW = dict(key_heads=2, initial_states=True)
GDN_PACK = dict(lengths=(5, 0, 295, 1024, 76, 0, 1600), gate=1e-3)
GDN_HOPPER: list[tuple[dict[str, Any], GDNHopperConfig | None]] = [
    (MANY | dict(seqlen=1024), None), (MANY | dict(batch=8, seqlen=300), None),
    (FEW | dict(seqlen=16384, gate=1e-4), None),
    (MANY | dict(batch=2, seqlen=4000, gate=0.05), replace(LEADING, segment=16)),
    (FEW | dict(seqlen=2000, gate=0.0), replace(LEADING, segment=8)),
    (FEW | dict(seqlen=2000, gate=0.0), LONG_CUT), (FEW | dict(seqlen=4000, gate=0.0), LONG_PARTS),
    (FEW | dict(batch=2, seqlen=4096, gate=1e-4), LONG_PARTS),
    (FEW | dict(seqlen=4096, gate=0.05), LONG_PARTS),
    (FEW | dict(seqlen=4096, gate=4.0), LONG_PARTS),
    (FEW | dict(seqlen=2048, largest_beta=2.0, gate=0.01), LONG_PARTS),
    (FEW | dict(seqlen=2048, l2norm=True, gate=1e-3), LONG_PARTS),
    (FEW | dict(seqlen=2048, l2norm=True, dtype=FP16, gate=0.0), LONG_PARTS),
    (FEW | GDN_PACK, replace(LONG_PARTS, segment=10)), (FEW | GDN_PACK, LONG_CUT),
    (MANY | dict(batch=12, seqlen=500), replace(LONG_CUT, persistent_programs=132)),
]  # fmt: skip
SLICED_GPU = OLMO | dict(key_heads=4, initial_states=True, seqlen=2048, largest_beta=2.0)
GDN_SLICED = [
    SLICED_GPU | one
    for one in (
        {},
        dict(l2norm=True, dtype=FP16),
        dict(gate=0.0),
        dict(gate=1e-4, seqlen=4096),
        dict(batch=3, seqlen=1000),
        GDN_PACK,
        dict(key_heads=2, values_per_key=2, key_dim=72, value_dim=120, seqlen=700),
        dict(key_heads=2, key_dim=128, value_dim=256, seqlen=700),
    )
]


def right() -> list[Any]:
    """(kernel, case, precision) for the first law."""
    found = []
    case: Any
    sizes: Any

    def add(kernels: list[Any], cases: Iterable[Any], precisions=(EXACT,), *, slow: bool = False):
        for kernel, case, precision in product(kernels, cases, precisions):
            marks = [*kernel.marks, *([pytest.mark.slow] if slow else [])]
            name = (
                "" if precision == EXACT else f", {precision.intermediates} {precision.state_dtype}"
            )
            found.append(
                pytest.param(
                    *kernel.values, case, precision, id=f"{kernel.id}: {case}{name}", marks=marks
                )
            )

    def by(run, name: str, device: str, marks: list[Any]) -> list[Any]:
        return [
            pytest.param(
                replace(TARGETS[name], run=run, device=device), id=f"{name}, {device}", marks=marks
            )
        ]

    def on_gpu(cases: list[Any]) -> list[Any]:
        return [one.but(device="cuda") for one in cases]

    # in the interpreter; a Hopper kernel in the emulator
    portable = ("gdn fused", "gdn tiny", "gdn tiny, v rows", "gdn tiny, cut", "gdn cut")
    short = listed(emulated=["ssd hopper, short"])
    chunked = listed(
        "ssd reference", "ssd fused", "ssd tiny", "ssd unfused", slow=["ssd tiny, n rows"]
    )
    for part in range(3):  # two of three cases in the slow tier
        add(chunked, SSD[part::3], slow=part > 0)
        add(listed("gdn reference", "gdn unfused", slow=portable), GDN[part::3], slow=part > 0)
        add(short, SSD_EMULATED[part::3], slow=part > 0)
    # several blocks of a chunk
    add(listed("ssd unfused"), [SSDCase(seqlen=300, heads=1, chunk_size=256)])
    add(
        listed("ssd recurrent"),
        SSD_STEPS + generated(SSDCase, 2, **SHORT) + [SSDCase(lengths=(0, 1, 3, 0, 1))],
    )
    add(listed("ssd step"), SSD_STEPS)
    wide = [GDNCase(key_dim=k, value_dim=v) for k, v in ((1, 1), (256, 33), (96, 192), (100, 120))]
    add(listed("gdn unfused"), wide, slow=True)
    few = [
        *generated(GDNCase, 2, **SHORT),
        GDNCase(lengths=(0, 3, 0, 6), initial_states=True, gate=50.0),
    ]
    add(listed("gdn recurrent"), GDN_STEPS + few)
    add(listed("gdn recurrent by 4"), few)
    add(listed("gdn step"), GDN_STEPS)
    for name in ("reference", "unfused", "fused"):
        add(listed(f"ssd {name}"), generated(SSDCase, 24, seed=1), slow=True)
        add(listed(f"gdn {name}"), generated(GDNCase, 24, seed=1), slow=True)
    for p, n, h, g in (
        (32, 128, 2, 1),
        (64, 16, 2, 2),
        (64, 256, 1, 1),
        (80, 64, 2, 1),
        (96, 128, 1, 1),
        (128, 128, 2, 2),
    ):
        add(
            listed("ssd fused"),
            [SSDCase(seqlen=20, headdim=p, dstate=n, heads=h, groups=g, dtype=BF16)],
        )
    for k, v in (
        (60, 60),
        (96, 192),
        (100, 16),
        (16, 100),
        (120, 40),
        (192, 16),
        (256, 16),
        (16, 256),
    ):
        sizes = dict(key_dim=k, value_dim=v, values_per_key=2, seqlen=80, initial_states=True)
        add(
            listed("gdn fused"),
            [GDNCase(dtype=dtype, **sizes) for dtype in (BF16, FP16)],
            slow=True,
        )
    packed = SSDCase(lengths=(40, 0, 35), gate=True, skip="(h, p)", initial_states=True)
    for n in (1, 8, 24, 48, 96, 100, 192, 255):  # state and chunk sizes that are no powers of two
        two = [one.but(dstate=n, dtype=BF16 if n % 16 else FP32) for one in (SSDCase(), packed)]
        add(listed("ssd unfused", "ssd fused"), two, slow=True)
    odd = [
        SSDCase(seqlen=150, chunk_size=q, initial_states=True, dtype=BF16)
        for q in (1, 8, 48, 96, 100, 300, 1024)
    ]
    add(listed("ssd unfused", "ssd fused"), odd, (EXACT, RELAXED), slow=True)
    for dtype, precision in product(DTYPES, PRECISIONS):
        case = SSDCase(dtype=dtype, gate=True, seqlen=60, initial_states=True)
        add(listed("ssd unfused"), [case], [precision], slow=dtype != BF16)
        # the default tier: every precision for bf16 inputs; for other inputs, states of the inputs'
        # dtype
        add(
            listed("ssd tiny"), [case], [precision], slow=dtype not in (BF16, precision.state_dtype)
        )
        sizes = dict(seqlen=140, values_per_key=2, key_dim=32, value_dim=24, initial_states=True)
        add(listed("gdn unfused"), [GDNCase(dtype=dtype, **sizes)], [precision], slow=True)
    blocks = SSDCase(lengths=(16, 0, 75), dstate=64, groups=2, gate=True, initial_states=True)
    for p_rows, block_n in product((True, False), (16, 32)):
        run = ssd_portable(replace(SSD_TINY, p_rows=p_rows, block_n=block_n))
        add(by(run, "ssd tiny", "cpu", []), [blocks])
        # three blocks of N, the last half empty; four segments; the memory next to a state belongs
        # to something else
        config = replace(SSD_TINY, max_segments=4, max_chunks=8, p_rows=p_rows, block_n=16)
        padded = SSDCase(batch=2, seqlen=70, headdim=20, dstate=40, initial_states=True, dtype=BF16)
        assert config.handover(padded.inputs())
        precision = Precision(state_dtype=FP32 if block_n == 16 else FP16)
        add(by(ssd_portable(config), "ssd tiny", "cpu", [pytest.mark.slow]), [padded], [precision])
        config = SSDPortableConfig(
            chunk=32, max_segments=5, block_p=32, block_n=64, p_rows=p_rows, num_warps=8
        )
        large = blocks.but(**SSD_MODELS["p 128, n 256"], lengths=(700, 0, 1300), device="cuda")
        add(
            by(ssd_portable(config), "ssd tiny", "cuda", [pytest.mark.gpu]),
            [large.but(dtype=d) for d in DTYPES],
        )
    # in the emulator
    add(short, [RAGGED], [RELAXED])
    add(short, [SSD_EMULATED[5]], [RELAXED], slow=True)
    waitless = by(ssd_hopper(CUTS["none waits"]), "ssd hopper", "emulator", [])
    add(waitless, [PACKED])
    add(waitless, [one for one in SSD_EMULATED if one != PACKED], slow=True)
    gpu = [pytest.mark.gpu, *listed(gpu=["gdn hopper"])[0].marks]
    for sizes, config in GDN_EMULATED:
        case = GDNCase(**GDN_ON_HOPPER | dict(seqlen=130) | sizes)
        add(by(gdn_hopper_by(config), "gdn hopper", "emulator", [pytest.mark.slow]), [case])
        add(
            by(gdn_hopper_by(config), "gdn hopper", "cuda", gpu),
            [case.but(device="cuda", key_heads=8 * case.key_heads)],
        )
    sliced = by(gdn_hopper_by(WHOLE), "gdn slices", "emulator", [])
    in_slices = [GDNCase(**GDN_ON_HOPPER | dict(seqlen=130) | sizes) for sizes in SLICED]
    add(sliced, in_slices[3:])
    add(sliced, in_slices[:3], slow=True)
    # on a GPU
    add(listed(gpu=("ssd fused", "ssd tiny", "ssd tiny, n rows")), on_gpu(SSD))
    add(listed(gpu=("ssd step", "ssd recurrent")), on_gpu(SSD_STEPS))
    add(listed(gpu=("gdn step", "gdn recurrent")), on_gpu(GDN_STEPS))
    add(listed(gpu=portable), on_gpu(GDN))
    real = SSDCase(**SSD_ON_HOPPER, heads=8, seqlen=1000, chunk_size=256, device="cuda")
    pack = real.but(**AROUND_256)
    unfused = listed(gpu=["ssd unfused"])
    sizes = product((32, 64, 80, 96, 128), (16, 64, 128, 256), DTYPES)
    add(unfused, [real.but(headdim=p, dstate=n, dtype=dtype) for p, n, dtype in sizes])
    sizes = product((16, 32, 64, 128, 256), (1, 2, 8), DTYPES)
    add(
        unfused,
        [real.but(chunk_size=size, groups=groups, dtype=dtype) for size, groups, dtype in sizes],
    )
    options = product(("", "(h)", "(h, p)"), (False, True), (64, 80))
    add(
        unfused,
        [
            real.but(skip=skip, gate=gate, headdim=p, dt_limit=(0.01, 0.2))
            for skip, gate, p in options
        ],
    )
    add(
        unfused,
        [
            real.but(seqlen=n, batch=3, initial_states=True)
            for n in (1, 15, 64, 255, 256, 257, 2049)
        ],
    )
    add(unfused, [real.but(lengths=tuple(i % 67 for i in range(300)), initial_states=True)])
    for name, dtype in product(SSD_MODELS, DTYPES):
        case = real.but(**SSD_MODELS[name], dtype=dtype)
        if dtype == BF16 and case.heads >= 64:
            add(unfused, [case.but(seqlen=4000)], (EXACT, RELAXED))
        packed = case.but(lengths=(1024, 0, 4000, 1, 63, 2500, 0), initial_states=True)
        add(
            listed(gpu=["ssd fused"]),
            [case.but(seqlen=3333, batch=2), packed, packed.but(gate=True)],
        )
    for dtype in DTYPES:
        add(unfused, [real.but(dtype=dtype), pack.but(dtype=dtype)], PRECISIONS)
        long = real.but(dtype=dtype, seqlen=5000, gate=True, initial_states=True)
        add(listed(gpu=["ssd portable"]), [long], PRECISIONS)
    short = listed(gpu=["ssd hopper, short"])
    ours = SSDCase(**SSD_ON_HOPPER, heads=4, device="cuda")
    add(
        short,
        [ours.but(**one) for one in SSD_HOPPER]
        + [ours.but(dstate=256, **one) for one in SSD_HOPPER_256],
    )
    more = product((FP16, BF16), (128, 256))
    add(
        short,
        [ours.but(dtype=d, dstate=n, seqlen=1500, initial_states=True) for d, n in more],
        PRECISIONS,
    )
    # nothing is forgotten
    add(short, [ours.but(dstate=n, seqlen=8192, dt_limit=(1e-6, 1e-5)) for n in (128, 256)])
    around = [
        ours.but(seqlen=n, initial_states=True)
        for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
    ]
    ragged = [
        (0, 1),
        (1, 0),
        (0, 0, 64, 0, 0),
        (1,) * 200,
        (0,) * 130 + (300, 0, 129),
        tuple(i % 131 for i in range(300)),
    ]
    add(
        listed(gpu=SSD_EVERY),
        around + [ours.but(lengths=one, initial_states=True) for one in ragged],
    )
    for sizes, cut_up in GDN_HOPPER:
        add(
            by(gdn_hopper_by(cut_up), "gdn hopper", "cuda", gpu),
            [GDNCase(**GDN_ON_HOPPER | sizes, device="cuda")],
        )
    sliced = [GDNCase(**GDN_ON_HOPPER | sizes, device="cuda") for sizes in GDN_SLICED]
    for run in (gdn_hopper_by(LONG_CUT), chosen("gdn", "fused")):
        add(by(run, "gdn slices", "cuda", gpu), sliced)
    qwen = GDNCase(
        seqlen=1000,
        key_heads=4,
        values_per_key=2,
        key_dim=128,
        value_dim=128,
        dtype=BF16,
        device="cuda",
    )
    olmo = qwen.but(**OLMO | dict(key_heads=6), largest_beta=2.0)
    unfused = listed(gpu=["gdn unfused"])
    pack = qwen.but(**AROUND_256)
    add(
        unfused,
        [one.but(dtype=dtype) for one, dtype in product((qwen, olmo, pack), DTYPES)],
        PRECISIONS,
    )
    dims = product(
        (16, 32, 60, 64, 100, 128, 192, 256), (16, 32, 60, 120, 128, 192, 256), (BF16, FP32)
    )
    add(
        unfused,
        [qwen.but(seqlen=300, key_heads=2, key_dim=k, value_dim=v, dtype=d) for k, v, d in dims],
    )
    add(
        unfused,
        [qwen.but(seqlen=n, batch=3, initial_states=True) for n in (1, 15, 63, 64, 65, 2049)],
    )
    gates = product((0.0, 1e-3, 50.0), (0.0, 0.9, 0.99), DTYPES)
    add(unfused, [qwen.but(gate=g, collinear=c, largest_beta=2.0, dtype=d) for g, c, d in gates])
    for model, dtype, lengths in product(GDN_MODELS, DTYPES, ((), (0, 15, 700, 0, 1285))):
        case = GDNCase(
            seqlen=2000, lengths=lengths, initial_states=True, dtype=dtype, device="cuda", **model
        )
        add(listed(gpu=("gdn fused", "gdn recurrent")), [case])
    models = [
        GDNCase(seqlen=1000, initial_states=True, dtype=BF16, device="cuda", **model)
        for model in GDN_MODELS[:3]
    ]
    add(listed(gpu=("gdn wide", "gdn wide, cut", "gdn narrow, cut")), models)
    return found


@pytest.mark.parametrize(("kernel", "case", "precision"), right(), indirect=["kernel"])
def test_against_the_oracle(kernel: Target, case, precision: Precision):
    inputs = case.inputs()
    kernel.assert_right(kernel(inputs, precision), inputs, precision)


@targets(
    # of SSD, those with a gate run on the portable kernel
    emulated_slow=("gdn hopper", "kda fused"),
    gpu=[
        f"{operator} {name}" for operator in ("ssd", "gdn", "kda") for name in ("unfused", "fused")
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_edge_inputs(kernel: Target, dtype):
    """Those that `run` gives to a user's kernel: measure/laws.py."""
    like = kernel.case(dtype=dtype, **{} if kernel.operator == "ssd" else {"l2norm": True}).inputs()
    for kind in operators.get(kernel.operator).generated.edges(like):
        assert any(passes(kernel, form.make()) for form in kind)


def passes(kernel: Target, inputs) -> bool:
    """False if it refuses them."""
    try:
        output = kernel(inputs)
    except UnsupportedError:
        return False
    assert_passes(output, inputs, EXACT)
    return True
