"""`gdn_fused` as a function, as a torch operator and with flash-linear-attention's signatures."""

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from gdn_cases import EXACT, Case

from ssdprof.kernels import Precision, gdn_fused, get
from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.registry import UnsupportedError

OPTIONS = ("scale", "initial_state", "use_qk_l2norm", "cu_seqlens")
CASE = Case(length=20, batch=2, values_per_key=2, key_dim=16, value_dim=24, initial_state=True, dtype=torch.bfloat16)
SHORT = CASE.but(length=3)
PACKED = Case(lengths=(0, 13, 7), initial_state=True)


def call(inputs: GDNInputs, **overrides: Any) -> GDNOutput:
    """Through the public function."""
    options = {name: getattr(inputs, name) for name in OPTIONS}
    return gdn_fused(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **(options | overrides))


@pytest.mark.parametrize("case", [CASE, SHORT, PACKED], ids=str)
def test_the_function_is_the_implementation(case: Case) -> None:
    inputs, precision = case.inputs(scale=0.7), Precision(intermediates="relaxed", state_dtype=torch.bfloat16)
    for ours, theirs in zip(call(inputs, precision=precision), get("gdn", "fused").run(inputs, precision), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", [CASE, SHORT, PACKED], ids=str)
def test_states_with_v_first(case: Case) -> None:
    inputs = case.inputs()
    assert inputs.initial_state is not None
    k_first, v_first = (
        call(inputs),
        call(inputs, initial_state=inputs.initial_state.mT.contiguous(), state_v_first=True),
    )
    assert torch.equal(v_first.out, k_first.out)
    assert torch.equal(v_first.final_states, k_first.final_states.mT)
    assert v_first.final_states.is_contiguous()


def test_a_state_in_the_other_layout_is_refused_where_its_shape_tells() -> None:
    inputs = CASE.inputs()
    assert inputs.initial_state is not None
    with pytest.raises(ValueError, match=r"initial_state must have shape .*K comes before V"):
        call(inputs, initial_state=inputs.initial_state.mT.contiguous())
    with pytest.raises(ValueError, match=r"have shape \(2, 2, 24, 16\), not \(2, 2, 16, 24\): V comes before K"):
        call(inputs, initial_state=inputs.initial_state, state_v_first=True)
    for shape in ((5,), (2, 24, 16), (1, 2, 24, 16)):
        with pytest.raises(ValueError, match=re.escape(f"have shape (2, 2, 24, 16), not {shape}")):
            call(inputs, initial_state=torch.zeros(shape), state_v_first=True)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_compiles_as_a_full_graph(case: Case, state_v_first: bool) -> None:
    inputs = case.inputs(initial_state=None)

    def layer(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = call(replace(inputs, q=q), state_v_first=state_v_first)
        return 2 * output.out, output.final_states

    def traced(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, final_states = gdn_fused(
            q, inputs.k, inputs.v, inputs.g, inputs.beta, use_qk_l2norm=inputs.use_qk_l2norm,
            cu_seqlens=inputs.cu_seqlens, state_v_first=state_v_first,
        )  # fmt: skip
        return 2 * out, final_states

    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(inputs.q), layer(inputs.q), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("case", [CASE, SHORT, PACKED], ids=str)
def test_the_fake_kernel_tells_the_truth(case: Case, state_v_first: bool) -> None:
    inputs = case.inputs(initial_state=None)
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, None, inputs.use_qk_l2norm,
        inputs.cu_seqlens, "exact", torch.float32, state_v_first, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.ssdprof.gdn_fused.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_refuses_to_drop_a_gradient() -> None:
    inputs = CASE.inputs()
    call(inputs)  # with the launch kept, a later call that needs a gradient must still be refused
    inputs.k.requires_grad_()
    with pytest.raises(UnsupportedError, match="forward only"):
        call(inputs)
    with torch.no_grad():
        call(inputs)


def test_refuses_inputs_that_do_not_fit() -> None:
    inputs = CASE.inputs()
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    with pytest.raises(ValueError, match="g must have shape"):
        gdn_fused(q, k, v, g[:, 1:], beta)
    with pytest.raises(ValueError, match="must be a multiple of"):
        gdn_fused(*(one.repeat_interleave(3, 2)[:, :, :3] for one in (q, k)), v, g, beta)
    with pytest.raises(ValueError, match=r"k must be torch\.bfloat16 as q is"):
        gdn_fused(q, k.float(), v, g, beta)
    with pytest.raises(ValueError, match="g must be a tensor, not None"):
        gdn_fused(q, k, v, None, beta)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 256, not 257"):
        gdn_fused(q.new_zeros(2, 20, 1, 257), q.new_zeros(2, 20, 1, 257), v, g, beta)
    with pytest.raises(ValueError, match="empty"):
        gdn_fused(*(one[:, :0] for one in (q, k, v, g, beta)))


def test_plans_name_the_kernel() -> None:
    plan = get("gdn", "fused").plan
    assert plan(SHORT.inputs(), EXACT).variant == "recurrent"
    portable = plan(CASE.inputs(), EXACT)
    assert (portable.variant, portable.launches) == ("interpreter", 2)
    assert portable.workspace_bytes > 0
    assert plan(Case(lengths=(1,) * 30).inputs(), EXACT).variant == "recurrent"  # a decode step of 30 sequences
    assert plan(PACKED.inputs(), EXACT).variant == "interpreter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_names_the_precision_that_has_the_same_bits(dtype: torch.dtype) -> None:
    inputs, fused = CASE.but(dtype=dtype).inputs(), get("gdn", "fused")
    same = "exact" if dtype == torch.bfloat16 else "relaxed"
    relaxed = Precision(intermediates="relaxed", state_dtype=torch.float16)
    assert f"; the same as {same} with fp32 states" in fused.plan(inputs, relaxed).reason
    assert "the same as" not in fused.plan(inputs, EXACT).reason
    equal = EXACT if same == "exact" else Precision(intermediates="relaxed")
    for one, other in zip(fused.run(inputs, relaxed), fused.run(inputs, equal), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(fused.run(inputs, relaxed).out, fused.run(inputs, EXACT).out) == (same == "exact")


def fla(inputs: GDNInputs, function: Any = chunk_gated_delta_rule, **overrides: Any) -> Any:
    options: dict[str, Any] = {
        "scale": inputs.scale,
        "initial_state": inputs.initial_state,
        "use_qk_l2norm_in_kernel": inputs.use_qk_l2norm,
        "cu_seqlens": inputs.cu_seqlens,
    }
    options |= {"g": inputs.g, "beta": inputs.beta}
    return function(inputs.q, inputs.k, inputs.v, **(options | overrides))


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_drop_in(function: Any) -> None:
    inputs = CASE.inputs()
    assert inputs.initial_state is not None
    expected = call(inputs)
    out, final_state = fla(inputs, function)
    assert torch.equal(out, expected.out)
    assert final_state is None
    v_first = inputs.initial_state.mT.contiguous()
    out, final_state = fla(inputs, function, initial_state=v_first, output_final_state=True, state_v_first=True)
    assert torch.equal(out, expected.out)
    assert torch.equal(final_state, expected.final_states.mT)


def test_drop_in_takes_hints_and_the_former_name_of_state_v_first() -> None:
    inputs = CASE.inputs(initial_state=None)
    hints = {"cu_seqlens_cpu": None, "chunk_indices": torch.zeros(1, 2), "chunk_size": 32, "head_first": False}
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = fla(inputs, output_final_state=True, transpose_state_layout=True, use_gate_in_kernel=False, **hints)
    assert torch.equal(state, call(inputs).final_states.mT)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_drop_in_refuses_both_names_of_state_v_first(function: Any) -> None:
    with pytest.raises(ValueError, match="transpose_state_layout"):
        fla(CASE.inputs(), function, state_v_first=True, transpose_state_layout=True)


def test_recurrent_drop_in_computes_mixed_dtypes_in_the_widest() -> None:
    inputs = CASE.but(dtype=torch.float32).inputs()
    v = inputs.v.half()
    out, state = fused_recurrent_gated_delta_rule(
        inputs.q, inputs.k, v, inputs.g, beta=inputs.beta, initial_state=inputs.initial_state, output_final_state=True
    )
    expected = call(replace(inputs, v=v.float(), use_qk_l2norm=False))
    assert torch.equal(out, expected.out.half())
    assert torch.equal(state, expected.final_states)


def test_drop_in_without_gate_and_beta() -> None:
    inputs = CASE.inputs()
    ones, zeros = torch.ones_like(inputs.beta), torch.zeros_like(inputs.g)
    out, _ = fla(inputs, fused_recurrent_gated_delta_rule, g=None, beta=None)
    assert torch.equal(out, call(replace(inputs, g=zeros, beta=ones)).out)


REFUSED = {
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
    "use_gate_in_kernel": True,
    "A_log": torch.zeros(2),
    "dt_bias": torch.zeros(2),
}


@pytest.mark.parametrize("name", [*REFUSED, "cp_context", "head_first"])
def test_chunk_refuses_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no {name}"):
        fla(CASE.inputs(), **{name: REFUSED.get(name, True)})
    with pytest.raises(TypeError, match="unheard_of"):
        fla(CASE.inputs(), unheard_of=1)


@pytest.mark.parametrize("name", [*REFUSED, "gk", "gv"])
def test_recurrent_refuses_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no {name}"):
        fla(CASE.inputs(), fused_recurrent_gated_delta_rule, **{name: REFUSED.get(name, True)})


def test_drop_in_has_the_signature_of_fla() -> None:
    """The signature in flash-linear-attention 0.6.0: names, order and defaults."""
    required = inspect.Parameter.empty
    shared = {
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False,
        "state_v_first": False,
        "cu_seqlens": None,
    }
    state = {"scale": None, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
    chunk = dict.fromkeys(("q", "k", "v", "g", "beta"), required) | state | shared
    chunk |= {"cu_seqlens_cpu": None, "chunk_indices": None, "cp_context": None, "kwargs": required}
    recurrent = dict.fromkeys(("q", "k", "v"), required) | dict.fromkeys(("g", "gk", "gv", "beta")) | state
    recurrent |= {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None} | shared
    for function, expected in ((chunk_gated_delta_rule, chunk), (fused_recurrent_gated_delta_rule, recurrent)):
        parameters = inspect.signature(function).parameters.values()
        assert [(one.name, one.default) for one in parameters] == list(expected.items())
