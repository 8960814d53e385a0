"""The kernels under test, by name, and where they run: in Triton's interpreter, in the emulator, on
a GPU.

`targets(...)` gives them to a test as the fixture `kernel` of `conftest.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_cases import BF16, EXACT, FP16, FP32, GDNCase, KDACase, SSDCase, assert_close
from verdict import assert_passes

from ssdprof.kernels import get
from ssdprof.kernels.device import capability, sm_count
from ssdprof.kernels.gdn import fused as gdn_fused
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.hopper import config as gdn_hopper
from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig
from ssdprof.kernels.gdn.hopper.launch import hopper_launch as gdn_hopper_launch
from ssdprof.kernels.gdn.hopper.slices import sliced_launch
from ssdprof.kernels.gdn.portable import portable_launch as gdn_portable_launch
from ssdprof.kernels.gdn.recurrent import recurrent_launch
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence
from ssdprof.kernels.hopper.schedule import Cut
from ssdprof.kernels.kda import fused as kda_fused
from ssdprof.kernels.kda.fused import KDAPortableConfig
from ssdprof.kernels.kda.fused import portable_launch as kda_portable_launch
from ssdprof.kernels.kda.hopper.launch import (
    WHOLE_CONFIG,
    KDAHopperConfig,
    hopper_unsupported,
    whole_launch,
    whole_unsupported,
)
from ssdprof.kernels.kda.hopper.launch import hopper_launch as kda_hopper_launch
from ssdprof.kernels.kda.reference import kda_chunked, kda_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import fused as ssd_fused
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, program_count, unsupported
from ssdprof.kernels.ssd.hopper.launch import hopper_launch as ssd_hopper_launch
from ssdprof.kernels.ssd.hopper.launch import passing as passing
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable import portable_launch as ssd_portable_launch
from ssdprof.kernels.ssd.reference import ssd_chunked, ssd_recurrence

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")
H200 = 132  # multiprocessors
WHOLE_PAST = float("-inf")  # of GDN: a first pass covers all chunks before the segment
Run = Callable[[Any, Precision], Any]

# segments of at most 32 positions, and slices of 16 of P: 75 positions are enough to pass states on
# twice
SSD_TINY = SSDPortableConfig(chunk=16, max_segments=3, min_chunks=1, max_chunks=2, block_p=16)
# chunks of 16 and slices of 16 of V: 70 positions are five chunks, the last one ragged
GDN_TINY = GDNPortableConfig(chunk=16, block_k=16, block_v=16, v_rows=False)
BY_FOUR = {"block_v": 4, "block_t": 1, "num_warps": 1}
GDN_CUT = GDNHopperConfig(segment=2)
GDN_PARTS = GDNHopperConfig(
    segment=2, transition_parts=2, longest_first_pass=1, transition_programs=3
)
SSD_ON_HOPPER = dict(headdim=64, dstate=128, dtype=BF16)
GDN_ON_HOPPER = dict(
    values_per_key=2, key_dim=128, value_dim=128, dtype=BF16, gate=0.1, l2norm=False
)
KDA_ON_HOPPER = dict(l2norm=True, key_dim=128, value_dim=64)
OLMO = dict(key_heads=2, values_per_key=1, key_dim=96, value_dim=192)


@dataclass(frozen=True)
class Target:
    """A kernel on a device: "cpu" with Triton's interpreter, "emulator" or "cuda".

    limits, gpu_limits: of the RMS error of a head with exact intermediates, instead of the budget
    of the precision
    sizes: of its inputs, if not those of the operator
    """

    operator: str
    run: Run
    limits: dict[torch.dtype, float] = field(default_factory=dict)
    gpu_limits: dict[torch.dtype, float] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    only_hopper: bool = False
    device: str = "cpu"

    def __call__(self, inputs, precision: Precision = EXACT):
        return self.run(inputs, precision)

    def case(self, **changes):
        """Inputs for any kernel of the operator.  In the interpreter, which is slow, one head, and
        lengths for chunks of 16; longer ones on other devices.
        """
        times = {"cpu": 1, "emulator": 4, "cuda": 25}[self.device]
        lengths = dict(seqlen=times * changes.get("seqlen", 40))
        if changes.get("lengths"):
            lengths = dict(lengths=tuple(times * length for length in changes["lengths"]))
        on_device = dict(device="cuda" if self.device == "cuda" else "cpu")
        if self.operator == "ssd":
            here = {
                "cpu": dict(heads=1),
                "emulator": SSD_ON_HOPPER,
                "cuda": dict(heads=4) | SSD_ON_HOPPER,
            }[self.device]
            return SSDCase(**on_device | here | self.sizes | changes | lengths)
        here = GDN_ON_HOPPER if self.device == "emulator" else GDN_ON_HOPPER | dict(key_heads=2)
        here = {} if self.device == "cpu" else here
        kind = {"gdn": GDNCase, "kda": KDACase}[self.operator]
        return kind(**on_device | here | self.sizes | changes | lengths)

    def assert_right(self, output, inputs, precision: Precision = EXACT):
        limits = self.gpu_limits if self.device == "cuda" else self.limits
        limit = limits.get(output.out.dtype) if precision == EXACT else None
        if limit is None:
            assert_passes(output, inputs, precision)
            return
        oracle = {
            "ssd": (ssd_recurrence, ssd_chunked),
            "gdn": (gdn_recurrence, gdn_chunked),
            "kda": (kda_recurrence, kda_chunked),
        }[self.operator]
        if self.operator == "gdn" and self.device == "cuda" and output.out.dtype == FP32:
            # a decay is the exponential of a difference of two fp32 sums, so its error grows with
            # the sums
            limit += 2**-24 * float(inputs.g.abs().max()) * 64 * 1.44
        assert_close(output, oracle[self.device == "cuda"](inputs), limit)


def chosen(operator: str, name: str) -> Run:
    return lambda inputs, precision: get(operator, name).run(inputs, precision)


# --- SSD


def ssd_portable(config: SSDPortableConfig | None = None) -> Run:
    return lambda inputs, precision: ssd_portable_launch(
        inputs,
        precision,
        config or SSDPortableConfig.choose(inputs, capability(inputs.x), precision),
    )(inputs)


def ssd_hopper(cut: Cut | Callable[[SSDInputs], Cut]) -> Run:
    """Rings and registers are chosen where a cut does not give them."""

    def run(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        assert not inputs.x.is_cuda or unsupported(inputs) == ""
        segments = cut(inputs) if callable(cut) else cut
        free = SSDHopperConfig.choose(inputs, H200, batch_invariant=False)
        return ssd_hopper_launch(inputs, precision, replace(free, **asdict(segments)))(inputs)

    return run


def by_default(inputs: SSDInputs) -> SSDHopperConfig:
    """Equal shares of all sequences: for batches with more pairs of heads than multiprocessors."""
    config = SSDHopperConfig.choose(inputs, sm_count(inputs.x), batch_invariant=False)
    assert passing(inputs, config) == "carry"
    return config


def alone(inputs: SSDInputs) -> Cut:
    """No program waits for another: each recomputes everything before its segment, except for
    packed sequences.
    """
    fine = Cut(long_count=1, long_segment=3, segment=1, recompute=True)
    return fine if inputs.cu_seqlens is None else Cut(segment=1)


def shared(inputs: SSDInputs) -> Cut:
    """Fewer programs than pairs of heads, each with an equal share of all sequences."""
    whole = max(1, -(-inputs.x.shape[1] // 64))
    return Cut(segment=whole, shares=max(1, inputs.sequences * program_count(inputs) * 5 // 6))


# --- GDN


def gdn_portable(config: GDNPortableConfig) -> Run:
    return lambda inputs, precision: gdn_portable_launch(
        inputs, precision, config, state_v_first=False
    )(inputs)


def gdn_hopper_by(config: GDNHopperConfig | None, *, state_v_first: bool = False) -> Run:
    """K and V other than 128 in slices.  Without a configuration: as chosen."""

    def run(inputs, _precision: Precision):
        sliced = (inputs.q.shape[3], inputs.v.shape[3]) != (128, 128)
        refused = gdn_hopper.unsupported_otherwise if sliced else gdn_hopper.unsupported
        assert not inputs.q.is_cuda or refused(inputs) == ""
        taken = config or GDNHopperConfig.choose(inputs, H200, batch_invariant=False)
        launch = (sliced_launch if sliced else gdn_hopper_launch)(
            inputs, taken, state_v_first=state_v_first
        )
        return launch(inputs)

    return run


# --- KDA


def kda_portable(config: KDAPortableConfig) -> Run:
    return lambda inputs, precision: kda_portable_launch(
        inputs, precision, config, state_v_first=False
    )(inputs)


def kda_hopper(inputs: Any, _precision: Precision) -> Any:
    assert not inputs.q.is_cuda or hopper_unsupported(inputs) == ""
    config = KDAHopperConfig(slab=4, behind=2)
    return kda_hopper_launch(inputs, config, state_v_first=False)(inputs)


def kda_whole(inputs: Any, _precision: Precision) -> Any:
    assert not inputs.q.is_cuda or whole_unsupported(inputs) == ""
    return whole_launch(inputs, WHOLE_CONFIG, state_v_first=False)(inputs)


# --- all of them

GDN_LIMITS = {FP32: 5e-6, FP16: 2e-3, BF16: 1.2e-2}
HOPPER_LIMITS = {FP16: 6e-4, BF16: 4.5e-3}
of_ssd = partial(Target, "ssd", limits={FP32: 2e-6})
ssd_on_hopper = partial(Target, "ssd", only_hopper=True)
of_gdn = partial(Target, "gdn", limits=GDN_LIMITS, gpu_limits=GDN_LIMITS)
of_kda = partial(Target, "kda", limits=GDN_LIMITS, gpu_limits=GDN_LIMITS)
gdn_on_hopper = partial(
    Target, "gdn", limits=HOPPER_LIMITS, gpu_limits=HOPPER_LIMITS, only_hopper=True
)
TARGETS = {
    "ssd reference": Target(
        "ssd", lambda inputs, _: ssd_chunked(inputs), limits={torch.float64: 1e-12}
    ),
    "ssd unfused": Target("ssd", chosen("ssd", "unfused")),
    "ssd fused": of_ssd(chosen("ssd", "fused")),
    "ssd recurrent": of_ssd(chosen("ssd", "recurrent")),
    "ssd step": of_ssd(chosen("ssd", "unfused_step")),
    "ssd invariant": of_ssd(partial(ssd_fused.run, batch_invariant=True)),
    "ssd portable": of_ssd(ssd_portable()),
    "ssd tiny": of_ssd(ssd_portable(SSD_TINY)),
    "ssd tiny, n rows": of_ssd(ssd_portable(replace(SSD_TINY, p_rows=False))),
    # one chunk per segment: the largest number of programs that wait for another one
    "ssd fine": of_ssd(
        ssd_portable(SSDPortableConfig(max_segments=10**6, min_chunks=1, max_chunks=1, block_p=32))
    ),
    "ssd hopper": ssd_on_hopper(
        ssd_hopper(
            lambda inputs: SSDHopperConfig.choose(inputs, sm_count(inputs.x), batch_invariant=True)
        )
    ),
    "ssd hopper, by default": ssd_on_hopper(ssd_hopper(by_default)),
    "ssd hopper, short": ssd_on_hopper(ssd_hopper(Cut(segment=2))),
    "ssd hopper, short, n 256": ssd_on_hopper(ssd_hopper(Cut(segment=2)), sizes=dict(dstate=256)),
    "ssd hopper, fine": ssd_on_hopper(ssd_hopper(Cut(segment=1))),
    "ssd hopper, uneven": ssd_on_hopper(ssd_hopper(Cut(long_count=1, long_segment=5, segment=2))),
    "ssd hopper, alone": ssd_on_hopper(ssd_hopper(alone)),
    "ssd hopper, shared": ssd_on_hopper(ssd_hopper(shared)),
    "gdn reference": Target(
        "gdn", lambda inputs, _: gdn_chunked(inputs), limits={torch.float64: 1e-10}
    ),
    "gdn unfused": Target("gdn", chosen("gdn", "unfused")),
    "gdn recurrent": of_gdn(chosen("gdn", "recurrent")),
    "gdn recurrent by 4": of_gdn(lambda inputs, _: recurrent_launch(inputs, BY_FOUR)(inputs)),
    "gdn step": Target("gdn", chosen("gdn", "unfused_step"), limits=GDN_LIMITS),
    "gdn fused": of_gdn(chosen("gdn", "fused")),
    "gdn invariant": of_gdn(partial(gdn_fused.run, batch_invariant=True)),
    "gdn tiny": of_gdn(gdn_portable(GDN_TINY)),
    "gdn tiny, v rows": of_gdn(gdn_portable(replace(GDN_TINY, v_rows=True))),
    "gdn tiny, cut": of_gdn(gdn_portable(replace(GDN_TINY, segment=1))),
    "gdn cut": of_gdn(gdn_portable(GDNPortableConfig(chunk=32, segment=1, block_k=32, block_v=32))),
    # slices of 128 of V, as in long calls
    "gdn wide": of_gdn(gdn_portable(GDNPortableConfig())),
    "gdn wide, cut": of_gdn(gdn_portable(GDNPortableConfig(segment=2))),
    "gdn narrow, cut": of_gdn(
        gdn_portable(GDNPortableConfig(chunk=64, segment=1, block_k=32, block_v=32))
    ),
    "gdn hopper": gdn_on_hopper(gdn_hopper_by(None)),
    "gdn first passes": gdn_on_hopper(gdn_hopper_by(GDN_CUT)),
    "gdn leading": gdn_on_hopper(gdn_hopper_by(replace(GDN_CUT, first_segment_extra=True))),
    "gdn parts": gdn_on_hopper(gdn_hopper_by(GDN_PARTS), sizes=dict(gate=1e-3)),
    "kda reference": Target(
        "kda", lambda inputs, _: kda_chunked(inputs), limits={torch.float64: 1e-10}
    ),
    "kda unfused": Target("kda", chosen("kda", "unfused")),
    "kda fused": of_kda(chosen("kda", "fused"), sizes=KDA_ON_HOPPER),
    "kda tiny": of_kda(
        kda_portable(KDAPortableConfig(chunk=16, prep_block_k=16, block_k=16, block_v=16))
    ),
    "kda wide": of_kda(kda_portable(KDAPortableConfig())),
    "kda invariant": of_kda(partial(kda_fused.run, batch_invariant=True), sizes=KDA_ON_HOPPER),
    "kda hopper": of_kda(kda_hopper, sizes=KDA_ON_HOPPER, only_hopper=True),
    "kda whole": of_kda(kda_whole, sizes=KDA_ON_HOPPER | dict(value_dim=128), only_hopper=True),
    "kda recurrent": of_kda(chosen("kda", "recurrent")),
    "kda step": of_kda(chosen("kda", "unfused_step")),
    "gdn slices": gdn_on_hopper(gdn_hopper_by(GDN_CUT), sizes=OLMO, gpu_limits={}),
}
KDA_HOPPER = ("kda hopper", "kda whole")
SSD_CHOSEN = ("ssd portable", "ssd hopper")
SSD_FINE = ("ssd fine", *(f"ssd hopper, {name}" for name in ("fine", "uneven", "alone", "shared")))
SSD_EVERY = SSD_CHOSEN + SSD_FINE


def slow(*values) -> list[Any]:
    """Parameters of the slow tier; a tuple has a value for each name."""
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=pytest.mark.slow) for each in several]


OPERATORS = ["ssd", *slow("gdn", "kda")]


def listed(*names: str, slow=(), emulated=(), emulated_slow=(), gpu=()) -> list[Any]:
    """Parameters: these targets in the interpreter, in the emulator and on a GPU."""
    parameters = []
    for where, device, chosen in (
        ("", "cpu", names),
        ("", "cpu", slow),
        (", emulated", "emulator", emulated),
        (", emulated", "emulator", emulated_slow),
        (", GPU", "cuda", gpu),
    ):
        for name in chosen:
            marks = [pytest.mark.slow] * (chosen is slow or chosen is emulated_slow)
            if device == "cuda":
                marks = [pytest.mark.gpu] + [ON_HOPPER] * TARGETS[name].only_hopper
            parameters.append(
                pytest.param(replace(TARGETS[name], device=device), id=name + where, marks=marks)
            )
    return parameters


def targets(*names: str, **others) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", listed(*names, **others), indirect=True)
