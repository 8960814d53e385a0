"""Inputs outside an operator's domain are told first, whoever recorded them; a model's are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import capture
from command_line import Answer
from safetensors.torch import save_file

from ssdprof import operators
from ssdprof.core.target import Serving
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import oracle_output
from ssdprof.operators import domain
from ssdprof.store import reports

LENGTH = 40


def doubts(inputs: Any) -> list[str]:
    return list(domain.doubts(operators.get(inputs.operator), inputs))


Tensors = dict[str, torch.Tensor]


def gdn() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    like = lambda *shape: torch.randn(1, LENGTH, *shape, generator=draw)  # noqa: E731
    return {
        "q": torch.nn.functional.normalize(like(2, 32), dim=-1),
        "k": torch.nn.functional.normalize(like(2, 32), dim=-1),
        "v": like(2, 16),
        "g": -like(2).abs(),
        "beta": like(2).sigmoid(),
    }


def kda() -> Tensors:
    given = gdn()
    return given | {"g": given["g"][..., None] * torch.rand(32)}


def ssd() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    like = lambda *shape: torch.randn(1, LENGTH, *shape, generator=draw)  # noqa: E731
    names = {"x": (4, 16), "B": (1, 16), "C": (1, 16)}
    given = {name: like(*shape) for name, shape in names.items()}
    return given | {"dt": like(4).abs(), "A": -torch.rand(4), "dt_bias": torch.zeros(4)}


def of(kind: type[Any], given: Tensors, **options: Any) -> Any:
    return kind(**given, **options)


@pytest.mark.parametrize(("kind", "make"), [(GDNInputs, gdn), (KDAInputs, kda), (SSDInputs, ssd)])
def test_what_models_pass_raises_no_doubt(kind: type[Any], make: Callable[[], Tensors]) -> None:
    given = make()
    assert not list(doubts(of(kind, given)))
    if kind is SSDInputs:
        raw = {"dt": torch.randn_like(given["dt"]), "dt_bias": -torch.ones(4)}
        assert not list(doubts(of(kind, given | raw, dt_softplus=True)))
        return
    long = {"k": 1e3 * given["k"], "q": 1e3 * given["q"]}
    assert not list(doubts(of(kind, given | long, use_qk_l2norm=True)))
    padded = given["g"].clone()
    padded[:, -2:] = 0.5
    assert not list(doubts(of(kind, given | {"beta": 2 * given["beta"], "g": padded})))


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_what_a_model_passes_raises_no_doubt(name: str) -> None:
    for serving in (Serving(), Serving(chunk=16)):
        captured, _ = capture(name, tiny_models.prompt(LENGTH), serving)
        assert captured
        assert not [text for one in captured for text in doubts(one.inputs)]


WRONG: list[tuple[Callable[[], Tensors], str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    *(
        (make, name, change, words)
        for make in (gdn, kda)
        for name, change, words in (
            ("g", torch.exp, "g is above 0 in all positions: it is no logarithm of a decay"),
            ("g", lambda g: g + 1, "g is above 0 in many positions: it is no logarithm"),
            ("beta", torch.logit, "beta is below 0 or above 2 in many positions: it is no sigmoid"),
            ("beta", lambda beta: 3 + beta, "beta is below 0 or above 2 in all positions"),
            ("k", lambda k: 1e3 * k, "k is longer than 2 and the call asks for no norm in all"),
            ("v", torch.zeros_like, "v is 0 in every position"),
            ("k", lambda k: torch.cat([k[:, :9], 0 * k[:, 9:]], 1), "k is 0 in most positions"),
            ("beta", torch.ones_like, "beta is the same in every position"),
            ("q", lambda q: q[:, :1].expand_as(q), "q is the same in every position"),
        )
    ),
    (ssd, "dt", torch.neg, "dt is below 0 and the call asks for no softplus in all positions"),
    (ssd, "dt", lambda dt: dt - 1, "dt is below 0 and the call asks for no softplus in many"),
    (ssd, "dt_bias", lambda bias: bias - 99, "dt is below 0 and the call asks for no softplus"),
    (ssd, "A", torch.neg, "A is not below 0 in all positions"),
    (ssd, "A", torch.zeros_like, "A is not below 0 in all positions"),
    (ssd, "x", torch.zeros_like, "x is 0 in every position"),
    (ssd, "B", lambda B: B[:, :1].expand_as(B), "B is the same in every position"),
]


@pytest.mark.parametrize(("make", "name", "change", "words"), WRONG)
def test_what_no_model_passes_is_named(
    make: Callable[[], Tensors],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
) -> None:
    kind = {gdn: GDNInputs, kda: KDAInputs, ssd: SSDInputs}[make]
    given = make()
    (found,) = doubts(of(kind, given | {name: change(given[name])}))
    assert found.startswith(words)


def recorded(folder: Path, operator: str, given: Tensors, *calls: Tensors) -> None:
    folder.mkdir()
    (folder / "recording.json").write_text(json.dumps({"operator": operator, "source": "mine"}))
    for number, output in enumerate(calls):
        tensors_of_call = {name: one.contiguous() for name, one in (given | output).items()}
        save_file(tensors_of_call, folder / f"7_{number:06}.safetensors")


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.usefixtures("in_empty_folder")
def test_a_recording_is_suspected_before_kernels_and_server(served: bool) -> None:
    """Four things are wrong, and the first screen shows three caveats of another kind."""
    right = of(GDNInputs, gdn())
    out, states = oracle_output(right)
    output = {"out": out, "final_states": states.float()} if served else {}
    given = right.tensors
    given = given | {
        "g": given["g"].exp(),
        "beta": given["beta"] + 3,
        "k": 1e3 * given["k"],
        "q": torch.zeros_like(given["q"]),
    }
    recorded(Path("r"), "gdn", given, output, output)
    answer = Answer("capture", "--from", "safetensors", "r", "--out", "c")
    assert answer.code == 0
    assert answer.err.count("Suspect the recording: ") == 4
    words = ("--impl", "recurrent", "--dtypes", "exact", "--states", "fp32", "--out", "run")
    answer = Answer("run", "c", *words)
    before = "Suspect the recording before the kernels and the server: in 2 layers,"
    limits = answer.shown.partition("What limits this: ")[2]
    assert limits.startswith(f"- {before}")
    for what in ("q is 0", "g is above 0", "beta is below 0", "k is longer"):
        assert f"{before} {what}" in limits
    assert "In short: explain the inputs first, which no model has: " in limits
    _, report = reports.load("run")
    assert set(report.doubts.values()) == {2}
    assert len(report.doubts) == 4
