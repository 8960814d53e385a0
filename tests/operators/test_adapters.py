"""Adapters of libraries that are not installed here.

Stand-ins replace them.  Most compute the operator by the recurrence, with the library's
conventions: an adapter that follows these conventions agrees with the oracle.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from inspect import getclosurevars
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import triton
from fakes import CELL
from kernel_cases import BF16, FP16, FP32, GDNCase, KDACase
from torch.nn import functional as F
from triton.runtime import Autotuner, _async_compile

from ssdprof import operators
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import bench
from ssdprof.jobs.options import BenchOptions
from ssdprof.kernels.adapters import Tunings, package_version, span
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.kernels.ssd.adapters import published_version
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators.generate import Cell
from ssdprof.operators.implementations import own_precisions, required, resolve

SSD, GDN, KDA = (operators.get(name) for name in ("ssd", "gdn", "kda"))
GDN_LIBRARIES = ("fla", "fla_recurrent", "flash_qla", "flashinfer", "flashinfer_mtp")
TRITON, FLA = "mamba_ssm.ops.triton", "fla.ops.gated_delta_rule"
Calls = list[dict[str, Any]]
Load = Callable[[str], Implementation]


# --- inputs


def test_a_view_spans_what_its_strides_skip() -> None:
    assert span(torch.empty(2, 3, 5)[:, :, :4], axes=slice(1, None)) == 14


def of_ssd(
    dtype: torch.dtype = BF16, *, size: tuple[int, ...] = (1, 8), **fields: Any
) -> SSDInputs:
    """size: batch, length, and heads and groups if they are not 2 and 1."""
    batch, length, heads, groups = (*size, 2, 1)[:4]
    x, B = (
        torch.zeros(batch, length, heads, 16, dtype=dtype),
        torch.zeros(batch, length, groups, 16, dtype=dtype),
    )
    made: dict[str, Any] = dict(x=x, dt=x[..., 0], A=-torch.ones(heads), B=B, C=B, chunk_size=128)
    return SSDInputs(**made | fields)


def far(rows: int, stride: int) -> SSDInputs:
    """More than 2^31 elements from the first to the last one, on the meta device."""
    x = torch.empty_strided((1, rows, 2, 16), (0, stride, 16, 1), dtype=FP16, device="meta")
    B = torch.empty(1, rows, 1, 16, dtype=FP16, device="meta")
    return of_ssd(x=x, dt=x[..., 0], A=torch.empty(2, device="meta"), B=B, C=B)


def a_step(length: int = 1, **fields: Any) -> SSDInputs:
    torch.manual_seed(0)
    B, C = torch.randn(2, 2, length, 2, 16)
    made: dict[str, Any] = dict(
        x=torch.randn(2, length, 4, 8),
        dt=torch.randn(2, length, 4),
        A=-torch.rand(4),
        B=B,
        C=C,
        D=torch.randn(4),
        dt_bias=torch.randn(4),
        dt_softplus=True,
        initial_states=torch.randn(2, 4, 8, 16),
        chunk_size=16,
    )
    return SSDInputs(**made | fields)


def of_gdn(
    *, dim: int = 128, dtype: torch.dtype = FP16, packed: bool = False, length: int = 6
) -> GDNInputs:
    sizes: dict[str, Any] = dict(
        values_per_key=2, key_dim=dim, value_dim=dim, dtype=dtype, initial_states=True
    )
    lengths: dict[str, Any] = (
        dict(lengths=(2, 0, length - 2)) if packed else dict(batch=2, seqlen=length)
    )
    return GDNCase(**sizes | lengths).inputs()


# --- stand-ins


def as_mamba_ssm(calls: Calls) -> Callable[..., Any]:
    def forward(*arguments: Any, **options: Any) -> Any:
        names = ("x", "dt", "A", "B", "C", "chunk_size")
        calls.append(dict(zip(names, arguments, strict=True)) | options)
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    return forward


def as_fla(calls: Calls) -> Callable[..., Any]:
    """q and k are normalised inside if requested."""

    def function(*, output_final_state: bool, use_qk_l2norm_in_kernel: bool, **given: Any) -> Any:
        calls.append({"q": given["q"], "output_final_state": output_final_state})
        return gdn_recurrence(GDNInputs(**given, use_qk_l2norm=use_qk_l2norm_in_kernel))

    return function


def as_flashinfer(calls: Calls) -> Callable[..., Any]:
    """The chunked kernels: packed tokens, decays, V-first states."""

    def function(*tensors: Any, initial_state: Any, backend: str, **options: Any) -> Any:
        assert options.pop("output_final_state")
        given = dict(zip(("q", "k", "v", "g", "beta"), tensors, strict=True))
        calls.append(given | options | {"backend": backend})
        assert all(one.is_contiguous() for one in (*tensors, initial_state))
        given["g"] = given["g"].log()
        inputs = GDNInputs(
            **{name: one[None] for name, one in given.items()},
            scale=options["scale"],
            initial_state=initial_state.mT,
            cu_seqlens=options["cu_seqlens"],
            use_qk_l2norm=options["use_qk_l2norm_in_kernel"],
        )
        out, states = gdn_recurrence(inputs)
        return out[0], states.mT.contiguous()

    return function


def as_flashinfer_mtp(calls: Calls) -> Callable[..., Any]:
    """The kernel for a few tokens: raw gates, a pool of V-first states."""

    def function(
        q: Any, k: Any, v: Any, pool: Any, read: Any, A_log: Any, a: Any, dt_bias: Any, b: Any,
        *, output_state_indices: Any, output: Any, use_qk_l2norm: bool, **options: Any,
    ) -> Any:  # fmt: skip
        calls.append({"q": q})
        assert not options.pop("disable_state_update")
        assert pool.is_contiguous()
        gates = {"g": -A_log.exp() * F.softplus(a + dt_bias), "beta": b.sigmoid()}
        options |= {"initial_state": pool[read].mT, "use_qk_l2norm": use_qk_l2norm}
        result = gdn_recurrence(GDNInputs(q=q, k=k, v=v, **gates, **options))
        pool[output_state_indices] = result.final_states.mT.float()
        return output.copy_(result.out), pool

    return function


KERNEL = """
from mamba_ssm.ops.triton.softplus import softplus
def _fused5_ssd(x, dt, A, B, C, D, **options):
    return x, None, None, (softplus, options), None, None
"""
TUNED = """
from mamba_ssm.ops.triton.softplus import softplus
import triton
@triton.autotune([triton.Config({"N": 1}), triton.Config({"N": 2})], key=["N"])
@triton.heuristics({})
@triton.jit
def inner(N):
    pass
outer = triton.heuristics({})(inner)
def _fused5_ssd(x, dt, A, B, C, D, **options):
    known = list(inner.cache.values())
    inner.cache["key"] = f"tuned for {list(x.shape[:2])}"
    return x, None, None, known, None, None
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Of the published kernel."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (folder / "softplus.py").write_text("softplus = 'of the checkout'\n")
    (folder / "ssd_fused5.py").write_text(KERNEL)
    return tmp_path


def kernel_file(checkout: Path) -> Path:
    return checkout / "mamba_ssm/ops/triton/ssd_fused5.py"


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Installs a module of this name with `members`."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def calls() -> Calls:
    """The arguments of calls of the stand-ins."""
    return []


@pytest.fixture
def load(calls: Calls, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A library's implementation by its name.  The adapter must set fla's variable before it
    imports its operator.
    """
    # undoes the adapter's change after the test
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH")
    monkeypatch.delitem(sys.modules, FLA, raising=False)
    for name, members in {
        "mamba_ssm": dict(__version__="9.9"),
        "fla": dict(__version__="9.9"),
        "flashinfer": {},
        f"{TRITON}.ssd_combined": dict(_mamba_chunk_scan_combined_fwd=as_mamba_ssm(calls)),
        f"{TRITON}.selective_state_update": dict(selective_state_update=None),
        "flash_qla": dict(chunk_gated_delta_rule=as_fla(calls)),
        "flashinfer.gdn_kernels.qk_l2norm": {},
        "flashinfer.gdn_prefill": dict(chunk_gated_delta_rule=as_flashinfer(calls)),
        "flashinfer.gdn_decode": dict(gated_delta_rule_mtp=as_flashinfer_mtp(calls)),
    }.items():
        put(monkeypatch, name, **members)

    def import_module(module: str) -> ModuleType:
        if module == FLA:
            assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
            functions = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
            put(monkeypatch, module, **dict.fromkeys(functions, as_fla(calls)))
        return sys.modules[module]

    def of(name: str) -> Implementation:
        word = f"published={checkout}" if name == "published" else name
        return required(resolve(GDN if name in GDN_LIBRARIES else SSD, word))

    monkeypatch.setattr("ssdprof.operators.fla.import_module", import_module)
    return of


# --- laws of all

EXACT, OF_BF16, OF_FP16 = Precision(), Precision(state_dtype=BF16), Precision(state_dtype=FP16)
RELAXED, RELAXED_FP16 = (
    Precision(intermediates="relaxed"),
    Precision(intermediates="relaxed", state_dtype=FP16),
)
TERMS = [(name, packed) for name in GDN_LIBRARIES for packed in (False, True)][:-1]


@pytest.mark.parametrize(("name", "given"), TERMS)
def test_a_librarys_terms_are_met(name: str, given: bool, load: Load, calls: Calls) -> None:
    """Twice: a call leaves its inputs as they were.  Only FlashInfer gets other inputs than
    ours.
    """
    inputs, precision = of_gdn(packed=given), OF_FP16 if name == "fla" else EXACT
    assert inputs.initial is not None
    before = inputs.initial.clone()
    expected = gdn_recurrence(inputs)
    implementation = load(name)
    for _ in range(2):
        out, states = implementation.run(inputs, precision)
        assert out.shape == inputs.values.shape
        torch.testing.assert_close(out.double(), expected.out.double(), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(
            states.double(), expected.final_states.double(), rtol=1e-5, atol=1e-4
        )
    assert torch.equal(inputs.initial, before)
    assert len(calls) == 2
    if name in GDN_LIBRARIES[:3]:
        assert calls[0] == {"q": inputs.q, "output_final_state": True}
    assert implementation.plan(inputs, precision).reason


PACK, ODD = dict(cu_seqlens=torch.tensor([0, 8])), dict(chunk_size=24)
REFUSED: list[tuple[str, Any, Precision, str]] = [
    ("mamba_ssm", {}, RELAXED, "exact intermediates only"),
    ("mamba_ssm", {}, EXACT, "this version"),
    ("mamba_ssm", dict(dtype=FP32), EXACT, "fp32 inputs are multiplied in tf32, which is relaxed"),
    ("mamba_ssm", PACK, OF_BF16, "packed sequence"),
    ("mamba_ssm", far(8, 2**29), OF_FP16, "32-bit offsets"),
    ("mamba_ssm", ODD, OF_BF16, "chunk_size must be a power of two, not 24"),
    ("published", {}, OF_BF16, "fp32 and fp16 states only"),
    ("published", {}, OF_FP16, "go with fp16 inputs"),
    ("published", {}, RELAXED_FP16, "go with fp16 inputs"),
    ("published", PACK, EXACT, "no packed sequences"),
    ("published", ODD, EXACT, "chunk_size must be a power of two, not 24"),
    ("published", far(2**27, 32), EXACT, "32-bit offsets"),
    ("selective_state_update", a_step(2), EXACT, "one token of each sequence"),
    ("selective_state_update", a_step(), OF_FP16, "fp32 states only"),
    ("selective_state_update", a_step(dt_limit=(0.0, 1.0)), EXACT, "no dt_limit"),
    ("fla", of_gdn(), RELAXED_FP16, "exact intermediates only"),
    ("fla", of_gdn(), EXACT, "states that enter chunks are torch.float16"),
    ("fla_recurrent", of_gdn(length=65), EXACT, "sequences of at most 64"),
    ("flash_qla", of_gdn(dim=64), EXACT, "K and V are 128, not 64 and 64"),
    ("flashinfer", of_gdn(dim=64), EXACT, "K and V are 128, not 64 and 64"),
    ("flash_qla", of_gdn(dtype=FP32), EXACT, "fp16 and bf16 inputs only"),
    ("flashinfer", of_gdn(), OF_FP16, "states stay in fp32"),
    ("flashinfer_mtp", of_gdn(packed=True), EXACT, "2 to 64 tokens of each sequence"),
    ("flashinfer_mtp", of_gdn(length=1), EXACT, "2 to 64 tokens of each sequence"),
]


@pytest.mark.parametrize(("name", "given", "precision", "words"), REFUSED)
def test_what_they_do_not_do(
    name: str, given: Any, precision: Precision, words: str, load: Load, calls: Calls
) -> None:
    implementation = load(name)
    for call in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"^{name}: .*{words}"):
            call(of_ssd(**given) if isinstance(given, dict) else given, precision)
    assert not calls


@pytest.mark.parametrize("name", ["mamba_ssm", "fla", "flash_qla", "flashinfer", "flashinfer_mtp"])
def test_a_library_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    monkeypatch.setitem(sys.modules, name.removesuffix("_mtp"), None)
    with pytest.raises(MissingCapabilityError, match=f"{name} cannot be imported"):
        required(resolve(GDN if name in GDN_LIBRARIES else SSD, name))


def test_a_library_from_a_checkout_has_no_version() -> None:
    assert package_version("torch") == metadata.version("torch")
    assert package_version("no-such-package") == "unknown"


# --- mamba_ssm


def test_mamba_ssm_is_called_as_its_users_call_it(load: Load, calls: Calls) -> None:
    library = load("mamba_ssm")
    assert (library.name, library.version) == ("mamba_ssm", "9.9")
    given = of_ssd(D=torch.ones(2), dt_bias=torch.ones(2), dt_softplus=True, dt_limit=(0.0, 1.0))
    out, states = library.run(given, OF_BF16)
    assert all(getattr(given, name) is value for name, value in calls[0].items())
    assert out is given.x
    assert bool((states == 1).all())
    assert [str(precision) for precision in own_precisions(library, "bf16", ())] == [
        "exact, bf16 states"
    ]
    assert [str(one) for one in own_precisions(load("selective_state_update"), "bf16", ())] == [
        "exact, fp32 states"
    ]


def test_a_version_of_mamba_ssm_that_passes_any_states_also_runs_with_fp32_states(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def forward(*arguments: Any, state_dtype: Any = None, **_: Any) -> Any:
        asked.append(state_dtype)
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    monkeypatch.setattr(
        sys.modules[f"{TRITON}.ssd_combined"], "_mamba_chunk_scan_combined_fwd", forward
    )
    library = load("mamba_ssm")
    found = {
        dtype: [str(one) for one in own_precisions(library, dtype, ())]
        for dtype in ("fp16", "fp32")
    }
    assert found == {
        "fp16": ["exact, fp16 states", "exact, fp32 states"],
        "fp32": ["relaxed, fp32 states"],
    }
    for states in (FP16, FP32):
        library.run(of_ssd(FP16), Precision(state_dtype=states))
    assert asked == [None, FP32]


# --- the published kernel


def test_the_published_kernel_is_loaded_by_path_beside_an_installed_library(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    softplus = f"{TRITON}.softplus"
    load("published")
    assert softplus not in sys.modules, "where nothing is installed, nothing is"
    installed = ModuleType(softplus)
    monkeypatch.setitem(sys.modules, softplus, installed)
    run = load("published").run
    assert sys.modules[softplus] is installed
    found, options = run(of_ssd(FP16), EXACT).final_states
    assert found == "of the checkout"
    assert options["chunk_size"] == 128


@pytest.mark.parametrize("states", [FP32, FP16])
@pytest.mark.parametrize("intermediates", ["exact", "relaxed"])
def test_the_published_kernel_runs_with_all_four_pairs_of_intermediates_and_states(
    load: Load, intermediates: Literal["exact", "relaxed"], states: torch.dtype
) -> None:
    precision, implementation = (
        Precision(intermediates=intermediates, state_dtype=states),
        load("published"),
    )
    _, options = implementation.run(of_ssd(FP16), precision).final_states
    assert options["states_in_fp32"] is (states == FP32)
    assert {options[name] for name in ("cb_store_fp32", "cb_scale_fp32", "cs_acc_fp32")} == {
        intermediates == "exact"
    }
    assert options["cb_comp_fp32"] is True
    plan = implementation.plan(of_ssd(FP16), precision)
    assert plan.variant == {"exact": "high", "relaxed": "medium"}[intermediates]
    of_its_own = (intermediates == "exact") == (states == FP32)
    assert ("with the states of the other one" in plan.reason) is not of_its_own


def test_the_published_kernel_is_named_by_its_content(checkout: Path) -> None:
    before = published_version(checkout)
    kernel_file(checkout).write_text(KERNEL + "\n")
    assert before.startswith("ssd_fused5.py, sha256 ")
    assert published_version(checkout) != before


def test_libraries_line_up_before_ours_at_their_own_precisions(load: Load) -> None:
    of, sizes = (resolve(SSD, "unfused"), load("published")), SSD.generated.chunk_sizes

    def compared(cell: Cell) -> list[tuple[str, str]]:
        request = BenchOptions(operator="ssd", states=("fp32",), compared=of, sizes=sizes)
        assert all(bench.sizes(request, SSD, one) == sizes for one in of)
        return [(one.name, str(precision)) for one, precision in bench.compared(request, SSD, cell)]

    assert compared(replace(CELL, dtype="fp16")) == [
        ("published", "exact, fp32 states"),
        ("published", "exact, fp16 states"),
        ("published", "relaxed, fp32 states"),
        ("published", "relaxed, fp16 states"),
        ("unfused", "exact, fp32 states"),
    ]
    assert compared(CELL) == [
        ("published", "exact, fp32 states"),
        ("unfused", "exact, fp32 states"),
    ]


# --- GDN's libraries


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_what_flashinfer_needs_is_prepared_once_and_given_up_with_the_inputs(
    name: str, load: Load, calls: Calls
) -> None:
    run = load(name).run
    given = replace(of_gdn(), q=of_gdn().q.repeat(1, 1, 1, 2)[..., ::2])
    run(given, EXACT)
    run(given, EXACT)
    assert calls[0]["q"] is calls[1]["q"]
    first = weakref.ref(calls[0]["q"])
    run(replace(given, scale=2.0), EXACT)
    assert calls[2]["q"] is not calls[0]["q"]
    calls.clear()
    del given
    gc.collect()
    assert first() is None, "those inputs are gone"


def test_flashinfers_arguments(load: Load, calls: Calls) -> None:
    load("flashinfer").run(of_gdn(), EXACT)
    assert calls[0]["beta"].dtype == FP32
    assert calls[0]["cu_seqlens"].tolist() == [0, 6, 12]
    assert calls[0]["backend"] == "flashinfer", "it does not choose another library"


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_copies_of_the_inputs_are_named(name: str, load: Load) -> None:
    """So that v and the states can be changed at their addresses, as replays read them."""
    implementation, given = load(name), of_gdn()
    before = implementation.run(given, EXACT)
    for tensor in (given.v, *implementation.copies(given)):
        tensor.mul_(2)
    after = implementation.run(given, EXACT)
    torch.testing.assert_close(after.out, before.out * 2, rtol=0, atol=1e-6)


def test_fla_that_may_call_other_libraries_is_not_taken(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, FLA, chunk_gated_delta_rule=as_fla([]))
    with pytest.raises(MissingCapabilityError, match="may call other libraries"):
        load("fla")


# --- FlashKDA


def of_kda(**fields: Any) -> KDAInputs:
    """With gates and beta that are functions of bf16 numbers, so that nothing is rounded on the way
    back.
    """
    sizes: dict[str, Any] = dict(
        batch=2, seqlen=6, key_dim=128, value_dim=128, dtype=BF16, initial_states=True
    )
    given = KDACase(**sizes | fields).inputs()
    beta, g = (
        given.beta.float().logit().to(BF16).float().sigmoid(),
        -5 * (20 * given.g).to(BF16).float().sigmoid(),
    )
    return replace(given, g=g, beta=beta)


@pytest.fixture
def flash_kda(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    def fwd(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float,
        *,
        out: Any,
        A_log: Any,
        dt_bias: Any,
        lower_bound: float,
        initial_state: Any,
        final_state: Any,
        cu_seqlens: Any,
    ) -> None:
        assert all(
            one.is_contiguous() for one in (q, k, v, g, beta, out, A_log, dt_bias, final_state)
        )
        assert {one.dtype for one in (q, k, v, g, beta, out)} == {BF16}
        assert (A_log.shape, dt_bias.shape) == (q.shape[2:3], q.shape[2:])
        g = lower_bound * (A_log.exp()[:, None] * (g + dt_bias)).sigmoid()
        inputs = KDAInputs(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta.float().sigmoid(),
            scale=scale,
            initial_state=initial_state.mT,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=True,
        )
        result = kda_recurrence(inputs)
        out.copy_(result.out)
        final_state.copy_(result.final_states.mT)

    put(monkeypatch, "flash_kda", fwd=fwd)
    return required(resolve(operators.get("kda"), "flash_kda"))


@pytest.mark.parametrize("sequences", [{}, {"lengths": (3, 0, 4)}])
def test_flash_kda_gets_what_is_before_the_activations(
    sequences: Any, flash_kda: Implementation
) -> None:
    inputs = of_kda(**sequences)
    expected, (out, states) = kda_recurrence(inputs), flash_kda.run(inputs, OF_BF16)
    torch.testing.assert_close(out.double(), expected.out.double(), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(
        states.double(), expected.final_states.double(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("inputs", "precision", "words"),
    [
        (of_kda(), EXACT, "states that enter chunks are bf16"),
        (of_kda(key_dim=64), OF_BF16, "K and V are 128"),
        (of_kda(dtype=FP16), OF_BF16, "bf16 inputs"),
        (of_kda(values_per_key=2), OF_BF16, "as many key heads"),
        (replace(of_kda(), g=of_kda().g - 5), OF_BF16, "g is at least -5"),
        (replace(of_kda(), beta=2 * of_kda().beta), OF_BF16, "beta at most 1"),
    ],
)
def test_what_flash_kda_does_not_do(
    inputs: KDAInputs, precision: Precision, words: str, flash_kda: Implementation
) -> None:
    with pytest.raises(UnsupportedError, match=f"^flash_kda: .*{words}"):
        flash_kda.run(inputs, precision)


# --- cuDNN and servers


def packed_states(kind: Any, inputs: dict[str, Any], states: Any) -> Any:
    """The recurrence on one pack in the layout of servers; final states have V before K."""
    given = kind(**inputs, initial_state=None if states is None else states.mT)
    out, final_states = (gdn_recurrence if kind is GDNInputs else kda_recurrence)(given)
    return out.to(given.v.dtype), final_states.mT.float()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    def kimi_delta_attention(*tensors: Any, initial_state: Any, **options: Any) -> Any:
        assert options["output_final_state"]
        assert options["plan_name"] == "kda_hopper_cuda", "other plans are other kernels"
        assert all(one.is_contiguous() for one in tensors[:5])
        assert [one.dtype for one in tensors[3:]] == [FP32, FP32, torch.int32]
        names = ("q", "k", "v", "g", "beta")
        rows: dict[str, Any] = {
            name: one[None] for name, one in zip(names, tensors[:5], strict=True)
        }
        rows |= {"scale": options["scale"], "cu_seqlens": tensors[5]}
        rows["use_qk_l2norm"] = options["use_qk_l2norm_in_kernel"]
        out, final_states = packed_states(KDAInputs, rows, initial_state)
        return out[0], final_states

    put(monkeypatch, "cudnn.linear_attention.ops", kimi_delta_attention=kimi_delta_attention)
    monkeypatch.setattr("ssdprof.operators.fla.import_module", sys.modules.__getitem__)
    return required(resolve(KDA, "cudnn"))


def agrees(implementation: Implementation, inputs: Any, precision: Precision) -> None:
    """Twice, since a call must leave its inputs as they are."""
    recurrence = gdn_recurrence if inputs.operator == "gdn" else kda_recurrence
    expected = recurrence(inputs)
    for _ in range(2):
        out, states = implementation.run(inputs, precision)
        torch.testing.assert_close(out.double(), expected.out.double(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(
            states.double(), expected.final_states.double(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("form", [{}, {"lengths": (3, 0, 4)}, {"initial_states": False}])
def test_cudnn_gets_packed_tokens_and_v_first_states(form: Any, cudnn: Implementation) -> None:
    agrees(cudnn, of_kda(**form), EXACT)


UNIT = replace(of_kda(), k=F.normalize(of_kda().k.float(), dim=-1).to(BF16), use_qk_l2norm=False)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (of_kda(dtype=FP16), "bf16 inputs only"),
        (of_kda(key_dim=64), "K and V are 128"),
        (replace(of_kda(), g=torch.full_like(of_kda().g, -torch.inf)), "g is finite"),
        (replace(of_kda(), beta=2 * of_kda().beta), "beta between 0 and 1"),
        (replace(of_kda(), beta=-of_kda().beta), "beta between 0 and 1"),
        (replace(UNIT, k=2 * UNIT.k), "keys of at most length 1"),
    ],
)
def test_what_cudnn_does_not_do(inputs: KDAInputs, words: str, cudnn: Implementation) -> None:
    agrees(cudnn, UNIT, EXACT)
    with pytest.raises(UnsupportedError, match=f"^cudnn: .*{words}"):
        cudnn.run(inputs, EXACT)


PATCHING = ("vllm", "sglang", "kernels", "ops")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages that may not run, around modules with stand-ins for their kernels, which overwrite
    their arguments as the kernels do.
    """

    def vllm(
        *, initial_state: Any, output_final_state: bool, use_qk_l2norm_in_kernel: bool, **given: Any
    ) -> Any:
        assert output_final_state
        named = given | {"use_qk_l2norm": use_qk_l2norm_in_kernel}
        return packed_states(GDNInputs, named, initial_state)

    def sglang(kind: Any) -> Callable[..., Any]:
        def function(*, initial_state: Any, initial_state_indices: Any, **given: Any) -> Any:
            assert initial_state_indices.tolist() == list(range(len(initial_state)))
            given["use_qk_l2norm"] = given.pop("use_qk_l2norm_in_kernel")
            out, final_states = packed_states(kind, given, initial_state)
            initial_state.copy_(final_states)
            return (out, None, None) if kind is GDNInputs else given["v"].copy_(out)

        return function

    fla = "kernels/ops/attention/fla"
    modules = {
        "vllm/third_party/flash_linear_attention/ops": dict(chunk_gated_delta_rule=vllm),
        f"sglang/{fla}/chunk": dict(chunk_gated_delta_rule=sglang(GDNInputs)),
        f"sglang/{fla}/kda": dict(chunk_kda=sglang(KDAInputs)),
    }
    for path, functions in modules.items():
        (tmp_path / path).mkdir(parents=True)
        for parent in list(Path(path).parents)[:-1]:
            text = "raise RuntimeError('it patches others')" if parent.name in PATCHING else ""
            (tmp_path / parent / "__init__.py").write_text(text)
        put(monkeypatch, path.replace("/", "."), **functions)
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        if name not in {path.replace("/", ".") for path in modules}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        del sys.modules[name]


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("packed", [False, True])
def test_servers_kernels_overwrite_copies_alone(packed: bool) -> None:
    """Packages that patch others when they are imported are not run."""
    for name in ("vllm", "sglang"):
        agrees(required(resolve(GDN, name)), of_gdn(packed=packed), OF_FP16)
    kda = required(resolve(KDA, "sglang"))
    agrees(kda, of_kda(**({"lengths": (3, 0, 4)} if packed else {})), OF_BF16)
    agrees(kda, of_kda(initial_states=False), OF_BF16)
    for inputs, words in (
        (of_kda(values_per_key=2), "as many key heads"),
        (of_kda(dtype=FP32), "fp16 and bf16 inputs only"),
        (replace(of_kda(), g=-of_kda().g), "g is finite and at most 0"),
    ):
        with pytest.raises(UnsupportedError, match=f"^sglang: .*{words}"):
            kda.run(inputs, OF_BF16)


def test_an_absent_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingCapabilityError, match="vllm cannot be imported"):
        required(resolve(GDN, "vllm"))


# --- transformers' own functions


def of_model(operator: str) -> Any:
    """Inputs of 70 tokens, in two chunks."""
    if operator == "ssd":
        return a_step(70, chunk_size=64, dt_limit=(0.1, 2.0))
    given = (GDNCase if operator == "gdn" else KDACase)(
        values_per_key=1 if operator == "kda" else 2,
        key_dim=16,
        value_dim=32,
        dtype=FP32,
        initial_states=True,
        batch=2,
        seqlen=70,
    ).inputs()
    return replace(given, g=given.g.clamp(-20, 0))


@pytest.mark.parametrize("operator", ["ssd", "gdn", "kda"])
def test_model_is_what_transformers_computes(operator: str) -> None:
    model, inputs = required(resolve(operators.get(operator), "model")), of_model(operator)
    recurrence = {"ssd": ssd_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}[operator]
    out, states = model.run(inputs, EXACT)
    expected = recurrence(inputs)
    torch.testing.assert_close(out.double(), expected.out.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        states.double(), expected.final_states.double(), rtol=1e-4, atol=1e-4
    )
    assert model.version.startswith("transformers 5.")
    with pytest.raises(UnsupportedError, match=r"^model: no packed sequences"):
        bounds = torch.tensor([0, inputs.length])
        first = {
            name: one[:1]
            for name, one in operators.get(operator).binding.positional(inputs).items()
        }
        model.run(replace(inputs.after(None), **first, cu_seqlens=bounds), EXACT)


def test_model_with_a_library_needs_that_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(MissingCapabilityError, match="transformers finds no fla here"):
        required(resolve(KDA, "model:installed"))


# --- libraries that tune themselves


class Kernel:
    """A stand-in for a kernel that is compiled on demand.  Records its arguments and the mode of
    every call.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.modes: list[bool] = []

    def run(self, **arguments: Any) -> None:
        self.asked.append(arguments)
        self.modes.append(_async_compile.active_mode.get() is not None)


def tuned(kernel: Kernel, *blocks: int) -> Autotuner:
    def plain(x: Any, BLOCK: int) -> None:
        pass

    configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in blocks]
    tuner = triton.autotune(configs, key=["x"])(triton.jit(plain))
    assert isinstance(tuner, Autotuner)
    tuner.fn, tuner.nargs, tuner.cache_results = kernel, {"x": 7}, True
    module = ModuleType("tuned")
    module.tuner = tuner  # type: ignore[attr-defined]
    Tunings([module])
    return tuner


OPTIONS = {"grid": (1,), "warmup": False}


def test_what_a_tuner_will_try_is_compiled_before_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted tuner can go on later.  None takes the choice of another process from the
    disk.
    """

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    kernel = Kernel()
    tuner = tuned(kernel, 32, 64)
    with monkeypatch.context() as patched:
        patched.setattr(triton.AsyncCompileMode, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuner.prune_configs(OPTIONS)
    assert _async_compile.active_mode.get() is None
    assert not tuner.cache_results
    assert tuner.prune_configs(OPTIONS) == tuner.configs
    assert [(asked["x"], asked["BLOCK"], asked["num_warps"]) for asked in kernel.asked] == 2 * [
        (7, 32, 8),
        (7, 64, 8),
    ]
    assert all(asked["warmup"] for asked in kernel.asked)  # compiles, and launches nothing
    assert kernel.modes == [True] * 4
    assert _async_compile.active_mode.get() is None


def test_tries_of_a_kernel_that_counts_do_not_find_flags_of_the_try_before(
    load: Load, checkout: Path
) -> None:
    kernel_file(checkout).write_text(TUNED)
    call: Any = load("published").run.args[1].args[0]  # type: ignore[attr-defined]
    kernel = getclosurevars(call).nonlocals["launch"].__globals__["inner"]
    flags = torch.ones(4)
    kernel.pre_hook({"sync_atomic": flags})
    assert not flags.any()


def test_the_published_kernel_is_tuned_for_each_shape_and_layout_of_tokens(
    load: Load, checkout: Path
) -> None:
    kernel_file(checkout).write_text(TUNED)
    run, sizes = (
        load("published").run,
        [(1, 1024), (1, 2048), (2, 1024), (1, 1024, 4, 1), (1, 1024, 4, 2)],
    )
    for size in sizes:
        assert run(of_ssd(FP16, size=size), EXACT).final_states == []
    for size in sizes:
        assert run(of_ssd(FP16, size=size), EXACT).final_states == [f"tuned for {list(size[:2])}"]


def test_mamba_ssm_is_tuned_for_short_calls_and_for_long_ones(
    load: Load, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = tuned(Kernel(), 32, 64)
    put(monkeypatch, f"{TRITON}.ssd_chunk_scan", tuner=tuner)
    run, seen = load("mamba_ssm").run, []
    for size in ((1, 8), (2, 4096), (1, 8200), (4, 4096), (1, 8)):
        run(of_ssd(FP16, size=size), OF_FP16)
        seen.append(list(tuner.cache))
        tuner.cache[len(calls)] = tuner.configs[0]
    assert seen == [[], [1], [], [3], [1, 2]]


def test_fla_calls_no_other_library_also_where_a_model_imports_it_first() -> None:
    """transformers imports fla with a model's code, before this package asks for fla's kernels."""
    code = (
        "import os; from ssdprof.checkpoint import transformers; transformers.__version__; "
        "print(os.environ['FLA_DISABLE_BACKEND_DISPATCH'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "FLA_DISABLE_BACKEND_DISPATCH"
    }
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout == "1\n"
