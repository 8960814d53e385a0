"""States of decoded tokens against fp64: errors of each head, and what the commands make of
them.
"""

import math
from pathlib import Path

import pytest
import torch
from cases import rows
from command_line import DEMOS, ending, passing
from targets import OPERATORS

from ssdprof import operators
from ssdprof.core.case import Case, DecodedStates
from ssdprof.core.statistics import exponent
from ssdprof.jobs.states import errors_of_heads, head_memories, marks_of
from ssdprof.kernels import KDAInputs
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("in_empty_folder")
SMALL = "--shape 2x4x4x1 --seq 24"
SHAPES = {"ssd": "2x4x4x1", "gdn": "1/2x4x4", "kda": "1/2x4x4"}
FORMATS = """
import torch

def all(states):
    return states

def loses_a_head(states):
    return torch.where(torch.arange(states.shape[1])[:, None, None] == 1, 0.0, states)

def empty(states):
    return 0 * states

def short(states):
    return states[:, :1]

def broken(states):
    raise RuntimeError("boom")
"""


def states_of(folder: str) -> dict[str, tuple[Case, DecodedStates]]:
    found = {}
    for case in load(Path(folder))[1].cases:
        assert isinstance(case.task, DecodedStates)
        found[case.precision.removeprefix("exact, ").removesuffix(" states")] = case, case.task
    return found


@pytest.mark.parametrize(
    ("length", "step", "marks"),
    [(1, 1, (1,)), (4, 1, (1, 2, 4)), (9, 1, (1, 2, 4, 8, 9)), (9, 4, (4, 8, 9)), (2, 4, (2,))],
)
def test_errors_are_known_after_powers_of_two_of_steps(length, step, marks):
    assert marks_of(length, step) == marks


def test_errors_of_heads_are_relative_and_infinite_where_nothing_is_exact():
    exact = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]).double()
    actual = torch.tensor([[1.1, 0.9], [2.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, math.inf]])
    assert errors_of_heads(actual, exact, 0) == (0.1, 0.0, 0.0, None, None)


def test_the_exponent_of_growth_has_an_interval():
    steps = [4, 8, 16, 32]
    known = exponent(steps, [3 * step**0.5 for step in steps])
    assert known == pytest.approx((0.5, 0.5, 0.5))
    noisy = exponent(steps, [3 * step**0.5 * 1.1 ** (-1) ** step for step in (4, 8, 17, 32)])
    assert noisy.low < 0.5 < noisy.high
    assert exponent(steps[:2], [1.0, 2.0]) is None


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_format_that_loses_a_head_is_found_in_every_operator(operator):
    Path("mine.py").write_text(FORMATS)
    names = ["fp32", "bf16", "mine:all", "mine:loses_a_head", "mine:empty"]
    words = f"--shape {SHAPES[operator]} --seq 12 --decode-states {','.join(names)}"
    answer = passing(f"bench {operator} {words} --out a")
    assert "mine:loses_a_head loses 1 of 2 heads of" in answer.shown
    found = states_of("a")
    assert list(found) == names
    assert found["mine:empty"][1].lost == (1, 1)
    for name, least, most in (("fp32", 0.0, 1e-6), ("bf16", 1e-4, 1e-2)):
        _, task = found[name]
        assert task.marks == (1, 2, 4, 8, 12)
        for error in (*sum(task.state_errors, ()), *sum(task.out_errors[1:], ())):
            assert least <= error <= most
    assert found["mine:all"][1].state_errors == found["fp32"][1].state_errors
    _, losing = found["mine:loses_a_head"]
    assert losing.lost == (None, 1)
    assert [errors[1] for errors in losing.state_errors] == [1.0] * 5
    assert losing.slot_bytes is None
    assert found["bf16"][1].slot_bytes == 2 * 2 * 4 * 4


def test_memories_of_heads_are_those_of_their_mean_decay():
    """exp(-6.9) is 1/1000: after 63, 65, 16,000 and 17,000 tokens in the first channel, the slowest
    one.
    """
    g = -6.9078 / torch.tensor([63.0, 65.0, 16e3, 17e3]) * torch.tensor([[0.5], [1.5]])
    qkv = torch.ones(1, 2, 4, 8)
    gates = g[None, ..., None] * torch.arange(1, 9)
    inputs = KDAInputs(q=qkv, k=qkv, v=qkv, g=gates, beta=torch.ones(1, 2, 4))
    assert head_memories(operators.get("kda"), inputs) == (0, 1, 2, 3)


def test_a_longer_step_rounds_less_often():
    """Between steps nothing is; the last one may be shorter."""
    words = "--batch 1,2 --max-tokens 24 --decode-states bf16 --decode-step 20 --out a"
    answer = passing("bench ssd", SMALL, words)
    assert "2 x 24 is left out: it has more than 24 tokens." in answer.err
    assert "States, 2x4x4x1, bf16, decoded by 20, 1 x 24 " in answer.shown
    assert "keeps every head for 2x4x4x1, bf16, decoded by 20, 1 x 24," in answer.shown
    ((case, task),) = states_of("a").values()
    assert case.where.endswith(", decoded by 20")
    assert task.marks == (20, 24)
    for errors, least, most in (
        (task.out_errors[0], 1e-5, 5e-4),  # of the initial state alone
        (task.state_errors[0], 1e-4, 1e-2),
        (task.state_errors[1], 1e-4, 1e-2),
    ):
        assert all(error is not None and least <= error <= most for error in errors), errors


@pytest.mark.parametrize("model", DEMOS)
def test_prompts_and_stored_captures_are_decoded(model):
    words = "--layers first:1 --decode-states fp32,int8"
    passing(f"run {model} --seq 12 --batch 2", words, "--save-captures --out a")
    found = states_of("a")
    assert [case.name for case, _ in found.values()] == [
        f"layer 0, decoded, 2 x 12 tokens, recurrent, exact, {name} states" for name in found
    ]
    assert all(case.inputs for case, _ in found.values())
    passing("run a/captures", words, "--out b")
    assert [task for _, task in states_of("b").values()] == [task for _, task in found.values()]
    answer = ending(2, "accuracy a")
    assert "It holds states of decoded tokens" in answer.err


def test_an_interrupted_run_goes_on_with_the_other_formats():
    words = f"bench ssd {SMALL} --decode-states fp32,bf16 --out a"
    passing(words)
    file = Path("a/cases.0.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith('{"case"'))
    file.write_text("".join(lines[: first + 1]))
    before = states_of("a")
    assert list(before) == ["fp32"]
    answer = passing(words)
    assert "a has 1 case, and goes on." in answer.err
    assert states_of("a").keys() == {"fp32", "bf16"}
    assert states_of("a")["fp32"] == before["fp32"]


# options => exit code => what is said
WRONG = """\
--decode-states fp32,int9 => 2 => There is no format 'int9' of states. hint: Did you mean int8?
--decode-states '' => 2 => There is no format '' of states.
--decode-states nowhere:half => 2 => The module of nowhere:half cannot be imported
--decode-states int8:fixed=0 => 2 => 'int8:fixed=0' names no scale of states.
--decode-step 4 => 2 => --decode-step needs --decode-states.
--decode-states fp32 --budget 9 => 2 => --decode-states and --budget cannot be combined
--gate kept-steps:9 => 2 => --gate kept-steps:9 needs --decode-states.
--decode-states fp32 --gate rms:2 => 2 => and --gate rms:2 cannot be combined
--decode-states fp32 --gate kept-steps@int9:5 => 2 => hint: Write kept-steps@fp32:1000.
--decode-states fp32 --gate kept-steps:99 => 1 => kept-steps:99: 2x4x4x1, bf16, decoded
--decode-states mine:short => 1 => mine:short must return a tensor (1, 2, 4, 4), not
--decode-states fp32,mine:broken => 1 => RuntimeError: boom (mine.py:
"""


@pytest.mark.parametrize(("words", "code", "message"), rows(WRONG))
def test_what_cannot_be_decoded_is_told(words, code, message):
    Path("mine.py").write_text(FORMATS)
    answer = ending(int(code), f"bench ssd {SMALL} {words} --out a")
    assert message in f"{answer.err} {answer.shown}"


def test_runs_refuse_what_is_not_a_whole_prompt():
    assert set(SHAPES) <= set(operators.names())
    for words in ("--verify 4", "--decode 2", "--chunked-prefill 8", "--packed 2x4-8", "--answers"):
        answer = ending(2, f"run demo --decode-states fp32 {words}")
        assert f"--decode-states and {words.split()[0]} cannot be combined" in answer.err
    passing("run demo --seq 24 --chunked-prefill 12 --layers first:1 --save-captures --out a")
    answer = ending(2, "run a/captures --decode-states fp32")
    assert "--decode-states needs prompts that are one call each." in answer.err
