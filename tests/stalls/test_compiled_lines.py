"""The compiler's lines of our kernels exist, and with callers' lines each line belongs to the
instruction's stage.

The expected stages do not come from the tested line table.  The compiler gives the PTX line of each
instruction, and remarks in the PTX list the calls that led to it.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from stalls.test_recorded import ALGORITHM

from ssdprof.stalls.attribute import UNKNOWN, LineStage, SourceFiles

pytestmark = pytest.mark.compiler

TESTS = Path(__file__).parent.parent
KERNELS = (
    "_chunk_cumsum_kernel",
    "_chunk_state_kernel",
    "_state_passing_kernel",
    "_bmm_chunk_kernel",
    "_chunk_scan_kernel",
    "_fused_kernel",
    "_fused_hopper_kernel",
    "_gdn_qk_l2norm_kernel",
    "_gdn_gate_cumsum_kernel",
    "_gdn_scaled_dot_kkt_kernel",
    "_gdn_solve_tril_kernel",
    "_gdn_recompute_w_u_kernel",
    "_gdn_chunk_state_kernel",
    "_gdn_chunk_output_kernel",
    "_gdn_factors_kernel",
    "_gdn_scan_kernel",
    "_gdn_recurrent_kernel",
)


@dataclass(frozen=True)
class Compiled:
    """plain, called: places of the instructions' lines, without and with call sites.
    stages: the instructions' true stages, None if the PTX does not have it.
    """

    instructions: tuple[list[str], list[str]]
    lines: list[tuple[str, int]]  # file and line of each instruction of the plain machine code
    plain: list[LineStage]
    called: list[LineStage]
    stages: list[str | None]


def truth(
    ptx: list[str], number: int, sources: SourceFiles, paths: dict[str, list[str]]
) -> str | None:
    """The stage of the innermost call with a stage, among the calls that led to a line of the
    PTX.
    """
    while number > 0 and not ptx[number - 1].lstrip().startswith(".loc"):
        number -= 1
    for name, line in re.findall(r"([\w.]+\.py):(\d+):\d+", ptx[number - 1]):
        for path in paths.get(name, ()):
            stage = sources.stage_of(path, int(line)).stage
            if stage not in (None, UNKNOWN):
                return stage
    return None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    path = os.pathsep.join([str(TESTS / "kernels"), str(TESTS.parent)])
    cache = str(tmp_path_factory.mktemp("cache"))
    environ = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    script = str(Path(__file__).parent / "compile_lines.py")
    result = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name: _compiled(fields) for name, fields in json.loads(result.stdout).items()}


def _compiled(fields: dict[str, list[tuple[str, str, int]]]) -> Compiled:
    ptx = str(fields["ptx"]).splitlines()
    files = [found[1] for line in ptx if (found := re.match(r'\s*\.file\s+\d+ "([^"]+)"', line))]
    sources = SourceFiles({file: Path(file).read_text() for file in files})
    paths = {}
    for file in files:
        paths.setdefault(Path(file).name, []).append(file)
    return Compiled(
        instructions=([row[0] for row in fields["plain"]], [row[0] for row in fields["called"]]),
        lines=[(file, line) for _, file, line in fields["plain"]],
        plain=[sources.stage_of(file, line) for _, file, line in fields["plain"]],
        called=[sources.stage_of(file, line) for _, file, line in fields["called"]],
        stages=[truth(ptx, int(row[1]), sources, paths) for row in fields["inlined"]],
    )


def test_every_kernel_was_compiled(compiled: dict[str, Compiled]):
    assert set(compiled) == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_every_line_has_a_stage_or_belongs_to_its_caller(compiled: dict[str, Compiled], name: str):
    found = compiled[name]
    lost = {
        line for line, place in zip(found.lines, found.plain, strict=True) if place.stage == UNKNOWN
    }
    assert not lost


@pytest.mark.parametrize("name", KERNELS)
def test_naming_call_sites_changes_no_instruction(compiled: dict[str, Compiled], name: str):
    plain, called = compiled[name].instructions
    assert plain == called


@pytest.mark.parametrize("name", KERNELS)
def test_every_instruction_is_filed_under_a_line_of_its_own_stage(
    compiled: dict[str, Compiled], name: str
):
    found = compiled[name]
    known = [
        (place.stage, stage)
        for place, stage in zip(found.called, found.stages, strict=True)
        if stage
    ]
    # for a branch, ptxas may give a line and a PTX line that disagree
    assert sum(one != stage for one, stage in known) < 0.002 * len(known)
    # if instructions of two lines were merged, the PTX has line 0, and the compiler keeps the line
    # before it
    assert len(known) > 0.85 * len(found.called)
    # instructions without a stage come from the compiler, with few exceptions
    lost = [place for place in found.called if place.stage is None and not place.header]
    assert len(lost) < 0.01 * len(found.called)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *(
            (name, ALGORITHM - {"chunk_state"})
            for name in ("_fused_kernel", "_fused_hopper_kernel")
        ),
        (
            "_gdn_factors_kernel",
            {"setup", "gate_cumsum", "scaled_dot_kkt", "solve_tril", "state_factor", "out_factor"},
        ),
        (
            "_gdn_scan_kernel",
            {"setup", "warm_up", "chunk_state.residual", "chunk_state.update", "chunk_output"},
        ),
        ("_gdn_recurrent_kernel", {"setup", "setup.store", "recurrence"}),
    ],
)
def test_every_stage_that_a_kernel_names_is_compiled_somewhere(
    compiled: dict[str, Compiled], name: str, stages: set[str]
):
    assert stages <= {place.stage for place in compiled[name].called}
