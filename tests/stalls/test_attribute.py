"""Samples to lines and stages, on a kernel whose samples are added up by hand."""

from dataclasses import replace

from stalls import synthetic

from ssdprof.operators.ssd.stages import STAGES
from ssdprof.stalls.attribute import attribute
from ssdprof.stalls.raw import Point, RawKernel
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import IDLE_WARPS, UNKNOWN


def stages(kernel: RawKernel) -> dict[str, int]:
    return {stage.name: stage.total for stage in attribute(kernel, Sources(kernel.sources)).stages}


def test_every_sample_goes_to_one_stage() -> None:
    assert stages(synthetic.kernel()) == {
        "loads": 38 + 10,  # with the helper after it
        "chunk_scan.current": 68 + 12,  # with the library after it
        "ahead": 2 + 20,  # the header's S2R has no instruction before it
        IDLE_WARPS: 50,
    }


def test_stages_come_in_the_order_of_the_algorithm_and_what_is_idle_last() -> None:
    found = attribute(synthetic.kernel(), Sources(synthetic.kernel().sources), STAGES).stages
    assert [(stage.name, stage.idle) for stage in found] == [
        ("loads", False), ("chunk_scan.current", False), ("ahead", True), (IDLE_WARPS, True),
    ]  # fmt: skip


def test_what_neighbours_decided_is_counted() -> None:
    assert attribute(synthetic.kernel(), Sources(synthetic.kernel().sources)).from_neighbours == 2 + 10 + 12


def test_warps_without_a_role_exist_only_where_there_are_roles() -> None:
    kernel = synthetic.kernel()
    plain = {synthetic.FILE: synthetic.SOURCE.replace("gl.warp_specialize", "gl.static_print")}
    assert stages(replace(kernel, sources=plain))["ahead"] == 2 + 50 + 20


def test_a_line_is_shown_with_its_text_and_the_hottest_first() -> None:
    lines = attribute(synthetic.kernel(), Sources(synthetic.kernel().sources)).lines
    assert sum(line.total for line in lines) == 200
    hottest = lines[0]
    assert (hottest.file, hottest.line, hottest.text) == ("kernel.py", 9, "return exp2(x)")
    assert hottest.samples == {"short_scoreboard": 60, "selected": 8}
    assert [line.total for line in lines] == sorted((line.total for line in lines), reverse=True)
    assert {line.file for line in lines} == {"kernel.py", "standard.py"}  # no folders of the machine that ran it


def test_without_line_information_instructions_stand_for_lines() -> None:
    kernel = synthetic.kernel(points=(Point(1, "", 0, "LDG R1", {"wait": 3}), Point(2, "", 0, "STG R2", {"wait": 4})))
    found = attribute(kernel, Sources({}))
    assert [(line.text, line.total) for line in found.lines] == [("STG R2", 4), ("LDG R1", 3)]
    assert [stage.name for stage in found.stages] == [UNKNOWN]
