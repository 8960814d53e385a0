"""Kimi Delta Attention: its gates, its oracle, and its exactness."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from kernel_cases import BF16, EXACT, FP16, FP32, KDACase, assert_bitwise, changed, head_errors
from targets import HOPPER, KDA_HOPPER, ON_HOPPER, TARGETS, Target, kda_whole, slow, targets
from torch import Tensor
from verdict import assert_passes

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.fused import FUSED, KDAPortableConfig, plan
from ssdprof.kernels.kda.hopper import launch
from ssdprof.kernels.kda.reference import decayed_scores, kda_chunked, kda_recurrence

GATES = ("generated", "saturated", "bound", "none", "cuts", "one channel")
FEW = [*GATES[:2], *slow(*GATES[2:])]
RAGGED = dict(
    lengths=(70, 0, 1, 19), initial_states=True, values_per_key=2, key_dim=32, value_dim=24
)


@pytest.mark.parametrize("gates", GATES)
def test_the_oracle_is_the_recurrence(gates):
    """To fp64's last digits for any gate, with empty sequences and beta up to 2."""
    inputs = KDACase(gates=gates, largest_beta=2.0, **RAGGED).inputs()
    for ours, theirs in zip(kda_chunked(inputs, block=64), kda_recurrence(inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_the_recurrence_is_the_sum_it_stands_for():
    """Equation by equation, with numbers of its own."""
    inputs = KDACase(seqlen=5, key_dim=3, value_dim=2, l2norm=False, initial_states=True).inputs()
    q, k, v, g, beta, state = (
        one[0].double()
        for one in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    )
    S = state[0]
    for t in range(5):
        forgetting = torch.diag(g[t, 0].exp())
        S = (torch.eye(3) - beta[t, 0] * torch.outer(k[t, 0], k[t, 0])) @ forgetting @ S
        S = S + beta[t, 0] * torch.outer(k[t, 0], v[t, 0])
        torch.testing.assert_close(kda_recurrence(inputs).out[0, t, 0], S.T @ q[t, 0] * 3**-0.5)


def test_equal_decays_of_all_channels_are_gdn():
    inputs = KDACase(seqlen=20, values_per_key=2, initial_states=True).inputs()
    one = inputs.g[..., 0]
    as_gdn = GDNInputs(**vars(inputs) | dict(g=one))
    ours = kda_recurrence(replace(inputs, g=one[..., None].expand_as(inputs.g)))
    torch.testing.assert_close(ours, gdn_recurrence(as_gdn), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gates", GATES)
def test_no_factor_of_the_scores_is_above_1(gates):
    """Whatever the gate: this is what one anchor for a whole chunk cannot promise."""
    inputs = KDACase(seqlen=64, key_dim=32, gates=gates).inputs()
    sums = inputs.g[0, :, 0].double().clamp(min=-800).cumsum(0)
    q, k = (torch.rand(64, 32, dtype=torch.float64) for _ in range(2))
    largest = []

    def noted(exponents: Tensor) -> Tensor:
        largest.append(exponents.max().item())
        return exponents.exp()

    P, L = decayed_scores(q, k, sums, noted)
    assert max(largest) <= 0
    pairs = (sums[:, None] - sums[None]).clamp(max=0).exp()
    torch.testing.assert_close(
        P, torch.einsum("id,jd,ijd->ij", q, k, pairs).tril(), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        L, torch.einsum("id,jd,ijd->ij", k, k, pairs).tril(-1), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("dtype", [BF16, *slow(FP16, FP32)], ids=str)
@pytest.mark.parametrize("gates", FEW)
@targets(
    "kda unfused",
    slow=("kda wide", "kda recurrent", "kda tiny"),
    gpu=("kda unfused", "kda fused", "kda wide"),
)
def test_every_gate(kernel: Target, gates, dtype):
    """In packs with empty sequences, with initial states and beta up to 2."""
    inputs = kernel.case(
        gates=gates, dtype=dtype, **RAGGED | dict(largest_beta=2.0) | kernel.sizes
    ).inputs()
    if HOPPER and kernel.run is TARGETS["kda fused"].run:
        assert plan(inputs, EXACT).variant == ("portable" if dtype == FP32 else "hopper")
    assert_passes(kernel(inputs), inputs, EXACT)


# of the kernels for Hopper GPUs; two of them have several slabs, which hand their states on, and
# rings that turn more than once
HOPPER_CASES = [
    dict(seqlen=70, key_heads=2, value_dim=128), dict(gates="saturated"),
    dict(gates="bound", batch=2, seqlen=40), dict(gates="none", largest_beta=2.0),
    dict(gates="cuts", lengths=(65, 0, 1, 30), initial_states=True),
    dict(gates="one channel", values_per_key=2), dict(dtype=FP16, initial_states=True),
    *slow(dict(seqlen=330, batch=2), dict(lengths=(200, 0, 1, 130), initial_states=True)),
    # whose bias alone would be a gate after a sequence's end
    dict(gates="raw", seqlen=70, values_per_key=2), dict(gates="raw", lengths=(65, 0, 1)),
    dict(gates="raw, bounded", seqlen=40, batch=2),
]  # fmt: skip


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
@targets(emulated=["kda hopper"], emulated_slow=["kda whole"], gpu=KDA_HOPPER)
def test_every_gate_on_hopper(kernel: Target, case):
    if kernel.run is kda_whole and "dtype" in case:
        pytest.skip("fp16 inputs run slabs")
    device = "cuda" if kernel.device == "cuda" else "cpu"
    sizes = dict(seqlen=64, dtype=BF16) | kernel.sizes | case
    inputs = KDACase(**sizes, device=device).inputs()
    assert_passes(kernel(inputs), inputs.with_log_gates(), EXACT)


@targets("kda wide", emulated=KDA_HOPPER)
def test_keys_and_queries_of_any_length(kernel: Target):
    """Also where a kernel normalises after the product."""
    inputs = KDACase(**dict(seqlen=64, dtype=BF16, gates="cuts") | kernel.sizes | dict(l2norm=True))
    for factor in (2.0**-8, 2.0**30):
        scaled = changed(inputs.inputs(), lambda one, factor=factor: one * factor, "q", "k")
        assert_passes(kernel(scaled), scaled, EXACT)


@targets("kda wide", emulated=KDA_HOPPER)
def test_later_tokens_change_no_earlier_output(kernel: Target):
    """By bits, also within a block of 8: no decay is a quotient of sums that reach further."""
    inputs = KDACase(**dict(seqlen=64, dtype=BF16) | kernel.sizes).inputs()
    before = kernel(inputs).out.clone()
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        tensor[:, 37:] = tensor[:, 37:].flip(1)
    inputs.g[:, 40:] *= 100
    assert torch.equal(kernel(inputs).out[:, :37], before[:, :37])


KIMI = dict(key_heads=32, key_dim=128, value_dim=128, seqlen=256, dtype=BF16)
MANY = dict(key_heads=64, values_per_key=2)
# sizes of a call for 132 multiprocessors, and whether each sequence and head has a program
WHOLE = [
    (dict(batch=4), True), (dict(batch=5), False), *slow((dict(batch=5, seqlen=2048), True)),
    (dict(batch=8), True), (dict(), False),
    (MANY | dict(initial_states=True), True), (MANY | dict(seqlen=64, gates="raw"), True),
    (MANY | dict(dtype=FP16), False), (MANY | dict(value_dim=64), False),
    (MANY | dict(lengths=(400, 0, 300), initial_states=True), True),
    (dict(lengths=(256,) * 4), False),  # of which one might be nearly all
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "whole"), WHOLE, ids=str)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_HOPPER])]
)
def test_whole_sequences_run_where_their_programs_fill_the_gpu(device, sizes, whole, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(launch, "untiled", lambda _inputs, **_tensors: "")
    inputs = KDACase(**KIMI | sizes, device=device).inputs()
    assert plan(inputs, EXACT).variant == ("hopper, whole" if whole else "hopper")
    assert plan(inputs, EXACT, batch_invariant=True).variant == "hopper"
    if device == "cpu":
        return
    slabs = partial(launch.hopper_launch, inputs, launch.KDAHopperConfig.choose(inputs))
    expected = partial(launch.whole_launch, inputs, launch.WHOLE_CONFIG) if whole else slabs
    for invariant, v_first in product((False, True), repeat=2):
        call = FUSED.prepare(inputs, EXACT, batch_invariant=invariant, state_v_first=v_first)
        prepared = (slabs if invariant else expected)(state_v_first=not v_first)
        assert_bitwise(call(inputs), prepared(inputs))


def test_other_gpus_and_sizes_run_the_portable_kernel():
    assert launch.hopper_unsupported(KDACase(key_dim=64).inputs()) == "anything but a Hopper GPU"


@pytest.mark.parametrize("gates", FEW)
@targets("kda wide", emulated_slow=KDA_HOPPER, gpu=("kda fused", "kda wide", *KDA_HOPPER))
def test_no_head_is_less_exact_than_unfused(kernel: Target, gates):
    # 1 % of 3e-3 needs many outputs
    width, length = (128, 1024) if kernel.device == "cuda" else (32, 192)
    sizes = dict(key_dim=width, value_dim=width, key_heads=2, dtype=BF16) | kernel.sizes
    inputs = kernel.case(seqlen=length, gates=gates, **sizes).inputs()
    exact = kda_chunked(inputs)
    (out, states), (their_out, their_states) = (
        head_errors(run(inputs), exact) for run in (kernel, TARGETS["kda unfused"])
    )
    assert (out <= 1.01 * their_out).all(), (out / their_out).tolist()
    assert states.mean() <= 1.3 * their_states.mean(), (
        "of a few numbers, where channels forget at once"
    )


def test_gates_in_the_models_dtype_are_summed_in_fp32():
    inputs = KDACase(seqlen=70, dtype=BF16, gate=0.01).inputs()
    low = changed(inputs, lambda one: one.to(BF16), "g")
    for name in ("kda unfused", "kda wide", "kda recurrent"):
        kernel = TARGETS[name]
        same = kernel(changed(low, Tensor.float, "g"))
        assert all(map(torch.equal, kernel(low), same))


def test_slices_are_as_wide_as_states_allow():
    few, many = (
        KDACase(batch=n, seqlen=1, key_heads=4, key_dim=128, value_dim=128, dtype=BF16)
        for n in (1, 40)
    )
    assert KDAPortableConfig.choose(few.inputs()).block_v == 32
    assert KDAPortableConfig.choose(many.inputs()).block_v == 64
    assert KDAPortableConfig.choose(many.inputs(), batch_invariant=True).block_v == 32


# sizes, and cases as fla's public tests of KDA have them: gates that are often 0, and initial
# states
ODD = dict(seqlen=40, dtype=BF16, l2norm=False)
SIZES = [
    ODD | dict(key_dim=20, value_dim=24),
    ODD | dict(key_dim=100, value_dim=16),
    dict(batch=1, seqlen=63, key_dim=64, value_dim=64, gates="none"),
    dict(batch=2, seqlen=100, key_dim=60, value_dim=60, gate=0.5, initial_states=True),
    dict(
        seqlen=90,
        key_heads=2,
        key_dim=64,
        value_dim=64,
        gate=5.0,
        l2norm=False,
        initial_states=True,
    ),
    dict(lengths=(15, 47, 1), key_dim=64, value_dim=64, initial_states=True),
]


@pytest.mark.parametrize("case", [*SIZES[:3], *slow(*SIZES[3:])], ids=str)
@targets("kda unfused", "kda fused", "kda wide", slow=["kda recurrent"])
def test_sizes(kernel: Target, case):
    inputs = KDACase(**dict(dtype=FP16) | case).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)
