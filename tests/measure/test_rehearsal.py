"""A user's kernel that fails does so in a separate process, and the reason is reported."""

from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest
import torch
from test_guard import gdn, ssd

from ssdprof import operators
from ssdprof.core.base import REPEATS
from ssdprof.environment import child
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure import isolate, probes
from ssdprof.measure.isolate import IsolatedFirstCall, try_call
from ssdprof.measure.laws import LAWS
from ssdprof.operators.implementations import resolve


@pytest.fixture(autouse=True)
def kernels(users_folder: Path, small_guards: None):
    copy(Path(__file__).with_name("bad_kernels.py"), users_folder)


def named(function: str, operator: str = "ssd") -> Implementation:
    return resolve(operators.get(operator), f"bad_kernels:{function}")


def verdict(function: str, inputs, limit_s: float = 60.0) -> tuple[str, str]:
    """Status and reason."""
    return IsolatedFirstCall(limit_s).verdict(named(function, inputs.operator), inputs, Precision())


@pytest.mark.slow
@pytest.mark.parametrize("make", [ssd, gdn])
def test_a_good_kernel_passes(make):
    assert verdict("good", make()) == ("ran", "")


OUT_OF_BOUNDS = "it writes out of bounds, behind a tensor of shape (1, 12, 2, 16) that it allocates"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raising", "ZeroDivisionError: seven by zero"),
        ("refusing", "refusing: not on a Tuesday"),
        ("leaving", "RuntimeError: bad_kernels:leaving raised SystemExit: 5"),
        ("changing", "it changes its inputs: x"),
        ("beyond_its_output", OUT_OF_BOUNDS),
        ("beyond_its_input", "it writes out of bounds, before its inputs x, B, C"),
        ("incomplete", "it leaves 64 elements of out unwritten"),
        (
            "misshapen",
            (
                "out must be torch.bfloat16 of shape (1, 12, 2, 16) on cpu, not torch.bfloat16 of "
                "shape (1, 2,"
            ),
        ),
        ("too_wide", "not torch.float64 of shape (1, 12, 2, 16) on cpu"),
        ("half_states", "must be torch.float32 of shape (1, 2, 16, 16) on cpu, not torch.float16"),
        ("alone", "TypeError: bad_kernels:alone must return (out, final_states), not Tensor"),
        ("not_a_tensor", "must return tensors, and final_states is NoneType"),
    ],
)
def test_what_a_bad_kernel_does_is_told(function, reason):
    found = try_call(named(function, "ssd"), ssd(), Precision())
    assert found[0] == ("refused" if function == "refusing" else "failed")
    assert reason in found[1]


def test_nan_that_comes_from_the_inputs_is_not_called_unwritten():
    inputs = ssd()
    inputs.x[0, 5] = torch.nan
    assert try_call(named("good", "ssd"), inputs, Precision()) == ("ran", "")


def test_what_ends_the_other_process_is_told():
    reason = "its first call ended its process by SIGSEGV"
    assert verdict("crashing", ssd()) == ("failed", reason)
    for output, words in ("", ""), ("a\nNo folder\n", ": No folder"):
        assert isolate.ending((7, output), 1.0) == f"ended its process with exit code 7{words}"


def test_a_kernel_that_hangs_is_stopped_and_leaves_no_process():
    assert verdict("hanging", ssd(), 0.1) == ("failed", "its first call was stopped after 0.1 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "limit_s", "detail", "later"),
    [
        ("crashing_for_large", 60.0, "its call 2 ended its process by SIGSEGV", ("yes", "")),
        (
            "hanging_for_large",
            3.0,
            "its call 2 was stopped after 3 s",
            ("not tested", "law 'causality': its call 2 was stopped after 3 s"),
        ),
    ],
)
def test_a_call_that_ends_its_process_breaks_its_law_and_is_kept(
    function, limit_s, detail, later, monkeypatch
):
    laws = (REPEATS, "causality", "linearity")
    monkeypatch.setattr(probes, "laws_of", lambda _trial: {law: LAWS[law] for law in laws})
    kept = []

    def keep(law, inputs, output):
        kept.append((law, bool(inputs.x.max() > 100), output))

    prober = probes.Prober(IsolatedFirstCall(limit_s))
    results = prober.probe(named(function), ssd(), Precision(), keep=keep)
    found = {probe.name: (probe.holds, probe.detail) for probe in results}
    assert found == {
        REPEATS: ("yes", ""), "causality": ("no", detail), "linearity": later
    }  # fmt: skip
    assert kept == [("causality", True, None)]


def test_the_other_process_finds_the_memory_that_torch_only_caches(monkeypatch):
    done = []
    inputs = ssd()
    monkeypatch.setattr(SSDInputs, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("released"))

    def run(_command: list[str], **_options) -> tuple[int, str]:
        done.append("run")
        return 1, ""

    monkeypatch.setattr(child, "run", run)
    assert verdict("good", inputs)[0] == "failed"
    assert done == ["released", "run"]


def test_each_precision_and_form_of_inputs_has_one_first_call(monkeypatch):
    made = []

    def tried(one: Implementation, _inputs, precision: Precision, _limit_s: float):
        made.append((one.name, str(precision)))
        return "failed" if one.name.endswith("nan") else "ran", "seen before"

    monkeypatch.setattr(isolate, "_tried", tried)
    isolated = IsolatedFirstCall()
    given = ssd()
    for _ in range(2):
        isolated.verdict(named("good"), given, Precision())
        isolated.verdict(named("good"), replace(given, x=given.x + 1), Precision())  # contiguous
        isolated.verdict(named("good"), given, Precision(state_dtype=torch.bfloat16))
        isolated.verdict(named("good"), replace(given, chunk_size=64), Precision())
        assert isolated.verdict(named("nan"), given, Precision()) == ("failed", "seen before")
    assert len(made) == 5


def test_inputs_reach_the_other_process_as_they_are_and_neither_a_secret_nor_a_stray_module_does(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "typing.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "telling.py").write_text(
        "import os\n"
        "def kernel(inputs):\n"
        "    told = inputs.B.stride(), inputs.dt_limit, inputs.x.double().sum().item(), "
        "os.getenv('HF_TOKEN') or os.getenv('WANDB_API_KEY')\n"
        "    raise ValueError(str(told))\n"
    )
    given = ssd()
    assert torch.isfinite(given.x).all()
    telling = resolve(operators.get("ssd"), "telling:kernel")
    told = IsolatedFirstCall().verdict(telling, given, Precision())
    expected = (given.B.stride(), given.dt_limit, given.x.double().sum().item(), None)
    assert told == ("failed", f"ValueError: {expected} (telling.py:4 in kernel)"), (
        "from the user's own file on"
    )
