"""The kernels as functions; the fused one also as a torch operator and with mamba_ssm's signature."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ssd_cases import EXACT, Case

from ssdprof.kernels import Precision, get, ssd_fused, ssd_unfused
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.compat import mamba_chunk_scan_combined
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

OPTIONS = ("D", "z", "dt_bias", "initial_states", "cu_seqlens", "dt_softplus", "dt_limit", "chunk_size")
CASE = Case(seqlen=20, gate=True, initial_states=True, dt_limit=(0.01, 0.2), dtype=torch.bfloat16)
PACKED = Case(lengths=(0, 13, 7), skip="(h, p)", initial_states=True)


def call(inputs: SSDInputs, function: Callable[..., SSDOutput] = ssd_fused, **overrides: Any) -> SSDOutput:
    """Through the public function."""
    options = {name: getattr(inputs, name) for name in OPTIONS}
    return function(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, **(options | overrides))


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
@pytest.mark.parametrize(("name", "function"), [("fused", ssd_fused), ("unfused", ssd_unfused)])
def test_the_function_is_the_implementation(name: str, function: Callable[..., SSDOutput], case: Case) -> None:
    inputs, precision = case.inputs(), Precision(intermediates="relaxed", state_dtype=torch.bfloat16)
    given, run = call(inputs, function, precision=precision, batch_invariant=True), get("ssd", name).run
    for ours, theirs in zip(given, run(inputs, precision), strict=True):
        assert torch.equal(ours, theirs)


def test_both_functions_take_the_same_arguments() -> None:
    assert inspect.signature(ssd_unfused) == inspect.signature(ssd_fused)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_compiles_as_a_full_graph(case: Case) -> None:
    inputs = case.inputs()

    options = {name: getattr(inputs, name) for name in OPTIONS}

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = ssd_fused(x, inputs.dt, inputs.A, inputs.B, inputs.C, **options)
        return 2 * output.out, output.final_states

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(inputs.x), layer(inputs.x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_the_fake_kernel_tells_the_truth(case: Case) -> None:
    inputs = case.inputs()
    low, high = inputs.dt_limit
    arguments = (
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.chunk_size, inputs.D, inputs.z, inputs.dt_bias,
        inputs.dt_softplus, low, high, inputs.initial_states, inputs.cu_seqlens, "exact", torch.float32,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.ssdprof.ssd_fused.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("function", [ssd_fused, ssd_unfused])
def test_refuses_to_drop_a_gradient(function: Callable[..., SSDOutput]) -> None:
    inputs = CASE.inputs()
    inputs.x.requires_grad_()
    with pytest.raises(UnsupportedError, match="forward only"):
        call(inputs, function)
    with torch.no_grad():
        call(inputs, function)


@pytest.mark.parametrize("function", [ssd_fused, ssd_unfused])
def test_refuses_inputs_that_do_not_fit(function: Callable[..., SSDOutput]) -> None:
    inputs = CASE.inputs()
    with pytest.raises(ValueError, match="dt must have shape"):
        function(inputs.x, inputs.dt[:, 1:], inputs.A, inputs.B, inputs.C)


def mamba(inputs: SSDInputs, **overrides: Any) -> Any:
    options = {name: getattr(inputs, name) for name in OPTIONS if name not in ("chunk_size", "cu_seqlens")}
    return mamba_chunk_scan_combined(
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.chunk_size, **(options | overrides)
    )


def test_drop_in() -> None:
    inputs = CASE.inputs()
    expected = get("ssd", "fused").run(inputs, EXACT)
    assert torch.equal(mamba(inputs), expected.out)
    out, final_states = mamba(inputs, return_final_states=True)
    assert torch.equal(out, expected.out)
    assert torch.equal(final_states, expected.final_states)


def test_drop_in_has_the_signature_of_mamba_ssm() -> None:
    """Names, order and defaults of `mamba_chunk_scan_combined` in state-spaces/mamba e9594ce."""
    none = ("D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens")
    expected = dict.fromkeys(("x", "dt", "A", "B", "C", "chunk_size"), inspect.Parameter.empty) | dict.fromkeys(none)
    expected |= {"dt_softplus": False, "dt_limit": (0.0, float("inf"))}
    expected |= {"return_final_states": False, "return_varlen_states": False, "state_dtype": None}
    parameters = inspect.signature(mamba_chunk_scan_combined).parameters.values()
    assert [(one.name, one.default) for one in parameters] == list(expected.items())
    assert {one.kind for one in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens", "return_varlen_states"])
def test_drop_in_refuses_by_name(name: str) -> None:
    value = True if name == "return_varlen_states" else torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=f"no {name}"):
        mamba(CASE.inputs(), **{name: value})
