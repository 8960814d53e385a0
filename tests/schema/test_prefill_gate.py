"""The gate of prefill times: the rows that it judges, the values that break it, and the exit of `ssdprof prefill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report.make_prefill import FUSED, UNFUSED, found, length, report, speedup
from typer.testing import CliRunner

from ssdprof import settings
from ssdprof.cli import app
from ssdprof.errors import BadInputError
from ssdprof.pipeline import prefill as job
from ssdprof.report import prefill_document
from ssdprof.schema import Gates
from ssdprof.schema.prefill import LeftOutLength, PrefillCase, PrefillReport
from ssdprof.schema.prefill_rows import broken_gates

PLACE = "prefill, bundled surroundings, 1,024 tokens"
ROW = f"{PLACE}, fused, exact, fp32 states"


def gated(least: float, *cases: PrefillCase, **fields: Any) -> PrefillReport:
    return report(prefill=found(*cases, **fields), gates=Gates(min_speedup=least))


def broken(*args: Any, **fields: Any) -> list[str]:
    return [str(one) for one in broken_gates(gated(*args, **fields))]


def test_the_fused_implementation_has_to_reach_the_speedup_with_each_surroundings() -> None:
    assert broken(2.0, UNFUSED, FUSED) == []
    assert broken(2.1, UNFUSED, FUSED) == [f"min-speedup 2.1: {ROW}: 2x over unfused"]
    own = FUSED.model_copy(update={"surroundings": "model", "speedup": speedup(1.1, None)})
    base = UNFUSED.model_copy(update={"surroundings": "model"})
    assert broken(2.0, UNFUSED, FUSED, base, own) == [
        f"min-speedup 2: {ROW.replace('bundled', 'model')}: 1.1x over unfused"
    ]
    assert broken_gates(report()) == ()


def test_another_library_is_not_judged() -> None:
    library = FUSED.model_copy(update={"implementation": "mamba_ssm", "version": "2.3", "speedup": speedup(0.5, None)})
    assert broken(2.0, UNFUSED, FUSED, library) == []


def test_what_was_not_timed_does_not_hold() -> None:
    late = FUSED.model_copy(update={"call": None, "speedup": None})
    assert broken(1.0, UNFUSED, late) == [f"min-speedup 1: {ROW}: not timed"]
    assert broken(1.0, FUSED.model_copy(update={"speedup": None})) == [
        f"min-speedup 1: {ROW}: its baseline was not timed"
    ]
    refused = late.model_copy(update={"status": "refused", "reason": "no such head"})
    longer = length(UNFUSED, refused).model_copy(update={"seqlen": 2048})
    assert broken(1.0, lengths=(length(UNFUSED, FUSED), longer)) == [
        f"min-speedup 1: {ROW.replace('1,024', '2,048')}: refused: no such head"
    ]
    spent = LeftOutLength(seqlen=131_072, surroundings="model", reason="spent")
    peers = spent.model_copy(update={"implementations": ("mamba_ssm",)})
    assert broken(1.0, UNFUSED, FUSED, left_out=(spent, peers)) == [
        "min-speedup 1: prefill, model surroundings, 131,072 tokens, fused: left out: spent"
    ]
    assert broken(1.0, UNFUSED) == ["min-speedup 1: no case passed that it could judge"]


def test_the_report_says_so() -> None:
    held = prefill_document.compose(gated(2.0, UNFUSED, FUSED))
    assert held.verdict[0] == "PASSED: every prefill of fused holds min-speedup 2."
    assert not held.failed
    failed = prefill_document.compose(gated(2.1, UNFUSED, FUSED))
    assert failed.verdict[0] == f"FAILED: min-speedup 2.1: {ROW}: 2x over unfused."
    assert failed.failed
    assert not prefill_document.compose(report()).verdict[0].startswith("PASSED")


def command(*words: str) -> tuple[int, str]:
    """Exit code and stderr of `ssdprof prefill demo`."""
    result = CliRunner().invoke(app, ["prefill", "demo", "--seq", "1k", *words], catch_exceptions=False)
    return result.exit_code, " ".join(result.stderr.split())


@pytest.fixture
def timed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fused is twice as fast as unfused, on any machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssdprof.environment.toolchain.require_gpu", lambda *_: None)
    monkeypatch.setattr(job, "time_prefills", lambda asked, *_: report(gates=asked.gates))


@pytest.mark.usefixtures("timed_before")
def test_the_command_fails_by_the_option_and_by_the_settings() -> None:
    assert command() == (0, "")
    code, said = command("--min-speedup", "2.1")
    assert (code, said) == (1, f"GATE FAILED: min-speedup 2.1: {ROW}: 2x over unfused")
    Path("ssdprof.toml").write_text("[prefill]\nmin-speedup = 2.5\n")
    code, said = command()
    assert (code, said) == (1, f"GATE FAILED: min-speedup 2.5: {ROW}: 2x over unfused")
    assert command("--min-speedup", "2")[0] == 0
    Path("ssdprof.toml").write_text("[gates]\nmin-speedup = 9\n")
    assert command()[0] == 0, "the gates of the operators are not those of the model"


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "ssdprof.toml"
    for text, complaint in (("min-sped = 1", "unknown key prefill.min-sped"), ("min-speedup = -1", "prefill.min-spee")):
        file.write_text(f"[prefill]\n{text}\n")
        with pytest.raises(BadInputError, match=complaint):
            settings.prefill_gates(file, None)
