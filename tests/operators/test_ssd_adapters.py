"""Adapters of libraries that are not installed here: stand-ins replace them."""

from __future__ import annotations

import sys
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import triton
from fakes import CELL
from torch.nn import functional as F
from triton.runtime import Autotuner, _async_compile

from ssdprof.core.base import EXACT_FP32, PrecisionRecord
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs.request import BenchRequest
from ssdprof.kernels.adapters import Tunings, span
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.kernels.ssd.adapters import load_mamba_ssm, load_published, published_version
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators.generate import Cell
from ssdprof.operators.implementations import own_precisions, required, resolve
from ssdprof.operators.ssd import CHUNK_SIZES
from ssdprof.operators.ssd import OPERATOR as SSD

SOFTPLUS = "mamba_ssm.ops.triton.softplus"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def inputs(dtype: torch.dtype = BF16, **fields: Any) -> SSDInputs:
    x, B = torch.zeros(1, 8, 2, 16, dtype=dtype), torch.zeros(1, 8, 1, 16, dtype=dtype)
    made: dict[str, Any] = {"x": x, "dt": x[..., 0], "A": -torch.ones(2), "B": B, "C": B, "chunk_size": 128}
    return SSDInputs(**(made | fields))


def far(rows: int, stride: int) -> SSDInputs:
    """More than 2^31 elements from the first to the last one, on the meta device."""
    x = torch.empty_strided((1, rows, 2, 16), (0, stride, 16, 1), dtype=FP16, device="meta")
    B = torch.empty(1, rows, 1, 16, dtype=FP16, device="meta")
    return inputs(x=x, dt=x[..., 0], A=torch.empty(2, device="meta"), B=B, C=B)


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Installs a module of this name, and its package with a version."""
    package, module = ModuleType("mamba_ssm"), ModuleType(f"mamba_ssm.ops.triton.{name}")
    vars(package).update(__version__="9.9")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of calls of a stand-in for mamba_ssm."""
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(
        *arguments: Any, D: Any, z: Any, dt_bias: Any, initial_states: Any, dt_softplus: bool, dt_limit: Any
    ) -> Any:
        options = {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
        made.append((arguments, options | {"dt_softplus": dt_softplus, "dt_limit": dt_limit}))
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    put(monkeypatch, "ssd_combined", _mamba_chunk_scan_combined_fwd=forward)
    return made


def test_mamba_ssm_is_called_as_its_users_call_it(calls: list[Any]) -> None:
    peer = resolve(SSD, "mamba_ssm")
    assert (peer.name, peer.version) == ("mamba_ssm", "9.9")
    own = {"D": torch.ones(2), "z": None, "dt_bias": torch.ones(2), "initial_states": None}
    own |= {"dt_softplus": True, "dt_limit": (0.0, 1.0)}
    given = inputs(**own)
    out, states = peer.run(given, Precision(state_dtype=torch.bfloat16))
    ((x, dt, A, B, C, chunk_size), options) = calls[0]
    assert (x is given.x, dt is given.dt, A is given.A, B is given.B, C is given.C) == (True,) * 5
    assert chunk_size == 128
    assert all(options[name] is value for name, value in own.items())
    assert out is given.x
    assert bool((states == 1).all())
    assert [str(precision) for precision in own_precisions(peer, "bf16", ())] == ["exact, bf16 states"]


def test_a_version_of_mamba_ssm_that_passes_any_states_also_runs_with_fp32_states(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def forward(*arguments: Any, state_dtype: Any = None, **_: Any) -> Any:
        asked.append(state_dtype)
        return arguments[0], None, None, None, None, torch.ones(1, 2, 16, 16)

    module: Any = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    monkeypatch.setattr(module, "_mamba_chunk_scan_combined_fwd", forward)
    peer = resolve(SSD, "mamba_ssm")
    found = {dtype: [str(one) for one in own_precisions(peer, dtype, ())] for dtype in ("fp16", "fp32")}
    assert found == {"fp16": ["exact, fp16 states", "exact, fp32 states"], "fp32": ["exact, fp32 states"]}
    for states in (torch.float16, torch.float32):
        peer.run(inputs(torch.float16), Precision(state_dtype=states))
    assert asked == [None, torch.float32]
    assert not calls


KERNEL = """
from mamba_ssm.ops.triton.softplus import softplus
def _fused5_ssd(x, dt, A, B, C, D, **options):
    return x, None, None, (softplus, options), None, None
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (folder / "softplus.py").write_text("softplus = 'of the checkout'\n")
    (folder / "ssd_fused5.py").write_text(KERNEL)
    return tmp_path


def test_the_published_kernel_is_loaded_by_path_beside_an_installed_library(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_published(checkout)
    assert SOFTPLUS not in sys.modules, "where nothing is installed, nothing is"
    installed = ModuleType(SOFTPLUS)
    monkeypatch.setitem(sys.modules, SOFTPLUS, installed)
    run = load_published(checkout).run
    assert sys.modules[SOFTPLUS] is installed
    softplus, options = run(inputs(torch.float16), Precision()).final_states
    assert softplus == "of the checkout"
    assert options["chunk_size"] == 128


@pytest.mark.parametrize("states", [torch.float32, torch.float16])
@pytest.mark.parametrize("intermediates", ["exact", "relaxed"])
def test_the_published_kernel_runs_with_all_four_pairs_of_intermediates_and_states(
    checkout: Path, intermediates: Literal["exact", "relaxed"], states: torch.dtype
) -> None:
    precision = Precision(intermediates=intermediates, state_dtype=states)
    implementation = load_published(checkout)
    _, options = implementation.run(inputs(torch.float16), precision).final_states
    assert options["states_in_fp32"] is (states == torch.float32)
    assert {options[name] for name in ("cb_store_fp32", "cb_scale_fp32", "cs_acc_fp32")} == {intermediates == "exact"}
    assert options["cb_comp_fp32"] is True
    plan = implementation.plan(inputs(torch.float16), precision)
    assert plan.variant == {"exact": "high", "relaxed": "medium"}[intermediates]
    of_its_own = (intermediates == "exact") == (states == torch.float32)
    assert ("with the states of the other one" in plan.reason) is not of_its_own


RELAXED, PACK = Precision(intermediates="relaxed", state_dtype=FP16), dict(cu_seqlens=torch.tensor([0, 8]))
OF_BF16, OF_FP16 = Precision(state_dtype=BF16), Precision(state_dtype=FP16)
ODD = dict(chunk_size=24)
REFUSED: list[tuple[str, Precision, Any, str]] = [
    ("mamba_ssm", Precision(intermediates="relaxed"), {}, "exact intermediates only"),
    ("mamba_ssm", Precision(), {}, "this version"), ("mamba_ssm", OF_BF16, PACK, "packed sequence"),
    ("mamba_ssm", OF_BF16, ODD, "chunk_size must be a power of two, not 24"),
    ("mamba_ssm", OF_FP16, far(8, 2**29), "32-bit offsets"),
    ("published", OF_BF16, {}, "fp32 and fp16 states only"), ("published", OF_FP16, {}, "go with fp16 inputs"),
    ("published", RELAXED, {}, "go with fp16 inputs"), ("published", Precision(), PACK, "no packed sequences"),
    ("published", Precision(), ODD, "chunk_size must be a power of two, not 24"),
    ("published", Precision(), far(2**27, 32), "32-bit offsets"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision", "given", "words"), REFUSED)
def test_what_they_do_not_do(
    name: str, precision: Precision, given: Any, words: str, calls: list[Any], checkout: Path
) -> None:
    implementation = load_published(checkout) if name == "published" else load_mamba_ssm()
    given = inputs(**given) if isinstance(given, dict) else given
    for call in (implementation.run, implementation.plan):
        with pytest.raises(UnsupportedError, match=f"^{name}: .*{words}"):
            call(given, precision)
    assert not calls
    assert span(far(8, 2**29).x) == 7 * 2**29 + 16 + 15 + 1


def test_tries_of_a_kernel_that_counts_do_not_find_flags_of_the_try_before(checkout: Path) -> None:
    (checkout / "mamba_ssm/ops/triton/ssd_fused5.py").write_text(TUNED)
    call: Any = load_published(checkout).run.args[0]  # type: ignore[attr-defined]
    kernel = getclosurevars(call).nonlocals["launch"].__globals__["inner"]
    flags = torch.ones(4)
    kernel.pre_hook({"sync_atomic": flags})
    assert not flags.any()


def test_the_published_kernel_is_named_by_its_content(checkout: Path) -> None:
    before = published_version(checkout)
    (checkout / "mamba_ssm/ops/triton/ssd_fused5.py").write_text(KERNEL + "\n")
    assert before.startswith("ssd_fused5.py, sha256 ")
    assert published_version(checkout) != before


def of_size(batch: int, length: int, heads: int = 2, groups: int = 1) -> SSDInputs:
    x, A = torch.zeros(batch, length, heads, 16, dtype=torch.float16), -torch.ones(heads)
    B = torch.zeros(batch, length, groups, 16, dtype=torch.float16)
    return inputs(x=x, dt=x[..., 0], A=A, B=B, C=B)


def test_the_published_kernel_is_tuned_for_each_shape_and_layout_of_tokens(checkout: Path) -> None:
    (checkout / "mamba_ssm/ops/triton/ssd_fused5.py").write_text(TUNED)
    run = load_published(checkout).run
    sizes = [(1, 1024), (1, 2048), (2, 1024), (1, 1024, 4), (1, 1024, 4, 2)]
    for size in sizes:
        assert run(of_size(*size), Precision()).final_states == []
    for size in sizes:
        assert run(of_size(*size), Precision()).final_states == [f"tuned for {list(size[:2])}"]


def test_mamba_ssm_is_tuned_for_short_calls_and_for_long_ones(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tuner = tuned(Kernel(), 32, 64)
    put(monkeypatch, "ssd_chunk_scan", tuner=tuner)
    run = load_mamba_ssm().run
    seen = []
    for size in ((1, 8), (2, 4096), (1, 8200), (4, 4096), (1, 8)):
        run(of_size(*size), Precision(state_dtype=torch.float16))
        seen.append(dict(tuner.cache))
        tuner.cache[len(calls)] = tuner.configs[0]
    assert [list(known) for known in seen] == [[], [1], [], [3], [1, 2]]


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


class Kernel:
    """A stand-in for a kernel that is compiled on demand.  Records its arguments and the mode of every call."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.modes: list[bool] = []

    def run(self, **arguments: Any) -> None:
        self.asked.append(arguments)
        self.modes.append(_async_compile.active_mode.get() is not None)


def tuned(kernel: Kernel, *blocks: int) -> tuple[Tunings, Autotuner]:
    def plain(x: Any, BLOCK: int) -> None:
        pass

    configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in blocks]
    tuner = triton.autotune(configs, key=["x"])(triton.jit(plain))
    assert isinstance(tuner, Autotuner)
    tuner.fn = kernel
    module = ModuleType("tuned")
    module.tuner = tuner  # type: ignore[attr-defined]
    return Tunings([module]), tuner


def test_what_a_tuner_will_try_is_compiled_before_side_by_side() -> None:
    kernel = Kernel()
    _, tuner = tuned(kernel, 32, 64)
    tuner.nargs = {"x": 7}
    assert tuner.prune_configs({"grid": (1,), "warmup": False}) == tuner.configs
    assert [(asked["x"], asked["BLOCK"], asked["num_warps"]) for asked in kernel.asked] == [(7, 32, 8), (7, 64, 8)]
    assert all(asked["warmup"] for asked in kernel.asked)  # compiles, and launches nothing
    assert kernel.modes == [True, True]
    assert _async_compile.active_mode.get() is None


def test_a_tuner_that_is_interrupted_while_it_waits_for_compilers_can_go_on_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    kernel = Kernel()
    _, tuner = tuned(kernel, 32, 64)
    tuner.nargs = {"x": 7}
    with monkeypatch.context() as patched:
        patched.setattr(triton.AsyncCompileMode, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuner.prune_configs({"grid": (1,), "warmup": False})
    assert tuner.prune_configs({"grid": (1,), "warmup": False}) == tuner.configs
    assert kernel.modes == [True] * 4


def test_libraries_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(MissingCapabilityError, match="mamba_ssm cannot be imported"):
        required(resolve(SSD, "mamba_ssm"))
    with pytest.raises(MissingCapabilityError, match=r"there is no mamba_ssm/ops/triton/softplus\.py"):
        required(resolve(SSD, f"published={tmp_path}"))


def test_libraries_line_up_before_ours_at_their_own_precisions(checkout: Path) -> None:
    of = tuple(resolve(SSD, name) for name in ("unfused", f"published={checkout}"))

    def compared(cell: Cell, *precisions: PrecisionRecord) -> list[tuple[str, str]]:
        request = BenchRequest(
            operator=SSD, cells=(), precisions=lambda _: precisions, implementations=of, chunk_sizes=CHUNK_SIZES
        )
        assert all(request.sizes(one) == CHUNK_SIZES for one in of)
        return [(one.name, str(precision)) for one, precision in request.compared(cell)]

    assert compared(replace(CELL, dtype="fp16"), EXACT_FP32) == [
        ("published", "exact, fp32 states"),
        ("published", "exact, fp16 states"),
        ("published", "relaxed, fp32 states"),
        ("published", "relaxed, fp16 states"),
        ("unfused", "exact, fp32 states"),
    ]
    assert compared(CELL) == [("published", "exact, fp32 states")]


# --- the decoding kernel of mamba_ssm, with a stand-in that computes a step by its conventions


def step_inputs(length: int = 1, **fields: Any) -> SSDInputs:
    torch.manual_seed(0)
    B, C = torch.randn(2, 2, length, 2, 16)
    made: dict[str, Any] = dict(
        x=torch.randn(2, length, 4, 8), dt=torch.randn(2, length, 4), A=-torch.rand(4), B=B, C=C, D=torch.randn(4),
        dt_bias=torch.randn(4), dt_softplus=True, initial_states=torch.randn(2, 4, 8, 16), chunk_size=16,
    )  # fmt: skip
    return SSDInputs(**(made | fields))


def step(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False,
) -> Any:  # fmt: skip
    """state (b, h, p, n), overwritten; x, dt, z (b, h, p); A (h, p, n); B, C (b, g, n); D, dt_bias (h, p)."""
    assert A.stride()[1:] == (0, 0), "one number a head, which the kernel's fast path wants to see"
    dt = F.softplus(dt + dt_bias) if dt_softplus else dt + dt_bias
    B, C = (one.repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (B, C))
    state.mul_(torch.exp(dt[..., None] * A)).add_((dt * x)[..., None] * B[:, :, None])
    out = (state * C[:, :, None]).sum(-1) + D * x
    return out if z is None else out * F.silu(z)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    put(monkeypatch, "selective_state_update", selective_state_update=step)
    loaded = resolve(SSD, "selective_state_update")
    assert [str(precision) for precision in own_precisions(loaded, "bf16", ())] == ["exact, fp32 states"]
    return loaded


def test_a_step_is_taken_by_its_conventions_and_leaves_the_state_as_it_was(decoding: Implementation) -> None:
    given = step_inputs(z=torch.randn(2, 1, 4, 8))
    assert given.initial_states is not None
    before = given.initial_states.clone()
    for _ in range(2):
        out, states = decoding.run(given, Precision())
        expected = ssd_recurrence(given)
        torch.testing.assert_close(out.double(), expected.out.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.double(), expected.final_states.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(given.initial_states, before)
    given = replace(given, initial_states=None)  # a sequence may begin without a state
    expected = ssd_recurrence(given)
    torch.testing.assert_close(decoding.run(given, Precision())[0].double(), expected.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "precision", "words"),
    [
        (step_inputs(2), Precision(), "one token of each sequence"),
        (step_inputs(), Precision(state_dtype=torch.float16), "fp32 states only"),
        (step_inputs(dt_limit=(0.0, 1.0)), Precision(), "no dt_limit"),
    ],
)
def test_what_the_decoding_kernel_does_not_do(
    decoding: Implementation, given: SSDInputs, precision: Precision, words: str
) -> None:
    for call in (decoding.run, decoding.plan):
        with pytest.raises(UnsupportedError, match=words):
            call(given, precision)
