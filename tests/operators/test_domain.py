"""Inputs outside an operator's domain are told first, whoever recorded them; a model's are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from capture.exact import capture
from capture.recordings import record
from command_line import Answer, passing
from generated_inputs import generated
from kernel_cases import changed
from torch import Tensor

from ssdprof import operators
from ssdprof.core.target import Serving
from ssdprof.measure.accuracy import oracle_output
from ssdprof.operators import domain

LENGTH = 40


def doubts(inputs) -> list[str]:
    return list(domain.doubts(operators.get(inputs.operator), inputs))


def drawn(operator: str):
    """Steps of SSD after softplus, and keys of unit length: the call asks for neither."""
    sizes = "4x16x16x1" if operator == "ssd" else "2/2x32x16"
    raw = generated(operator, sizes, LENGTH, dtype="fp32", layout="contiguous")
    if operator == "ssd":
        return replace(raw, dt=raw.dt.abs(), dt_bias=torch.zeros(4), dt_softplus=False)
    q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (raw.q, raw.k))
    return replace(raw, q=q, k=k, use_qk_l2norm=False)


@pytest.mark.parametrize("operator", ["ssd", "gdn", "kda"])
def test_what_models_pass_raises_no_doubt(operator):
    inputs = drawn(operator)
    assert not doubts(inputs)
    if operator == "ssd":
        raw = {"dt": torch.randn_like(inputs.dt), "dt_bias": -torch.ones(4)}
        assert not doubts(replace(inputs, **raw, dt_softplus=True))
        return
    assert not doubts(replace(inputs, k=1e3 * inputs.k, q=1e3 * inputs.q, use_qk_l2norm=True))
    padded = inputs.g.clone()
    padded[:, -2:] = 0.5
    assert not doubts(replace(inputs, beta=2 * inputs.beta, g=padded))


@tiny_models.every_model
def test_what_a_model_passes_raises_no_doubt(name):
    for serving in (Serving(), Serving(chunk=16)):
        captured, _ = capture(name, tiny_models.prompt(LENGTH), serving)
        assert captured
        assert not [text for one in captured for text in doubts(one.inputs)]


WRONG: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    *(
        (operator, name, change, words)
        for operator in ("gdn", "kda")
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
    ("ssd", "dt", torch.neg, "dt is below 0 and the call asks for no softplus in all positions"),
    ("ssd", "dt", lambda dt: dt - 1, "dt is below 0 and the call asks for no softplus in many"),
    ("ssd", "dt_bias", lambda bias: bias - 99, "dt is below 0 and the call asks for no softplus"),
    ("ssd", "A", torch.neg, "A is not below 0 in all heads"),
    ("ssd", "A", torch.zeros_like, "A is not below 0 in all heads"),
    ("ssd", "x", torch.zeros_like, "x is 0 in every position"),
    ("ssd", "B", lambda B: B[:, :1].expand_as(B), "B is the same in every position"),
]


@pytest.mark.parametrize(("operator", "name", "change", "words"), WRONG)
def test_what_no_model_passes_is_named(operator, name, change: Callable[[Tensor], Tensor], words):
    (doubt,) = doubts(changed(drawn(operator), change, name))
    assert doubt.startswith(words)


@pytest.mark.parametrize(
    ("served", "wrong", "known"),
    [
        ("", "q g beta k", "Its output, which would tell, was not recorded."),
        ("of others", "q g", "In layers 0-1, what the server computed differs from the"),
        ("of these", "q", "What the server computed from these inputs is right: the server"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder", "exact_kernels")
def test_a_recording_with_wrong_inputs_says_what_is_known(served, wrong, known):
    """Four things are wrong, and the first screen shows three caveats of another kind."""
    right = drawn("gdn")
    changes = {
        "q": torch.zeros_like(right.q),
        "g": right.g.exp(),
        "beta": right.beta + 3,
        "k": 1e3 * right.k,
    }
    inputs = replace(right, **{name: changes[name] for name in wrong.split()})
    out, states = oracle_output(inputs if served == "of these" else right)
    output = {"out": out, "final_states": states.float()} if served else {}
    record(Path("r"), "gdn", [inputs.tensors | output] * 2, processes=(7,))
    answer = passing("capture --from safetensors r --out c")
    assert answer.err.count("Inputs that no model has: ") == len(wrong.split())
    answer = Answer("run c --impl fused --dtypes exact --states fp32")
    limits = answer.shown.partition("What limits this: ")[2]
    for name in wrong.split():
        assert f"In 2 layers, inputs that no model has: {name} is" in limits
    assert known in limits
    assert "In short: explain the inputs first, which no model has: " in limits
    assert "--impl served" not in answer.shown  # nobody can give it
