"""The process that ncu watches, without ncu and without a GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernels.ssd_cases import Case
from stalls.captures import store_layers

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.stall_records import Launched
from ssdprof.stalls import target


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order."""
    seen: list[str] = []
    real = kernels.get("ssd", "fused")

    def run(inputs: object, precision: object) -> object:
        seen.append("run")
        return real.run(inputs, precision)

    monkeypatch.setattr(target.kernels, "get", lambda *_: SimpleNamespace(run=run, plan=real.plan))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return store_layers(tmp_path / "captures", Case(seqlen=32, dtype=torch.bfloat16))


def test_one_call_is_profiled_and_those_before_it_are_not(
    folder: Path, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "launched.json"
    words = [str(folder), "--layer", "5", "--seqlen", "32", "--implementation", "fused", "--launched", str(out)]
    monkeypatch.setattr("sys.argv", ["target", *words])
    monkeypatch.setattr(target, "DEVICE", "cpu")
    target.main()
    assert calls == ["run", "run", "wait", "push ssdprof", "run", "wait", "pop"]
    launched = Launched.model_validate_json(out.read_text())
    assert (launched.implementation, launched.variant) == ("fused", "interpreter")


def test_a_layer_that_is_not_there_ends_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(folder), "--layer", "4", "--seqlen", "32", "--implementation", "fused", "--launched", "x"]
    monkeypatch.setattr("sys.argv", ["target", *words])
    monkeypatch.setattr(target, "DEVICE", "cpu")
    with pytest.raises(SystemExit, match=r"Error: .* holds no layer 4 of 32 tokens"):
        target.main()


def test_the_tensors_are_those_of_the_layer(folder: Path) -> None:
    inputs = target.load(folder, 7, 32, "cpu")
    assert torch.equal(inputs.x, Case(seqlen=32, dtype=torch.bfloat16).inputs().x)
    with pytest.raises(BadInputError, match="no layer 7 of 64 tokens"):
        target.load(folder, 7, 64, "cpu")


def test_nothing_is_left_of_the_warm_up(folder: Path, calls: list[str]) -> None:
    inputs = target.load(folder, 2, 32, "cpu")
    launched = target.warm_up("fused", inputs, Precision())
    assert calls == ["run", "run"]
    assert launched.launch_count == 0  # Triton's interpreter launches nothing
