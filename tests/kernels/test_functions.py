"""The public functions of the operators: also as torch operators, and with the signatures of other
libraries.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from kernel_cases import (
    BF16,
    EXACT,
    FP32,
    RELAXED,
    RELAXED_FP32,
    GDNCase,
    KDACase,
    SSDCase,
    assert_bitwise,
)
from targets import slow
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ssdprof.kernels import (
    Precision,
    gdn_fused,
    gdn_unfused,
    get,
    kda_fused,
    kda_unfused,
    ssd_fused,
    ssd_recurrent,
    ssd_unfused,
)
from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule
from ssdprof.kernels.kda.compat import chunk_kda
from ssdprof.kernels.kda.inputs import RawKDAInputs
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.compat import mamba_chunk_scan_combined
from ssdprof.kernels.ssd.portable import _fused_kernel
from ssdprof.kernels.ssd.recurrent import _ssd_recurrent_kernel

STEP = SSDCase(batch=2, seqlen=1, heads=2, groups=2, initial_states=True, dtype=BF16)
PACK = SSDCase(lengths=(1, 1), heads=2)
SSD = {
    "batch": SSDCase(seqlen=20, gate=True, initial_states=True, dt_limit=(0.01, 0.2), dtype=BF16),
    "packed": SSDCase(lengths=(0, 13, 7), skip="(h, p)", initial_states=True),
    "step": STEP,
}
BATCH = GDNCase(seqlen=20, batch=2, values_per_key=2, value_dim=24, initial_states=True, dtype=BF16)
GDN = {
    "batch": BATCH,
    "packed": GDNCase(lengths=(0, 13, 7), initial_states=True),
    "short": BATCH.but(seqlen=3),
}
KDA = {name: KDACase(**vars(case)) for name, case in GDN.items()}
CASES = {"ssd": SSD, "gdn": GDN, "kda": KDA}


@dataclass(frozen=True)
class Function:
    """needed, options: the names of its arguments."""

    run: Callable[..., Any]
    implementation: str
    needed: tuple[str, ...]
    options: tuple[str, ...]

    def __call__(self, inputs, **overrides):
        options = {name: getattr(inputs, name) for name in self.options}
        return self.run(*(getattr(inputs, name) for name in self.needed), **(options | overrides))


SSD_OPTIONS = (
    "D",
    "z",
    "dt_bias",
    "initial_states",
    "cu_seqlens",
    "dt_softplus",
    "dt_limit",
    "chunk_size",
)
FUSED = Function(ssd_fused, "fused", ("x", "dt", "A", "B", "C"), SSD_OPTIONS)
UNFUSED = replace(FUSED, run=ssd_unfused, implementation="unfused")
QKV = ("q", "k", "v", "g", "beta")
DELTA = Function(gdn_fused, "fused", QKV, ("scale", "initial_state", "use_qk_l2norm", "cu_seqlens"))
CHANNELS = replace(DELTA, run=kda_fused)  # a decay for each
EVERY = [
    *(("ssd", FUSED, case) for case in SSD),
    *(("kda", CHANNELS, case) for case in KDA),
    *(("gdn", DELTA, case) for case in GDN),
]


def inputs_of(operator: str, case: str):
    return CASES[operator][case].inputs()


@pytest.mark.parametrize(
    ("operator", "function", "case"),
    [*EVERY, ("ssd", UNFUSED, "batch"), ("ssd", UNFUSED, "packed")],
)
def test_the_function_is_the_implementation(operator, function: Function, case):
    inputs = inputs_of(operator, case)
    precision = Precision(intermediates="relaxed", state_dtype=BF16)
    inputs = inputs if operator == "ssd" else replace(inputs, scale=0.7)
    expected = get(operator, function.implementation).run(inputs, precision)
    assert_bitwise(function(inputs, precision=precision), expected)
    if operator == "ssd":
        assert_bitwise(function(inputs, precision=precision, batch_invariant=True), expected)


@pytest.mark.parametrize(
    ("operator", "unfused", "case"), [("gdn", gdn_unfused, GDNCase), ("kda", kda_unfused, KDACase)]
)
def test_the_unfused_functions_take_what_the_inputs_take(operator, unfused, case: type[GDNCase]):
    assert inspect.signature(ssd_unfused) == inspect.signature(ssd_fused)
    inputs = case(lengths=(20, 5), initial_states=True, chunk_size=16).inputs(scale=0.5)
    given = {
        name: value
        for name, value in vars(inputs).items()
        if name not in ("state_every", "state_indices", "write_indices", "accepted")
    }
    assert_bitwise(unfused(**given), get(operator, "unfused").run(inputs, EXACT))


GRAPHS = [*EVERY[:-1], ("kda, V first", CHANNELS, "batch"), ("gdn, V first", DELTA, "batch")]


@pytest.mark.parametrize(
    ("operator", "function", "case"), [GRAPHS[0], *slow(*GRAPHS[1:-1]), GRAPHS[-1]]
)
def test_compiles_as_a_full_graph_and_the_fake_kernel_tells_the_truth(
    operator, function: Function, case
):
    inputs = inputs_of(operator[:3], case)
    precision = ("relaxed", BF16) if case == "step" else ("exact", FP32)
    v_first = operator.endswith("first")
    if operator != "ssd":
        inputs = replace(inputs, initial_state=None)
    if operator.startswith("kda"):
        inputs = RawKDAInputs(**vars(inputs))
    values = (getattr(inputs, field.name) for field in fields(inputs))
    arguments = (*values, *precision, False, v_first)
    op = getattr(torch.ops.ssdprof, f"{inputs.operator}_fused").default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    first = function.needed[0]
    rest = [getattr(inputs, name) for name in function.needed[1:]]
    options = {name: getattr(inputs, name) for name in function.options} | (
        {"state_v_first": True} if v_first else {}
    )

    def layer(tensor: Tensor) -> tuple[Tensor, Tensor]:
        output = function.run(tensor, *rest, **options)
        return 2 * output.out, output.final_states

    torch._dynamo.reset()  # it compiles only so many calls of one function
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(getattr(inputs, first)), layer(getattr(inputs, first)))
    assert_bitwise(op(*arguments), function(inputs))  # with V first in memory alone


# --- states of GDN with V before K


@pytest.mark.parametrize(
    ("function", "case"),
    [*((DELTA, case) for case in GDN.values()), *((CHANNELS, case) for case in KDA.values())],
)
def test_states_with_v_first(function: Function, case: GDNCase):
    inputs = case.inputs()
    k_first = function(inputs)
    v_first = function(inputs, initial_state=inputs.initial.mT.contiguous(), state_v_first=True)
    assert_bitwise((v_first.out, v_first.final_states.mT), k_first)
    assert v_first.final_states.is_contiguous()


def test_a_state_in_the_other_layout_is_refused_where_its_shape_tells():
    inputs = GDN["batch"].inputs()
    with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 2, 16, 24\); with"):
        DELTA(inputs, initial_state=inputs.initial.mT.contiguous())
    with pytest.raises(ValueError, match=r"have shape \(2, 2, 16, 24\); with state_v_first"):
        DELTA(inputs, state_v_first=True)
    for shape in ((5,), (2, 24, 16), (1, 2, 24, 16)):
        with pytest.raises(ValueError, match="initial_state must have shape"):
            DELTA(inputs, initial_state=torch.zeros(shape), state_v_first=True)


# --- plans


def launched(call: Callable[[], Any], monkeypatch) -> list[str]:
    """The names of the kernels that the call launches."""
    kernels = []
    run = InterpretedFunction.run

    def noting(self, *args, **kwargs):
        kernels.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    call()
    return kernels


@pytest.mark.parametrize(
    "case", [SSDCase(seqlen=20), SSDCase(lengths=(3, 4))], ids=["batch", "packed"]
)
def test_the_plan_of_unfused_counts_the_launches(case: SSDCase, monkeypatch):
    kernels = launched(lambda: get("ssd", "unfused").run(case.inputs(), EXACT), monkeypatch)
    assert get("ssd", "unfused").plan(case.inputs(), EXACT).launches == len(kernels)


@pytest.mark.parametrize(
    ("operator", "case", "same"),
    [
        ("gdn", GDN["batch"].but(dtype=FP32), "relaxed"),
        ("gdn", GDN["batch"], "exact"),
        ("ssd", STEP, "exact"),
    ],
    ids=["gdn fp32", "gdn bf16", "an ssd step"],
)
def test_a_plan_names_the_precision_that_has_the_same_bits(operator, case, same):
    inputs = case.inputs()
    implementation = get(operator, "fused")
    assert f"; the same as {same} with fp32 states" in implementation.plan(inputs, RELAXED).reason
    assert "the same as" not in implementation.plan(inputs, EXACT).reason
    relaxed = implementation.run(inputs, RELAXED)
    assert_bitwise(relaxed, implementation.run(inputs, EXACT if same == "exact" else RELAXED_FP32))
    assert torch.equal(relaxed.out, implementation.run(inputs, EXACT).out) == (same == "exact")


# --- SSD: a call for one position of each sequence runs the recurrent kernel, with all options

STEPS = {
    "plain": STEP, "no initial states": STEP.but(initial_states=False),
    "gate, D (h, p), P 20": STEP.but(gate=True, skip="(h, p)", headdim=20),
    "limits, no D": STEP.but(dt_limit=(0.01, 0.2), skip=""), "N 256": STEP.but(dstate=256),
    "fp32": STEP.but(dtype=FP32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        *(pytest.param(case, _ssd_recurrent_kernel, id=name) for name, case in STEPS.items()),
        *(
            pytest.param(case, _fused_kernel, id=str(case))
            for case in (STEP.but(seqlen=2), PACK, PACK.but(lengths=(1,)))
        ),
    ],
)
def test_a_step_is_the_recurrent_kernel_and_longer_and_packed_sequences_are_not(
    case: SSDCase, kernel, monkeypatch
):
    inputs = case.inputs()
    one = STEP.inputs()
    fused.FUSED.launches.clear()
    for batch_invariant in (False, True):
        ours = fused.run(inputs, batch_invariant=batch_invariant)
        if kernel is _ssd_recurrent_kernel:
            theirs = ssd_recurrent(inputs)
            assert_bitwise(ours, theirs)
            assert [one.stride() for one in ours] == [one.stride() for one in theirs]
    fused.run(one)  # signatures are kept apart
    assert_bitwise(fused.run(inputs), ours)
    assert len(fused.FUSED.launches) == 3 - (case == STEP)
    assert launched(lambda: fused.run(inputs), monkeypatch)[-1] == kernel.__name__


# --- the signature of mamba_ssm


def mamba(inputs, **overrides):
    options = {
        name: getattr(inputs, name)
        for name in SSD_OPTIONS
        if name not in ("chunk_size", "cu_seqlens")
    }
    return mamba_chunk_scan_combined(
        inputs.x,
        inputs.dt,
        inputs.A,
        inputs.B,
        inputs.C,
        inputs.chunk_size,
        **(options | overrides),
    )


def test_mamba_drop_in():
    inputs = SSD["batch"].inputs()
    expected = get("ssd", "fused").run(inputs, EXACT)
    assert torch.equal(mamba(inputs), expected.out)
    assert_bitwise(mamba(inputs, return_final_states=True), expected)
    for name in ("seq_idx", "cu_seqlens", "return_varlen_states"):
        value = True if name == "return_varlen_states" else torch.zeros(2)
        with pytest.raises(UnsupportedError, match=f"no {name}"):
            mamba(inputs, **{name: value})


# --- the signatures of flash-linear-attention


def fla(inputs, function=chunk_gated_delta_rule, **overrides):
    options = {
        name: getattr(inputs, name)
        for name in ("scale", "initial_state", "cu_seqlens", "g", "beta")
    }
    options["use_qk_l2norm_in_kernel"] = inputs.use_qk_l2norm
    return function(inputs.q, inputs.k, inputs.v, **(options | overrides))


BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, chunk_kda])


def gdn_or_kda(function) -> tuple[Function, Any]:
    """The function that a drop-in stands on, and inputs of a batch."""
    of_kda = function is chunk_kda
    return (CHANNELS, KDA["batch"].inputs()) if of_kda else (DELTA, GDN["batch"].inputs())


@BOTH
def test_fla_drop_in(function):
    ours, inputs = gdn_or_kda(function)
    expected = ours(inputs)
    out, final_state = fla(inputs, function)
    assert torch.equal(out, expected.out)
    assert final_state is None
    v_first = inputs.initial.mT.contiguous()
    out, final_state = fla(
        inputs, function, initial_state=v_first, output_final_state=True, state_v_first=True
    )
    assert_bitwise((out, final_state.mT), expected)


def test_kda_drop_in_takes_hints():
    inputs = KDA["batch"].inputs(initial_state=None)
    hints = dict(
        safe_gate=True,
        lower_bound=-5.0,
        disable_recompute=True,
        cu_seqlens_cpu=None,
        chunk_size=32,
        A_log=None,
        use_graph=True,
        max_num_seqs=8,
    )
    assert torch.equal(fla(inputs, chunk_kda, **hints)[0], CHANNELS(inputs).out)


@pytest.mark.parametrize("bounded", [False, True])
def test_kda_drop_in_takes_raw_gates_and_betas(bounded):
    """A bounded gate needs no A_log, an unbounded one no dt_bias."""
    raw = KDA["batch"].but(gates="raw, bounded" if bounded else "raw").inputs()
    gate, absent = dict(A_log=raw.A_log[:, None]), "dt_bias"
    if bounded:
        gate, absent = dict(lower_bound=-5.0, dt_bias=raw.dt_bias.flatten()), "A_log"
    out, _ = fla(
        raw,
        chunk_kda,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        **gate,
    )
    zeros = {absent: torch.zeros_like(getattr(raw, absent))}
    plain = replace(raw, beta=2 * raw.beta.float().sigmoid(), **zeros).with_log_gates()
    assert torch.equal(out, CHANNELS(plain).out)


def test_raw_gates_need_a_rate_and_a_bias():
    inputs = KDA["batch"].inputs()
    with pytest.raises(ValueError, match="A_log or lower_bound"):
        fla(inputs, chunk_kda, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="need A_log"):
        CHANNELS(inputs, lower_bound=-5.0)
    with pytest.raises(ValueError, match="needs dt_bias"):
        RawKDAInputs(**vars(inputs), A_log=inputs.g)


def test_fla_drop_in_takes_hints():
    inputs = GDN["batch"].inputs(initial_state=None)
    _, state = fla(
        inputs,
        output_final_state=True,
        state_v_first=True,
        use_gate_in_kernel=False,
        chunk_indices=torch.zeros(1, 2),
        chunk_size=32,
        head_first=False,
    )
    assert torch.equal(state, DELTA(inputs).final_states.mT)


REFUSED = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}


@BOTH
def test_fla_drop_in_refuses_by_name(function):
    _, inputs = gdn_or_kda(function)
    others = ("return_intermediate_states",)
    if function is not chunk_kda:
        others = ("head_first", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    for name in (*REFUSED, "cp_context", "allow_neg_eigval", *others):
        with pytest.raises(UnsupportedError, match=f"no {name}"):
            fla(inputs, function, **{name: REFUSED.get(name, True)})
    with pytest.raises(TypeError, match="unheard_of"):
        fla(inputs, function, unheard_of=1)


# names, order and defaults in state-spaces/mamba e9594ce and in flash-linear-attention 0.6.0
REQUIRED = inspect.Parameter.empty
FLA_STATE = dict(
    scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
)
SIGNATURES: dict[Any, dict[str, Any]] = {
    mamba_chunk_scan_combined: dict.fromkeys(("x", "dt", "A", "B", "C", "chunk_size"), REQUIRED)
    | dict.fromkeys(("D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens"))
    | dict(
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        return_varlen_states=False,
        state_dtype=None,
    ),
    chunk_gated_delta_rule: dict.fromkeys(QKV, REQUIRED)
    | FLA_STATE
    | dict(
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        kwargs=REQUIRED,
    ),
    chunk_kda: dict.fromkeys(QKV, REQUIRED)
    | FLA_STATE
    | dict(
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        disable_recompute=False,
        return_intermediate_states=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        cp_context=None,
        use_graph=False,
        max_num_seqs=None,
        kwargs=REQUIRED,
    ),
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_a_drop_in_has_the_signature_of_its_library(function):
    parameters = inspect.signature(function).parameters.values()
    assert [(one.name, one.default) for one in parameters] == list(SIGNATURES[function].items())
