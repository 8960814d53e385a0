"""Adapters of libraries that are not installed here.

Stand-ins replace them.  Most compute the operator by the recurrence, with the library's
conventions: an adapter that follows these conventions agrees with the oracle.
"""

import gc
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from inspect import getclosurevars
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import triton
from fakes import CELL, put
from kernel_cases import BF16, FP16, FP32, GDNCase, KDACase, SSDCase, rows
from torch.nn import functional as F
from triton.runtime import Autotuner, _async_compile

from ssdprof import checkpoint, operators
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
from ssdprof.kernels.ssd.servers import _sequence_chunks
from ssdprof.operators.generate import Cell
from ssdprof.operators.implementations import own_precisions, required, resolve

SSD = operators.get("ssd")
RECURRENCES = {"ssd": ssd_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}
QKV = ("q", "k", "v", "g", "beta")
SERVING = ("vllm", "sglang")
GDN_LIBRARIES = ("fla", "fla_recurrent", "flash_qla", "flashinfer", "flashinfer_mtp")
TRITON = "mamba_ssm.ops.triton"
FLA = "fla.ops.gated_delta_rule"
Calls = list[dict[str, Any]]
Load = Callable[..., Implementation]


# --- inputs


def test_a_view_spans_what_its_strides_skip():
    assert span(torch.empty(2, 3, 5)[0, :, :4]) == 14


def of_ssd(dtype: torch.dtype = BF16, *, size: tuple[int, ...] = (1, 8), **fields) -> SSDInputs:
    """size: batch, length, and heads and groups if they are not 2 and 1."""
    batch, seqlen, heads, groups = (*size, 2, 1)[:4]
    case = SSDCase(batch=batch, seqlen=seqlen, heads=heads, groups=groups, dtype=dtype)
    return case.inputs(**{"chunk_size": 128, "D": None} | fields)


def far(rows: int, stride: int) -> SSDInputs:
    """More than 2^31 elements from the first to the last one, on the meta device."""
    x = torch.empty_strided((1, rows, 2, 16), (0, stride, 16, 1), dtype=FP16, device="meta")
    B = torch.empty(1, rows, 1, 16, dtype=FP16, device="meta")
    A = torch.empty(2, device="meta")
    return SSDInputs(x=x, dt=x[..., 0], A=A, B=B, C=B, chunk_size=128)


def a_step(length: int = 1, **fields) -> SSDInputs:
    case = SSDCase(batch=2, seqlen=length, heads=4, headdim=8, groups=2, initial_states=True)
    return case.inputs(**fields)


WIDE = dict(key_dim=128, value_dim=128, initial_states=True)


def of_gdn(length: int = 6, *, packed: bool = False, **sizes) -> GDNInputs:
    tokens = dict(lengths=(2, 0, length - 2)) if packed else dict(batch=2, seqlen=length)
    return GDNCase(**WIDE | dict(values_per_key=2, dtype=FP16) | tokens | sizes).inputs()


def of_kda(**sizes) -> KDAInputs:
    """With gates and beta that are functions of bf16 numbers, so that nothing is rounded on the way
    back.
    """
    inputs = KDACase(**WIDE | dict(batch=2, seqlen=6, dtype=BF16) | sizes).inputs()
    beta = inputs.beta.float().logit().to(BF16).float().sigmoid()
    return replace(inputs, g=-5 * (20 * inputs.g).to(BF16).float().sigmoid(), beta=beta)


# --- stand-ins


def as_mamba_ssm(calls: Calls) -> Callable[..., Any]:
    def forward(*arguments, **options):
        names = ("x", "dt", "A", "B", "C", "chunk_size")
        calls.append(dict(zip(names, arguments, strict=True)) | options)
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    return forward


def as_fla(calls: Calls) -> Callable[..., Any]:
    """q and k are normalised inside if requested."""

    def function(*, output_final_state: bool, use_qk_l2norm_in_kernel: bool, **fields):
        calls.append({"q": fields["q"], "output_final_state": output_final_state})
        return gdn_recurrence(GDNInputs(**fields, use_qk_l2norm=use_qk_l2norm_in_kernel))

    return function


def v_first(kind, initial_state, *, use_qk_l2norm_in_kernel: bool, **fields) -> tuple[Any, Any]:
    """The recurrence with states that have V before K."""
    inputs = kind(
        **fields,
        initial_state=None if initial_state is None else initial_state.mT,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    out, states = (gdn_recurrence if kind is GDNInputs else kda_recurrence)(inputs)
    return out.to(inputs.v.dtype), states.mT.contiguous().float()


def as_flashinfer(calls: Calls) -> Callable[..., Any]:
    """The chunked kernels: packed tokens, decays."""

    def function(*tensors, output_final_state: bool, initial_state, backend: str, **options):
        assert output_final_state
        assert all(tensor.is_contiguous() for tensor in (*tensors, initial_state))
        tokens = dict(zip(QKV, tensors, strict=True))
        calls.append(tokens | options | {"backend": backend})
        rows = {name: part[None] for name, part in tokens.items()}
        rows["g"] = rows["g"].log()
        out, states = v_first(GDNInputs, initial_state, **rows, **options)
        return out[0], states

    return function


def as_flashinfer_mtp(calls: Calls) -> Callable[..., Any]:
    """The kernel for one token, and for a few with one state each: raw gates, a pool of states."""

    def function(
        q, k, v, state, A_log, a, dt_bias, b, *, initial_state, initial_state_indices,
        output_state_indices, output, use_qk_l2norm: bool, **options,
    ):  # fmt: skip
        calls.append({"q": q})
        assert state is None
        assert initial_state.is_contiguous()
        gates = {"g": -A_log.exp() * F.softplus(a + dt_bias), "beta": b.sigmoid()}
        begin = initial_state[initial_state_indices].mT
        options |= {"initial_state": begin, "use_qk_l2norm": use_qk_l2norm}
        result = gdn_recurrence(GDNInputs(q=q, k=k, v=v, **gates, **options))
        initial_state[output_state_indices] = result.final_states.mT.float()
        return output.copy_(result.out), initial_state

    return function


def as_flash_kda(
    *tensors, out, final_state, A_log, dt_bias, lower_bound: float,
    initial_state, cu_seqlens,
):  # fmt: skip
    """The gate and beta before their activations."""
    *tokens, scale = tensors
    assert all(tensor.is_contiguous() for tensor in (*tokens, out, A_log, dt_bias, final_state))
    assert {tensor.dtype for tensor in (*tokens, out)} == {BF16}
    q, k, v, g, beta = tokens
    assert (A_log.shape, dt_bias.shape) == (q.shape[2:3], q.shape[2:])
    gates = {
        "g": lower_bound * (A_log.exp()[:, None] * (g + dt_bias)).sigmoid(),
        "beta": beta.float().sigmoid(),
    }
    options = {"scale": scale, "cu_seqlens": cu_seqlens, "use_qk_l2norm_in_kernel": True}
    result = v_first(KDAInputs, initial_state, q=q, k=k, v=v, **gates, **options)
    out.copy_(result[0])
    final_state.copy_(result[1])


def as_cudnn(*tensors, output_final_state: bool, plan_name: str, initial_state, **options):
    """Packed tokens."""
    assert output_final_state
    assert plan_name == "kda_hopper_cuda", "other plans are other kernels"
    *tokens, cu_seqlens = tensors
    assert all(tensor.is_contiguous() for tensor in tokens)
    assert [tensor.dtype for tensor in tensors[3:]] == [FP32, FP32, torch.int32]
    rows = {name: part[None] for name, part in zip(QKV, tokens, strict=True)}
    out, states = v_first(KDAInputs, initial_state, **rows, **options, cu_seqlens=cu_seqlens)
    return out[0], states


def as_vllm(*, output_final_state: bool, **fields):
    assert output_final_state
    return v_first(GDNInputs, **fields)


def as_sglang(kind) -> Callable[..., Any]:
    """A kernel that overwrites its arguments."""

    def function(*, initial_state, initial_state_indices, **fields):
        assert initial_state_indices.tolist() == list(range(len(initial_state)))
        out, states = v_first(kind, initial_state, **fields)
        initial_state.copy_(states)
        return (out, None, None) if kind is GDNInputs else fields["v"].copy_(out)

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


def test_vllm_gets_no_empty_sequence_of_ssd():
    """It has no last chunk, from which vLLM would take its final state."""
    with pytest.raises(UnsupportedError, match="vllm: no empty sequences"):
        _sequence_chunks(SSDCase(lengths=(0, 3)).inputs())


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Of the published kernel."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (folder / "softplus.py").write_text("softplus = 'of the checkout'\n")
    (folder / "ssd_fused5.py").write_text(KERNEL)
    return tmp_path


def kernel_file(checkout: Path) -> Path:
    return checkout / "mamba_ssm/ops/triton/ssd_fused5.py"


SGLANG = "sglang/kernels/ops/attention/fla"
SERVERS = {
    "vllm/third_party/flash_linear_attention/ops": dict(chunk_gated_delta_rule=as_vllm),
    f"{SGLANG}/chunk": dict(chunk_gated_delta_rule=as_sglang(GDNInputs)),
    f"{SGLANG}/kda": dict(chunk_kda=as_sglang(KDAInputs)),
}


@pytest.fixture
def servers(monkeypatch, tmp_path) -> Iterator[None]:
    """Packages that patch others when they are imported, so that they may not be run, around
    modules with stand-ins.
    """
    for path, functions in SERVERS.items():
        (tmp_path / path).mkdir(parents=True)
        for parent in list(Path(path).parents)[:-1]:
            patches = parent.name in ("vllm", "sglang", "kernels", "ops")
            text = "raise RuntimeError('it patches others')" if patches else ""
            (tmp_path / parent / "__init__.py").write_text(text)
        put(monkeypatch, path.replace("/", "."), **functions)
    modules = {path.replace("/", ".") for path in SERVERS}
    for name in of_servers() - modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in of_servers():
        del sys.modules[name]


def of_servers() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")}


@pytest.fixture
def calls() -> Calls:
    """The arguments of calls of the stand-ins."""
    return []


@pytest.fixture
def load(calls: Calls, checkout: Path, servers: None, monkeypatch) -> Load:
    """A library's implementation by its name and operator.  The adapter must set fla's variable
    before it imports its operator.
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
        "flashinfer.gdn_decode": dict(
            gated_delta_rule_decode_pretranspose=as_flashinfer_mtp(calls)
        ),
        "flash_kda": dict(fwd=as_flash_kda),
        "cudnn.linear_attention.ops": dict(kimi_delta_attention=as_cudnn),
    }.items():
        put(monkeypatch, name, **members)

    def import_module(module: str) -> ModuleType:
        if module == FLA:
            assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
            functions = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
            put(monkeypatch, module, **dict.fromkeys(functions, as_fla(calls)))
        return sys.modules[module]

    def load(name: str, operator: str = "ssd") -> Implementation:
        word = f"published={checkout}" if name == "published" else name
        return required(resolve(operators.get(operator), word))

    monkeypatch.setattr("ssdprof.operators.fla.import_module", import_module)
    return load


# --- laws of all

EXACT = Precision()
OF_BF16 = Precision(state_dtype=BF16)
OF_FP16 = Precision(state_dtype=FP16)
RELAXED = Precision(intermediates="relaxed")
RELAXED_FP16 = Precision(intermediates="relaxed", state_dtype=FP16)
PACKED = dict(lengths=(3, 0, 4))
STATELESS = dict(initial_states=False)
UNIT = replace(of_kda(), k=F.normalize(of_kda().k.float(), dim=-1).to(BF16), use_qk_l2norm=False)
TERMS: list[tuple[str, Any, Precision]] = [
    *((name, of_gdn(), OF_FP16 if name == "fla" else EXACT) for name in GDN_LIBRARIES),
    *(
        (name, of_gdn(packed=True), OF_FP16 if name == "fla" else EXACT)
        for name in GDN_LIBRARIES[:-1]
    ),
    *((name, of_gdn(packed=packed), OF_FP16) for name, packed in product(SERVING, (False, True))),
    *(("flash_kda", of_kda(**form), OF_BF16) for form in ({}, PACKED)),
    *(("cudnn", of_kda(**form), EXACT) for form in ({}, PACKED, STATELESS)),
    ("cudnn", UNIT, EXACT),
    *(("sglang", of_kda(**form), OF_BF16) for form in ({}, PACKED, STATELESS)),
]


def agrees(implementation: Implementation, inputs, precision: Precision):
    """Twice: a call leaves its inputs as they were."""
    expected = RECURRENCES[inputs.operator](inputs)
    for _ in range(2):
        out, states = implementation.run(inputs, precision)
        assert out.shape == inputs.values.shape
        rtol = max(1e-4, torch.finfo(out.dtype).eps)
        torch.testing.assert_close(out.double(), expected.out.double(), rtol=rtol, atol=1e-4)
        torch.testing.assert_close(
            states.double(), expected.final_states.double(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(("name", "inputs", "precision"), TERMS)
def test_a_librarys_terms_are_met(name, inputs, precision: Precision, load: Load, calls: Calls):
    """fla and FlashQLA get our tensors as they are."""
    implementation = load(name, inputs.operator)
    agrees(implementation, inputs, precision)
    assert len(calls) == (2 if name in GDN_LIBRARIES else 0)
    if name in GDN_LIBRARIES[:3]:
        assert calls[0] == {"q": inputs.q, "output_final_state": True}
    assert implementation.plan(inputs, precision).reason


PACK = dict(cu_seqlens=torch.tensor([0, 8]))
ODD = dict(chunk_size=24)
REFUSED: list[tuple[str, Any, Precision, str]] = [
    ("mamba_ssm", {}, RELAXED, "exact intermediates only"),
    ("mamba_ssm", {}, EXACT, "this version"),
    ("mamba_ssm", dict(dtype=FP32), EXACT, "fp32 inputs are multiplied in tf32, which is relaxed"),
    ("mamba_ssm", PACK, OF_BF16, "packed sequence"),
    ("mamba_ssm", replace(far(8, 32), z=far(8, 2**29).x), OF_FP16, "32-bit offsets"),
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
    ("flash_qla", of_gdn(key_dim=64, value_dim=64), EXACT, "K and V are 128, not 64 and 64"),
    ("flashinfer", of_gdn(key_dim=64, value_dim=64), EXACT, "K and V are 128, not 64 and 64"),
    ("flash_qla", of_gdn(dtype=FP32), EXACT, "fp16 and bf16 inputs only"),
    ("flashinfer", of_gdn(), OF_FP16, "states stay in fp32"),
    ("flashinfer_mtp", of_gdn(packed=True), EXACT, "no packed sequences"),
    ("flashinfer_mtp", of_gdn(length=1, dtype=FP16), EXACT, "one token in bf16 only"),
    ("flash_kda", of_kda(), EXACT, "states that enter chunks are bf16"),
    ("flash_kda", of_kda(key_dim=64), OF_BF16, "K and V are 128"),
    ("flash_kda", of_kda(dtype=FP16), OF_BF16, "bf16 inputs"),
    ("flash_kda", of_kda(values_per_key=2), OF_BF16, "as many key heads"),
    ("cudnn", of_kda(dtype=FP16), EXACT, "bf16 inputs only"),
    ("cudnn", of_kda(key_dim=64), EXACT, "K and V are 128"),
    ("cudnn", replace(of_kda(), g=torch.full_like(of_kda().g, -torch.inf)), EXACT, "g is finite"),
    ("cudnn", replace(of_kda(), beta=2 * of_kda().beta), EXACT, "beta between 0 and 1"),
    ("cudnn", replace(of_kda(), beta=-of_kda().beta), EXACT, "beta between 0 and 1"),
    ("cudnn", replace(UNIT, k=2 * UNIT.k), EXACT, "keys of at most length 1"),
    ("sglang", of_kda(values_per_key=2), OF_BF16, "as many key heads"),
    ("sglang", of_kda(dtype=FP32), OF_BF16, "fp16 and bf16 inputs only"),
    ("sglang", replace(of_kda(), g=-of_kda().g), OF_BF16, "g is finite and at most 0"),
]


@pytest.mark.parametrize(("name", "call", "precision", "words"), REFUSED)
def test_what_they_do_not_do(name, call, precision: Precision, words, load: Load, calls: Calls):
    inputs = of_ssd(**call) if isinstance(call, dict) else call
    implementation = load(name, inputs.operator)
    for function in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"^{name}: .*{words}"):
            function(inputs, precision)
    assert not calls


@pytest.mark.parametrize(
    "name", ["mamba_ssm", "fla", "flash_qla", "flashinfer", "flashinfer_mtp", "vllm"]
)
def test_a_library_that_is_not_there_is_named(name, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    monkeypatch.setitem(sys.modules, name.removesuffix("_mtp"), None)
    with pytest.raises(MissingCapabilityError, match=f"{name} cannot be imported"):
        required(resolve(operators.get("ssd" if name == "mamba_ssm" else "gdn"), name))


def test_a_library_from_a_checkout_has_no_version():
    assert package_version("torch") == metadata.version("torch")
    assert package_version("no-such-package") == "unknown"


# --- mamba_ssm


def test_mamba_ssm_is_called_as_its_users_call_it(load: Load, calls: Calls):
    library = load("mamba_ssm")
    assert (library.name, library.version) == ("mamba_ssm", "9.9")
    inputs = of_ssd(D=torch.ones(2), dt_bias=torch.ones(2), dt_softplus=True, dt_limit=(0.0, 1.0))
    out, states = library.run(inputs, OF_BF16)
    assert all(getattr(inputs, name) is value for name, value in calls[0].items())
    assert out is inputs.x
    assert bool((states == 1).all())
    assert [str(precision) for precision in own_precisions(library, "bf16", ())] == [
        "exact, bf16 states"
    ]
    assert [
        str(precision) for precision in own_precisions(load("selective_state_update"), "bf16", ())
    ] == ["exact, fp32 states"]


def test_a_version_of_mamba_ssm_that_passes_any_states_also_runs_with_fp32_states(
    load: Load, monkeypatch
):
    asked = []

    def forward(*arguments, state_dtype=None, **_):
        asked.append(state_dtype)
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    monkeypatch.setattr(
        sys.modules[f"{TRITON}.ssd_combined"], "_mamba_chunk_scan_combined_fwd", forward
    )
    library = load("mamba_ssm")
    precisions = {
        dtype: [str(precision) for precision in own_precisions(library, dtype, ())]
        for dtype in ("fp16", "fp32")
    }
    assert precisions == {
        "fp16": ["exact, fp16 states", "exact, fp32 states"],
        "fp32": ["relaxed, fp32 states"],
    }
    for states in (FP16, FP32):
        library.run(of_ssd(FP16), Precision(state_dtype=states))
    assert asked == [None, FP32]


# --- the published kernel


def test_the_published_kernel_is_loaded_by_path_beside_an_installed_library(
    load: Load, monkeypatch
):
    softplus = f"{TRITON}.softplus"
    load("published")
    assert softplus not in sys.modules, "where nothing is installed, nothing is"
    installed = ModuleType(softplus)
    monkeypatch.setitem(sys.modules, softplus, installed)
    run = load("published").run
    assert sys.modules[softplus] is installed
    beside, options = run(of_ssd(FP16), EXACT).final_states
    assert beside == "of the checkout"
    assert options["chunk_size"] == 128


@pytest.mark.parametrize("states", [FP32, FP16])
@pytest.mark.parametrize("intermediates", ["exact", "relaxed"])
def test_the_published_kernel_runs_with_all_four_pairs_of_intermediates_and_states(
    load: Load, intermediates: Literal["exact", "relaxed"], states
):
    precision = Precision(intermediates=intermediates, state_dtype=states)
    implementation = load("published")
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


def test_the_published_kernel_is_named_by_its_content(checkout: Path):
    before = published_version(checkout)
    kernel_file(checkout).write_text(KERNEL + "\n")
    assert before.startswith("ssd_fused5.py, sha256 ")
    assert published_version(checkout) != before


def test_libraries_line_up_before_ours_at_their_own_precisions(load: Load):
    of = (resolve(SSD, "unfused"), load("published"))
    sizes = SSD.generated.chunk_sizes

    def compared(cell: Cell) -> list[tuple[str, str]]:
        request = BenchOptions(operator="ssd", states=("fp32",), compared=of, chunk_sizes=sizes)
        assert all(bench.chunk_sizes(request, SSD, each) == sizes for each in of)
        return [
            (each.name, str(precision)) for each, precision in bench.compared(request, SSD, cell)
        ]

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


# --- libraries of GDN and KDA


@pytest.mark.parametrize(
    "gates", [dict(g=of_kda().g - 5), dict(beta=2 * of_kda().beta), dict(beta=-of_kda().beta)]
)
def test_flash_kda_refuses_gates_whose_activations_it_cannot_undo(
    gates: dict[str, torch.Tensor], load: Load
):
    with pytest.raises(UnsupportedError, match=r"^flash_kda: g is at least -5, and beta between 0"):
        load("flash_kda", "kda").run(replace(of_kda(), **gates), OF_BF16)


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_what_flashinfer_needs_is_prepared_once_and_given_up_with_the_inputs(
    name, load: Load, calls: Calls
):
    run = load(name, "gdn").run
    inputs = replace(of_gdn(), q=of_gdn().q.repeat(1, 1, 1, 2)[..., ::2])
    run(inputs, EXACT)
    run(inputs, EXACT)
    assert calls[0]["q"] is calls[1]["q"]
    first = weakref.ref(calls[0]["q"])
    run(replace(inputs, scale=2.0), EXACT)
    assert calls[2]["q"] is not calls[0]["q"]
    calls.clear()
    del inputs
    gc.collect()
    assert first() is None, "those inputs are gone"


def test_flashinfers_arguments(load: Load, calls: Calls):
    load("flashinfer", "gdn").run(of_gdn(), EXACT)
    assert calls[0]["beta"].dtype == FP32
    assert calls[0]["cu_seqlens"].tolist() == [0, 6, 12]
    assert calls[0]["backend"] == "flashinfer", "it does not choose another library"


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mtp"])
def test_copies_of_the_inputs_are_named(name, load: Load):
    """So that v and the states can be changed at their addresses, as replays read them."""
    implementation = load(name, "gdn")
    inputs = of_gdn()
    before = implementation.run(inputs, EXACT)
    for tensor in (inputs.v, *implementation.copies(inputs)):
        tensor.mul_(2)
    after = implementation.run(inputs, EXACT)
    torch.testing.assert_close(after.out, before.out * 2, rtol=0, atol=1e-6)


def test_fla_that_may_call_other_libraries_is_not_taken(load: Load, monkeypatch):
    put(monkeypatch, FLA, chunk_gated_delta_rule=as_fla([]))
    with pytest.raises(MissingCapabilityError, match="may call other libraries"):
        load("fla", "gdn")


# --- transformers' own functions


def of_model(operator: str):
    """Inputs of 70 tokens, in two chunks."""
    if operator == "ssd":
        return a_step(70, chunk_size=64, dt_limit=(0.1, 2.0))
    kind, sizes = {"gdn": (GDNCase, dict(values_per_key=2)), "kda": (KDACase, {})}[operator]
    inputs = kind(**sizes, batch=2, seqlen=70, value_dim=32, initial_states=True).inputs()
    return replace(inputs, g=inputs.g.clamp(-20, 0))


@pytest.mark.parametrize("operator", RECURRENCES)
def test_model_is_what_transformers_computes(operator):
    model = required(resolve(operators.get(operator), "model"))
    inputs = of_model(operator)
    agrees(model, inputs, EXACT)
    assert model.version.startswith("transformers 5.")
    with pytest.raises(UnsupportedError, match=r"^model: no packed sequences"):
        packed = replace(rows(inputs, slice(1)), cu_seqlens=torch.tensor([0, inputs.length]))
        model.run(packed, EXACT)


def test_model_with_a_library_needs_that_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(MissingCapabilityError, match="transformers finds no fla here"):
        required(resolve(operators.get("kda"), "model:installed"))


# --- libraries that tune themselves


class Kernel:
    """A stand-in for a kernel that is compiled on demand.  Records its arguments and the mode of
    every call.
    """

    def __init__(self):
        self.asked: list[dict[str, Any]] = []
        self.modes: list[bool] = []

    def run(self, **arguments):
        self.asked.append(arguments)
        self.modes.append(_async_compile.active_mode.get() is not None)


def tuned(kernel: Kernel, *blocks: int) -> Autotuner:
    def plain(x, BLOCK: int):
        pass

    configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in blocks]
    tuner = triton.autotune(configs, key=["x"])(triton.jit(plain))
    assert isinstance(tuner, Autotuner)
    tuner.fn = kernel
    tuner.nargs = {"x": 7}
    tuner.cache_results = True
    module = ModuleType("tuned")
    module.tuner = tuner  # type: ignore[attr-defined]
    Tunings([module])
    return tuner


OPTIONS = {"grid": (1,), "warmup": False}


def test_what_a_tuner_will_try_is_compiled_before_side_by_side(monkeypatch):
    """An interrupted tuner can go on later.  None takes the choice of another process from the
    disk.
    """

    def interrupted(*_):
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
):
    kernel_file(checkout).write_text(TUNED)
    call = load("published").run.args[1].args[0]  # type: ignore[attr-defined]
    kernel = getclosurevars(call).nonlocals["launch"].__globals__["inner"]
    flags = torch.ones(4)
    kernel.pre_hook({"sync_atomic": flags})
    assert not flags.any()


def test_the_published_kernel_is_tuned_for_each_shape_and_layout_of_tokens(
    load: Load, checkout: Path
):
    kernel_file(checkout).write_text(TUNED)
    run = load("published").run
    sizes = [(1, 1024), (1, 2048), (2, 1024), (1, 1024, 4, 1), (1, 1024, 4, 2)]
    for size in sizes:
        assert run(of_ssd(FP16, size=size), EXACT).final_states == []
    for size in sizes:
        assert run(of_ssd(FP16, size=size), EXACT).final_states == [f"tuned for {list(size[:2])}"]


def test_mamba_ssm_is_tuned_for_short_calls_and_for_long_ones(
    load: Load, calls: Calls, monkeypatch
):
    tuner = tuned(Kernel(), 32, 64)
    put(monkeypatch, f"{TRITON}.ssd_chunk_scan", tuner=tuner)
    run = load("mamba_ssm").run
    seen = []
    for size in ((1, 8), (2, 4096), (1, 8200), (4, 4096), (1, 8)):
        run(of_ssd(FP16, size=size), OF_FP16)
        seen.append(list(tuner.cache))
        tuner.cache[len(calls)] = tuner.configs[0]
    assert seen == [[], [1], [], [3], [1, 2]]


def test_fla_calls_no_other_library_also_where_a_model_imports_it_first(monkeypatch):
    """transformers imports fla with a model's code, before this package asks for fla's kernels."""
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH")
    monkeypatch.setattr(checkpoint, "transformers", checkpoint.transformers)
    put(monkeypatch, "fla")
    assert importlib.reload(checkpoint).transformers.__version__
    assert "FLA_DISABLE_BACKEND_DISPATCH" not in os.environ, "fla has read it"
    monkeypatch.delitem(sys.modules, "fla")
    assert checkpoint.transformers.__version__
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"
