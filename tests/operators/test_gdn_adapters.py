"""Adapters of libraries that are not installed here.

Each stand-in computes the operator by the recurrence, with the library's conventions.  An adapter that follows these
conventions agrees with the oracle.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import GDNCase

from ssdprof import operators
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels.adapters import package_version
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.operators.implementations import required, resolve

GDN = operators.get("gdn")
Calls = list[dict[str, Any]]


def inputs(*, dim: int = 128, dtype: torch.dtype = torch.float16, packed: bool = False, length: int = 6) -> GDNInputs:
    sizes = dict(values_per_key=2, key_dim=dim, value_dim=dim, dtype=dtype, initial_states=True)
    lengths = dict(lengths=(2, 0, length - 2)) if packed else dict(batch=2, seqlen=length)
    return GDNCase(**sizes | lengths).inputs()  # type: ignore[arg-type]


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Installs a module of this name with `members`."""
    module = ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def as_fla(calls: Calls) -> Callable[..., Any]:
    """The operator with fla's arguments; q and k are normalised inside if requested."""

    def function(
        *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, output_final_state: bool,
        use_qk_l2norm_in_kernel: bool, cu_seqlens: Any,
    ) -> Any:  # fmt: skip
        calls.append({"q": q, "output_final_state": output_final_state})
        return gdn_recurrence(
            GDNInputs(
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                use_qk_l2norm=use_qk_l2norm_in_kernel,
            )
        )  # fmt: skip

    return function


def as_flashinfer(calls: Calls) -> Callable[..., Any]:
    """The operator with the conventions of FlashInfer's chunked kernels: packed tokens, decays, V-first states."""

    def function(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, output_final_state: bool,
        cu_seqlens: Any, use_qk_l2norm_in_kernel: bool, backend: str,
    ) -> Any:  # fmt: skip
        calls.append({"q": q, "beta": beta, "cu_seqlens": cu_seqlens, "backend": backend})
        assert output_final_state
        assert all(one.is_contiguous() for one in (q, k, v, g, beta, initial_state))
        out, states = gdn_recurrence(
            GDNInputs(
                q=q[None], k=k[None], v=v[None], g=g[None].log(), beta=beta[None], scale=scale,
                initial_state=initial_state.mT, cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm_in_kernel,
            )
        )  # fmt: skip
        return out[0], states.mT.contiguous()

    return function


def as_flashinfer_mtp(calls: Calls) -> Callable[..., Any]:
    """The same for its kernel for a few tokens: raw gates, a pool of V-first states."""

    def function(
        q: Any, k: Any, v: Any, pool: Any, read: Any, A_log: Any, a: Any, dt_bias: Any, b: Any, *, scale: float,
        disable_state_update: bool, use_qk_l2norm: bool, output_state_indices: Any, output: Any,
    ) -> Any:  # fmt: skip
        calls.append({"q": q})
        assert not disable_state_update
        assert pool.is_contiguous()
        g, beta = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()
        states = pool[read].mT
        result = gdn_recurrence(
            GDNInputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=states, use_qk_l2norm=use_qk_l2norm)
        )
        pool[output_state_indices] = result.final_states.mT.float()
        return output.copy_(result.out), pool

    return function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The arguments of calls of the stand-ins."""
    made: Calls = []
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")  # undoes the adapter's change after the test
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH")
    put(monkeypatch, "fla", __version__="9.9")
    monkeypatch.delitem(sys.modules, "fla.ops.gated_delta_rule", raising=False)
    put(monkeypatch, "flash_qla", chunk_gated_delta_rule=as_fla(made))
    put(monkeypatch, "flashinfer")
    put(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=as_flashinfer(made))
    put(monkeypatch, "flashinfer.gdn_kernels.qk_l2norm")
    put(monkeypatch, "flashinfer.gdn_decode", gated_delta_rule_mtp=as_flashinfer_mtp(made))
    return made


def peer(name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """A library's implementation.  The adapter must set fla's variable before it imports fla's operator."""

    def import_module(module: str) -> ModuleType:
        if module == "fla.ops.gated_delta_rule":
            assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
            put(
                monkeypatch,
                module,
                chunk_gated_delta_rule=as_fla(calls),
                fused_recurrent_gated_delta_rule=as_fla(calls),
            )
        return sys.modules[module]

    monkeypatch.setattr("ssdprof.operators.gdn.import_module", import_module)
    return required(resolve(GDN, name))


def precision_of(name: str) -> Precision:
    return Precision(state_dtype=torch.float16) if name == "fla" else Precision()


LIBRARIES = ("fla", "fla_recurrent", "flash_qla", "flashinfer", "flashinfer_mtp")


@pytest.mark.parametrize(("name", "packed"), [(name, packed) for name in LIBRARIES for packed in (False, True)][:-1])
def test_a_librarys_terms_are_met(
    name: str, packed: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    given = inputs(packed=packed)
    implementation = peer(name, calls, monkeypatch)
    out, states = implementation.run(given, precision_of(name))
    expected = gdn_recurrence(given)
    assert out.shape == given.v.shape
    torch.testing.assert_close(out.double(), expected.out.double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(states.double(), expected.final_states.double(), rtol=0, atol=1e-4)
    assert len(calls) == 1
    assert implementation.plan(given, precision_of(name)).reason


def test_only_flashinfer_gets_other_inputs_than_ours(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    for name in ("fla", "fla_recurrent", "flash_qla"):
        peer(name, calls, monkeypatch).run(given, precision_of(name))
        assert calls.pop() == {"q": given.q, "output_final_state": True}


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_what_flashinfer_needs_is_prepared_once_and_given_up_with_the_inputs(
    name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = peer(name, calls, monkeypatch).run
    given = replace(inputs(), q=inputs().q.repeat(1, 1, 1, 2)[..., ::2])
    run(given, Precision())
    run(given, Precision())
    assert calls[0]["q"] is calls[1]["q"]
    first = weakref.ref(calls[0]["q"])
    run(replace(given, scale=2.0), Precision())
    assert calls[2]["q"] is not calls[0]["q"]
    calls.clear()
    del given
    gc.collect()
    assert first() is None, "those inputs are gone"


def test_flashinfers_arguments(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    peer("flashinfer", calls, monkeypatch).run(inputs(), Precision())
    assert calls[0]["beta"].dtype == torch.float32
    assert calls[0]["cu_seqlens"].tolist() == [0, 6, 12]
    assert calls[0]["backend"] == "flashinfer", "it does not choose another library"


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_copies_of_the_inputs_are_named(name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that v and the states can be changed at their addresses, as replays read them."""
    implementation, given = peer(name, calls, monkeypatch), inputs()
    before = implementation.run(given, Precision())
    for tensor in (given.v, *implementation.copies(given)):
        tensor.mul_(2)
    after = implementation.run(given, Precision())
    torch.testing.assert_close(after.out, before.out * 2, rtol=0, atol=1e-6)
    assert calls


def test_fla_that_may_call_other_libraries_is_not_taken(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=as_fla(calls))
    with pytest.raises(MissingCapabilityError, match="may call other libraries"):
        required(resolve(GDN, "fla"))


@pytest.mark.parametrize(
    ("name", "given", "precision", "words"),
    [
        ("fla", inputs(), Precision(intermediates="relaxed", state_dtype=torch.float16), "exact intermediates only"),
        ("fla", inputs(), Precision(), "states that enter chunks are torch.float16"),
        ("fla_recurrent", inputs(length=65), Precision(), "sequences of at most 64"),
        ("flash_qla", inputs(dim=64), Precision(), "K and V are 128, not 64 and 64"),
        ("flashinfer", inputs(dim=64), Precision(), "K and V are 128, not 64 and 64"),
        ("flash_qla", inputs(dtype=torch.float32), Precision(), "fp16 and bf16 inputs only"),
        ("flashinfer", inputs(), Precision(state_dtype=torch.float16), "states stay in fp32"),
        ("flashinfer_mtp", inputs(packed=True), Precision(), "2 to 64 tokens of each sequence"),
        ("flashinfer_mtp", inputs(length=1), Precision(), "2 to 64 tokens of each sequence"),
        ("flashinfer_mtp", replace(inputs(), initial_state=None), Precision(), "with initial states"),
    ],
)
def test_what_they_do_not_do(
    name: str, given: GDNInputs, precision: Precision, words: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation = peer(name, calls, monkeypatch)
    for call in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"^{name}: .*{words}"):
            call(given, precision)
    assert not calls


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    for name in ("fla", "flash_qla", "flashinfer", "flashinfer_mtp"):
        module = name.removesuffix("_mtp")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingCapabilityError, match=f"{name} cannot be imported"):
            required(resolve(GDN, name))


def test_a_library_from_a_checkout_has_no_version() -> None:
    assert package_version("torch") == metadata.version("torch")
    assert package_version("no-such-package") == "unknown"
