"""The commands of benchmarks/bars-*.sh measure every cell of every bar, with every implementation
of the bar.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Template
from types import SimpleNamespace

import pytest
from typer.main import get_command

from ssdprof import operators
from ssdprof.cli import app
from ssdprof.core.base import intermediates_of, precisions_for, states_of
from ssdprof.jobs.reading import expand, parse_shapes
from ssdprof.jobs.target import tokens_of_bench
from ssdprof.operators.implementations import known

ROOT = Path(__file__).parents[2]
BENCH = get_command(app).commands["bench"]  # type: ignore[attr-defined]


def block(operator: str) -> list[str]:
    """The lines of the script for the operator's results, without comments."""
    text = (ROOT / "benchmarks" / f"bars-{operator}.sh").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def commands(operator: str) -> list[list[str]]:
    """The words of each command, with the block's variables substituted."""
    variables: dict[str, str] = {"HOME": "/home"}
    found = []
    for line in block(operator):
        if (assignment := re.fullmatch(r"(\w+)=(.*)", line)) is not None:
            variables[assignment[1]] = Template(assignment[2].strip('"')).safe_substitute(variables)
        else:
            found.append(shlex.split(Template(line).substitute(variables)))
    return found


def measured(operator: str) -> Iterator[tuple[str, str, str, str, str]]:
    """(shape, tokens, dtype, draw, words of an implementation) for every case of the benches."""
    record = operators.get(operator)
    for words in commands(operator):
        if words[0] != "ssdprof":
            continue
        assert words[:3] == ["ssdprof", "bench", operator]
        option = BENCH.make_context(
            "bench", ["published" if "/mamba" in word else word for word in words[2:]]
        ).params
        tokens, left_out = tokens_of_bench(SimpleNamespace(**option | {"max_tokens": "256k"}))
        assert not left_out
        shapes = parse_shapes(record.generated, option["shape"])
        libraries = [name for name in option["against"].split(",") if name]
        assert set(libraries) <= set(known(record))
        states = tuple(option["states"].split(",")) if option["states"] else None
        precisions = precisions_for(option["dtype"], option["intermediates"], states)
        ways = tuple(word for word in record.generated.ways if word in option["draw"].split(","))
        names = option["implementations"].split(",")
        for cell in expand(shapes, (option["dtype"],), tokens, "contiguous", ways):
            ours = [
                f"{name} {intermediates_of(one)} {states_of(one)}"
                for name in names
                for one in precisions
            ]
            by_token = ["recurrent exact fp32"] if cell.tokens.is_decoding else []
            for case in (*ours, *by_token, *libraries):
                yield cell.shape.name, str(cell.tokens), cell.dtype, " ".join(ways), case


def is_measured(words: str, cases: set[str]) -> bool:
    return any(f"{case} ".startswith(f"{words} ") for case in cases)


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_every_cell_of_every_bar_is_measured(operator):
    cases = {}
    for *place, case in measured(operator):
        cases.setdefault(tuple(place), set()).add(case)
    for bar in tomllib.loads((ROOT / "benchmarks" / f"bars-{operator}.toml").read_text())["bar"]:
        over = {"floor": bar["of"]}.get(bar["over"], bar["over"])
        for shape in bar["shapes"]:
            for tokens in bar["tokens"]:
                for ways in bar.get("ways", [""]):
                    assert any(bar[name] for name in ("device", "call", "error") if name in bar), (
                        "held to nothing"
                    )
                    place = (shape, tokens, bar.get("dtype", "bf16"), ways)
                    for words in (bar["of"], over if isinstance(over, str) else bar["of"]):
                        assert is_measured(words, cases.get(place, set())), (
                            bar["name"],
                            place,
                            words,
                        )


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_results_have_files_of_their_own_that_are_judged_at_last(operator):
    *benches, last = commands(operator)
    files = [words[words.index("--out") + 1] for words in benches]
    assert len(set(files)) == len(files)
    assert last[:2] == ["python", "benchmarks/check_bars.py"]
    assert all(Path(file).match(last[2]) for file in files)
