"""Each law finds the kernel that breaks it, and lets good kernels pass."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log
from typing import Any
from unittest.mock import patch

import pytest
import torch
from generated_inputs import generated
from measure.conftest import random_inputs
from targets import slow

from ssdprof import kernels, operators
from ssdprof.core.base import REPEATS, Probe
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.precision import Precision
from ssdprof.measure import probes
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.isolate import CallVerdict, IsolatedFirstCall
from ssdprof.measure.laws import SAME_FORM_LAWS, laws_of
from ssdprof.measure.probes import Prober
from ssdprof.operators.implementations import own_implementation

pytestmark = pytest.mark.usefixtures("small_guards")
Kernel = Callable[[Any], Any]
TOKENS: list[dict[str, int]] = [
    dict(seqlen=3000), dict(sequences=3, seqlen=700), dict(sequences=4, seqlen=900, shortest=20),
]  # fmt: skip
RELAXED_BF16, RELAXED_FP16 = (Precision.named(f"relaxed, {one} states") for one in ("bf16", "fp16"))


class Here(IsolatedFirstCall):
    """Makes no first call elsewhere."""

    def verdict(self, *_) -> CallVerdict:
        return "ran", ""


def probed(
    kernel: Kernel, inputs, prober: Prober | None = None, *, interpreted=False, keep=None, **changes
) -> dict[str, Probe]:
    """changes: of a user's implementation."""
    implementation = own_implementation(operators.get(inputs.operator), "mine:kernel", kernel)
    results = (prober or Prober(Here())).probe(
        replace(implementation, **changes), inputs, Precision(), interpreted, keep
    )
    return {probe.name: probe for probe in results}


def law(name: str, kernel: Kernel, inputs, kept: Any = None, **changes) -> Probe:
    """What this law says of the kernel; the others are not tested.  kept: gets the call that
    breaks it.
    """
    keep = None if kept is None else lambda *call: kept.extend(call)
    with only(name):
        return probed(kernel, inputs, keep=keep, **changes)[name]


def only(*names: str):
    """Prober tests these laws alone, which takes less time."""
    return patch.object(
        probes, "laws_of", lambda trial: {one: laws_of(trial)[one] for one in names}
    )


def broken(kernel: Kernel, inputs) -> set[str]:
    return {one.name for one in probed(kernel, inputs).values() if one.holds == "no"}


def ssd(**changes):
    return random_inputs(**{"seqlen": 80, "heads": 2, "headdim": 16, "groups": 1} | changes)


def gdn():
    return generated("gdn", "1/2x16x32", 90, sequences=2)


@pytest.mark.parametrize(
    "make",
    [
        gdn,
        *slow(
            partial(ssd, batch=2, seqlen=70), partial(ssd, seqlen=1), partial(ssd, state_every=32)
        ),
    ],
)
def test_a_good_kernel_breaks_no_law(make: Callable[[], Any]):
    assert broken(oracle_output, make()) == set()


def test_all_laws_apply_to_a_kernel_that_supports_everything():
    assert {one.holds for one in probed(oracle_output, ssd()).values()} == {"yes"}


def random(inputs):
    out, states = oracle_output(inputs)
    return out + torch.randn_like(out) * 1e-5, states + torch.randn_like(states) * 1e-6


def changing(inputs):
    output = oracle_output(inputs)
    inputs.dt[0, 0, 0] += 1
    return output


def leaking_from_the_sequence_before(inputs):
    out, states = oracle_output(inputs)
    states[1:] += 0.5 * states[:-1]
    return out, states


def leaking_from_the_future(inputs):
    out, states = oracle_output(inputs)
    out[:, :-1] += (0.001 * inputs.x[:, 1:]).to(out.dtype)
    return out, states


def dropping_small_outputs(inputs):
    out, states = oracle_output(inputs)
    return torch.where(out.abs() < 1e-3, 0, out), states


def forgetting_its_initial_states(inputs):
    return oracle_output(replace(inputs, initial_states=None))


def without_limits_of_dt(inputs):
    return oracle_output(replace(inputs, dt_limit=(0.0, float("inf"))))


def forgetting_the_start(inputs):
    out, states = oracle_output(inputs)
    x = inputs.x.clone()
    x[:, :2] = 0
    out[:, 64:] = oracle_output(replace(inputs, x=x))[0][:, 64:]
    return out, states


def without_the_states_of_packs(inputs):
    return oracle_output(
        inputs if inputs.cu_seqlens is None else replace(inputs, initial_states=None)
    )


def without_bias_in_a_step(inputs):
    return oracle_output(inputs if inputs.x.shape[1] > 1 else replace(inputs, dt_bias=None))


def with_two_factors_of_a_decay(inputs):
    """exp(a) exp(-b) instead of exp(a - b) overflows."""
    out, states = oracle_output(inputs)
    dt = inputs.dt.float() if inputs.dt_bias is None else inputs.dt.float() + inputs.dt_bias
    sums = torch.nn.functional.softplus(dt).mul(-inputs.A).cumsum(1)
    return out.masked_fill(
        (sums > 88)[..., None] & (torch.arange(out.shape[1]) < 64)[:, None, None], torch.nan
    ), states


def with_the_states_of_a_length_that_chunks_divide(inputs):
    out, states = oracle_output(inputs)
    return out, states * (0 if inputs.x.shape[1] % 64 == 0 else 1)


class WithTheFirstBounds:
    """Keeps the boundaries of packed sequences by their number."""

    def __init__(self):
        self.bounds: dict[Any, torch.Tensor] = {}

    def __call__(self, inputs):
        if inputs.cu_seqlens is not None:
            key = inputs.cu_seqlens.shape, inputs.x.shape
            inputs = replace(
                inputs, cu_seqlens=self.bounds.setdefault(key, inputs.cu_seqlens.clone())
            )
        return oracle_output(inputs)


def with_contiguous_states(inputs):
    states = inputs.initial_states
    if states is not None and not states.is_contiguous():
        states = states.mT.contiguous().view(states.shape)  # the numbers as they lie in memory
    return oracle_output(replace(inputs, initial_states=states))


def leaking_to(position: int, inputs):
    """From the position after it."""
    out, states = oracle_output(inputs)
    if inputs.length > position + 1:
        out[:, position] += (0.001 * inputs.x[:, position + 1]).to(out.dtype)
    return out, states


def random_and_leaking(inputs):
    out, states = random(inputs)
    out[:, :-1] += 0.001 * inputs.x[:, 1:]
    return out, states


def rounding_to_bf16(inputs):
    out, states = oracle_output(inputs)
    return out.bfloat16().to(out.dtype), states


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (random, "repeats bitwise"),
        (changing, "inputs unchanged"),
        (leaking_from_the_sequence_before, "other sequences"),
        (leaking_from_the_sequence_before, "sequence alone"),
        (leaking_from_the_future, "causality"),
        (dropping_small_outputs, "linearity"),
        (forgetting_its_initial_states, "cut in two"),
        (without_limits_of_dt, "edge inputs"),
        (forgetting_the_start, "amplified history"),
        (rounding_to_bf16, "finer inputs"),
        *slow(
            (without_the_states_of_packs, "edge inputs"),
            (without_bias_in_a_step, "edge inputs"),
            (with_two_factors_of_a_decay, "edge inputs"),
            (with_the_states_of_a_length_that_chunks_divide, "edge inputs"),
            (WithTheFirstBounds(), "edge inputs"),
            (with_contiguous_states, "edge inputs"),
        ),
        (partial(leaking_to, 63), "causality"),  # over the border of a chunk
        (partial(leaking_to, 64), "causality"),  # within one
        (random_and_leaking, "causality"),
    ],
)
def test_the_law_finds_the_kernel_that_breaks_it(kernel: Kernel, name):
    found = law(name, kernel, ssd())
    assert found.holds == "no"
    assert found.detail


def test_bits_that_rounding_alone_changes_break_no_law():
    """Of a kernel that rarely sums in another order, and of one whose rounding depends on later
    tokens.
    """
    calls = iter([0, 0, 1] * 100)

    def rarely_in_another_order(inputs):
        out, states = oracle_output(inputs)
        return out, states * (1 + next(calls) * 2.0**-24)

    def with_roundings_by_the_last_token(inputs):
        out, states = oracle_output(inputs)
        by_column = inputs.x[:, -1:].abs().float().frexp().mantissa * torch.tensor([1, -1]).repeat(
            out.shape[3] // 2
        )
        return (out * (1 + torch.finfo(out.dtype).eps / 16 * by_column)).to(out.dtype), states

    for kernel in (rarely_in_another_order, with_roundings_by_the_last_token):
        assert broken(kernel, ssd()) == set(), kernel.__name__


def broken_edge(kernel: Kernel, inputs) -> str:
    found = law("edge inputs", kernel, inputs)
    assert found.holds == "no"
    return found.detail


def test_broken_edge_inputs_name_the_trait_that_broke_them_and_its_rule():
    def without_its_clamp(inputs):
        out, states = oracle_output(inputs)
        return out * inputs.g.clamp(min=0).cumsum(1).exp()[..., None].to(out.dtype), states

    kept = []
    edges = law("edge inputs", without_its_clamp, gdn(), kept)
    assert edges.detail.startswith(
        "g above 0 (g above 0 counts as 0), in 2 x 321 tokens, 2/6 heads, K 16, V 16: out, head "
    )
    assert "of sequence 0 (321 tokens)" in edges.detail
    _, inputs, (out, _) = kept
    assert (inputs.g > 0).any(), "those that broke it, not those that were tried after them"
    assert (out - oracle_output(inputs)[0]).abs().max() > 1
    detail = broken_edge(without_limits_of_dt, ssd())
    assert detail.startswith("limits of dt that bind (dt is limited after its bias and softplus)")


@pytest.mark.slow
def test_a_refused_trait_does_not_hide_a_fault_of_another_one():
    """A factor of a product of decays overflows at g of -30; g of -inf and above 0 are refused."""

    def with_inverse_decays(inputs):
        if inputs.g.isinf().any() or (inputs.g > 0).any():
            raise UnsupportedError("mine: g is finite and at most 0")
        out, states = oracle_output(inputs)
        sums = inputs.g[:, : inputs.length // 16 * 16].unflatten(1, (-1, 16)).sum(2)
        return (out * torch.nan if (-sums).exp().isinf().any() else out), states

    assert broken_edge(with_inverse_decays, gdn()).startswith("g of -30 at 64 tokens (")


@pytest.mark.slow
def test_several_faults_name_all_traits():
    def half(inputs):
        out, states = oracle_output(inputs)
        return (out / 2 if inputs.length == 321 else out), states

    detail = broken_edge(half, ssd())
    assert detail.startswith("initial states, large steps in a head, x of 0, D of every channel, ")


def test_what_no_kernel_may_do_breaks_the_law_on_whose_inputs_it_does_it():
    def changing_its_gate(inputs):
        output = oracle_output(inputs)
        if inputs.z is not None:
            inputs.z.zero_()
        return output

    kept = []
    assert law("edge inputs", changing_its_gate, ssd(), kept) == Probe(
        name="edge inputs",
        holds="no",
        detail="it changes its inputs: z, with 2 x 321 tokens, 6 heads x 16, state 16, 2 groups",
    )
    assert (kept[1].length, kept[2]) == (321, None)


def test_the_call_on_all_sequences_is_kept_if_it_is_the_wrong_one():
    def half_of_two(inputs):
        out, states = oracle_output(inputs)
        return out / len(out), states

    kept = []
    law("sequence alone", half_of_two, ssd(batch=2), kept)
    assert len(kept[1].x) == 2


@pytest.mark.parametrize(
    ("error", "holds"), [(UnsupportedError, "not applicable"), (ValueError, "not tested")]
)
def test_what_a_kernel_refuses_is_not_applicable_and_other_errors_leave_a_law_untested(
    error: type[Exception], holds
):
    def refusing(inputs):
        if inputs.cu_seqlens is not None or inputs.x.dtype != torch.bfloat16:
            raise error("mine: bf16 without packs only")
        return oracle_output(inputs)

    with only("other sequences", "finer inputs", "edge inputs"):
        found = probed(refusing, ssd())
    finer = found["finer inputs"]
    assert (found["other sequences"].holds, finer.holds) == (holds, holds)
    assert "mine: bf16 without packs only" in found["other sequences"].detail
    assert finer.detail.startswith("a fault below the rounding of 16-bit inputs could not be seen:")
    assert "mine: bf16 without packs only" in finer.detail
    assert found["edge inputs"].holds == ("yes" if error is UnsupportedError else "not tested")


def test_fp32_sums_in_another_order_are_no_fault_and_declared_cuts_are_tried_in_fp16():
    def with_a_gain_in_fp32(inputs, gain: float = 1.0001):
        out, states = oracle_output(inputs)
        return (out * gain if out.dtype == torch.float32 else out), states

    in_another_order = partial(with_a_gain_in_fp32, gain=1.000001)
    assert law("finer inputs", in_another_order, ssd()).holds == "yes"
    assert law("finer inputs", with_a_gain_in_fp32, ssd()).holds == "no"
    with_a_gain_in_fp32.operand_precision = "tf32"  # type: ignore[attr-defined]
    assert law("finer inputs", with_a_gain_in_fp32, ssd()).holds == "yes"


def test_roundings_of_fp32_models_may_add_up_as_a_random_walk_does():
    def in_another_order(inputs):
        walk = (
            1.5
            * 2.0**-24
            * inputs.x.shape[1] ** 0.5
            * torch.tensor([1, -1]).repeat(inputs.x.shape[3] // 2)
        )
        out, states = oracle_output(inputs)
        return out * (1 + walk), states

    assert broken(in_another_order, ssd(dtype=torch.float32)) == set()


def test_each_kind_of_layer_is_probed_once_unless_thorough():
    once = Prober(Here())
    thorough = Prober(Here(), laws="all")
    layer = ssd(seqlen=20)
    others = ssd(seqlen=20, heads=4)
    with only("causality", "linearity"):
        found = [
            len(probed(oracle_output, inputs, prober))
            for prober in (once, thorough)
            for inputs in (layer, layer, others)
        ]
    assert found == [2, 0, 2, 2, 2, 2]


def test_edge_inputs_are_tried_once_for_a_form():
    calls = []

    def counted(inputs):
        calls.append(inputs)
        return oracle_output(inputs)

    thorough = Prober(Here(), laws="all")
    with only("edge inputs"):
        found = [
            (probed(counted, inputs, thorough)["edge inputs"].holds, len(calls))
            for inputs in (ssd(), ssd(seed=1), ssd(chunk_size=16))
        ]
    assert found == [("yes", len(calls) // 2)] * 2 + [("yes", len(calls))]


def test_quick_laws_are_two_and_once():
    quick = Prober(Here(), laws="quick")
    assert probed(oracle_output, ssd(), quick).keys() == {"causality", "cut in two"}
    assert not probed(oracle_output, ssd(), quick)


def test_the_history_of_each_layer_is_probed():
    """The first layer of a kind may forget too fast to show that a kernel drops history."""
    prober = Prober(Here())
    given = ssd()
    with only("causality", "amplified history"):
        assert len(probed(oracle_output, given, prober)) == 2
        found = probed(forgetting_the_start, replace(given), prober)
    assert {name: one.holds for name, one in found.items()} == {"amplified history": "no"}


@pytest.mark.parametrize(("decay", "holds"), [(-30.0, "yes"), (-14.0, "no")])
def test_a_share_of_a_state_that_a_kernel_declares_to_neglect_is_no_fault(decay, holds):
    """2^decay: of the first positions' state where the kernel drops it."""
    given = ssd(dt_softplus=False, dt_bias=None)
    given.dt.fill_(0.1)
    given.A.fill_(decay * log(2) / (62 * 0.1))
    found = {
        neglects: law("amplified history", forgetting_the_start, given, neglects=neglects)
        for neglects in (0, 2**-24)
    }
    assert found[0].holds == "no"
    assert found[2**-24].holds == holds
    if holds == "yes":
        assert found[2**-24].detail == "times 2^10: it neglects 2^-24 of a state"
        of_fp32 = law("amplified history", oracle_output, ssd(dtype=torch.float32), neglects=2**-24)
        assert of_fp32.holds == "not applicable"


def test_a_kernel_that_is_interpreted_is_probed_if_thorough():
    given = ssd(seqlen=20)
    skipped = probed(oracle_output, given, interpreted=True).values()
    assert {(probe.holds, probe.detail) for probe in skipped} == {
        ("not tested", "too slow in Triton's interpreter; --laws all tests it")
    }
    with only("causality"):
        (law,) = probed(oracle_output, given, Prober(Here(), laws="all"), interpreted=True).values()
    assert law.holds == "yes"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "precision"), [("bf16", Precision()), ("bf16", RELAXED_BF16), ("fp16", RELAXED_FP16)]
)
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("implementation", ["unfused", "fused"])
@pytest.mark.parametrize(("operator", "sizes"), [("ssd", "16x64x128x1"), ("gdn", "4/8x128x128")])
def test_bundled_kernels_break_no_law_on_a_gpu(
    operator, sizes, implementation, tokens, dtype, precision: Precision
):
    given = generated(operator, sizes, device="cuda", dtype=dtype, **tokens)
    found = Prober(IsolatedFirstCall()).probe(
        kernels.get(operator, implementation), given, precision
    )
    assert found
    assert [one for one in found if one.holds == "no" and one.name != REPEATS] == []


def test_bundled_kernels_are_probed_at_the_length_of_the_call():
    """At another length, another kernel may be compiled."""
    lengths = set()

    def noted(kernel: Kernel, inputs):
        lengths.add(inputs.length)
        return kernel(inputs)

    for kernel, holds in ((oracle_output, "yes"), (forgetting_the_start, "no")):
        results = probed(partial(noted, kernel), ssd(seqlen=600), kind="bundled")
        assert results["amplified history"].holds == holds
    assert lengths == {600}


@pytest.mark.parametrize(("kind", "holds"), [("own", "no"), ("library", "yes")])
def test_another_library_gets_edge_inputs_in_rows_alone(kind, holds):
    assert probed(without_bias_in_a_step, ssd(), kind=kind)["edge inputs"].holds == holds


def test_bundled_kernels_are_probed_in_the_interpreter_if_thorough(monkeypatch):
    monkeypatch.setattr(probes, "INTERPRETED", True)
    given = ssd(seqlen=20)
    assert "bundled" not in Prober(Here()).kinds
    every = probed(oracle_output, given, Prober(Here(), laws="all"), kind="bundled")
    monkeypatch.setattr("ssdprof.measure.probes.INTERPRETED", False)
    some = probed(oracle_output, given, kind="bundled")
    assert list(some) == [name for name in every if name in SAME_FORM_LAWS]
    assert 0 < len(some) < len(every)
