"""Places: their functions' signatures, and calls of stand-ins with each library's layout, which are
read back as the operators' inputs and outputs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import TOKENS, bounds, cut
from source_signatures import FILE

from ssdprof import operators
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.kda.reference import kda_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.record import recorder
from ssdprof.record.place import Place
from ssdprof.record.places import PLACES

RECURRENCES = {"ssd": ssd_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}
RECORDED = json.loads(FILE.read_text("utf-8"))
CALLS = tomllib.loads(Path(__file__).with_name("calls.toml").read_text("utf-8"))
PARAMETERS = CALLS.pop("parameters")
OF_LIBRARY: dict[str, list[Place]] = defaultdict(list)
for _place in PLACES:
    OF_LIBRARY[_place.library].append(_place)


def name_of(place: Place) -> str:
    return f"{place.module}:{place.function}"


# --- signatures


@pytest.mark.parametrize("library", OF_LIBRARY)
def test_every_place_is_in_the_sources_that_were_read(library):
    for place in OF_LIBRARY[library]:
        names = RECORDED[library]["functions"][name_of(place)].split()
        assert set(place.parameters) <= set(names), name_of(place)


# --- calls


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=place.module)
        for place in OF_LIBRARY["transformers"]
        if place.phase == "prompt" and place.module.endswith(("qwen3_next", "linear", "mamba2"))
    ],
)
def test_a_real_function_writes_over_no_input_that_is_copied_later(place):
    scene = Scene(place, {"tokens": 64, "v_first": False})
    given = scene.arguments()
    given |= {"chunk_size": 16} if "chunk_size" in given else {}
    call = place.bind(given)
    before = recorder._copies(call.inputs, call.inputs)
    assert isinstance(before.get("initial_state", before.get("initial_states")), torch.Tensor)
    getattr(import_module(place.module), place.function)(**given)
    for name in before.keys() - call.overwrites:
        assert before[name] is call.inputs[name] or torch.equal(before[name], call.inputs[name])


LENGTHS, TAIL = (2, 3, 1), 1  # of packed sequences; and a token that belongs to none
TABLE = torch.tensor([(4, -1, 5), (-1, -1, -1), (3, 6, 1)])  # slots; -1 stands for padding
ACCEPTED = torch.tensor([3, 1, 1])
BUFFER_ROWS = torch.tensor([4, 0, 2])
SLOTS = torch.tensor([5, -1, 3])


@dataclass
class Scene:
    """A call of a place's function.  terms: an entry of `calls.toml`."""

    place: Place
    terms: dict[str, Any]

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.names = RECORDED[self.place.library]["functions"][name_of(self.place)].split()
        self.is_ssd = self.place.operator == "ssd"
        self.step = "selective_state_update" in self.place.function
        self.width = self.terms.get("tokens", 0)
        self.lengths = torch.tensor([self.width] * 3 if self.width else LENGTHS)
        self.padded = "slots" in self.terms
        self.owner = torch.arange(3).repeat_interleave(self.lengths)
        self.column = torch.cat([torch.arange(length) for length in self.lengths])
        self.live = (self.owner != 1) | (not self.padded)
        # tokens whose state goes to a slot
        self.kept = self.live
        if self.terms.get("every") == "table":
            self.kept = TABLE[self.owner, self.column] > 0
        self.raw: dict[str, torch.Tensor] = {}
        fields = self.ssd_fields() if self.is_ssd else self.delta_rule_fields()
        states = self.normal(3, 2, *((3, 4) if self.is_ssd else (4, 3)))
        states[1] *= not self.padded
        states[2] *= "new" not in self.terms
        kind = operators.get(self.place.operator).inputs
        fields[kind.STATES] = states
        self.truth = kind(**fields, cu_seqlens=bounds(tuple(self.lengths.tolist())))
        self.rows = TOKENS[kind]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def delta_rule_fields(self) -> dict[str, Any]:
        """Also draws the gates before their activations."""
        channels = (4,) if self.place.operator == "kda" else ()
        keys, tokens = (len(channels) + 1, 4), (1, int(self.lengths.sum()))
        names = {"A_log": (2,), "dt_bias": (2, *channels), "a": (*tokens, 2, *channels)}
        raw = {name: self.normal(*shape) for name, shape in names.items()}
        raw["b"], x = self.normal(*tokens, 2), (raw["a"] + raw["dt_bias"]).double()
        amplitude = raw["A_log"].double().exp().view(2, *(1 for _ in channels))
        g = -amplitude * torch.logaddexp(x, torch.zeros_like(x))
        if bound := self.terms.get("bound"):
            g = bound * (amplitude * x).sigmoid()
        beta = raw["b"].sigmoid() * (1 + ("allow_neg_eigval" in self.terms.get("flags", "")))
        self.raw = raw if self.terms.get("raw") else {}
        return {
            **{"q": self.normal(*tokens, *keys), "k": self.normal(*tokens, *keys)},
            **{"v": self.normal(*tokens, 2, 3), "g": g.float(), "beta": beta},
            "scale": 0.3 if "scale" in self.names else None,
            "use_qk_l2norm": self.terms.get("norm", True),
        }

    def ssd_fields(self) -> dict[str, Any]:
        tokens = 1, int(self.lengths.sum())
        return {
            **{"x": self.normal(*tokens, 2, 3), "dt": self.normal(*tokens, 2)},
            **{"A": -self.normal(2).abs(), "D": self.normal(2), "dt_bias": self.normal(2)},
            **{name: self.normal(*tokens, 1, 4) for name in "BC"},
            **{"z": self.normal(*tokens, 2, 3) if "z" in self.names else None},
            **{"dt_softplus": True, "chunk_size": 16},
        }

    @cached_property
    def outcome(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out (1, tokens, ...), and the state after each token (tokens, ...)."""
        inputs, outs, states = self.truth, [], []
        for number, span in enumerate(pairwise(inputs.cu_seqlens.tolist())):
            state = inputs.initial[number : number + 1]
            for token in range(*span):
                initial = {inputs.STATES: state}
                alone = cut(inputs, token, token + 1, cu_seqlens=None, **initial)
                out, state = RECURRENCES[self.place.operator](alone)
                outs.append(out.float())
                states.append(state.float())
        return torch.cat(outs, 1), torch.cat(states)

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor (1, tokens, ...) as the function takes it."""
        tensor = tensor.clone()
        if self.width:
            tensor = tensor[0].unflatten(0, (3, self.width))
            return tensor[:, 0] if self.step and self.width == 1 else tensor
        if self.padded:
            tensor = torch.cat(
                [tensor, tensor.new_full((1, TAIL, *tensor.shape[2:]), torch.nan)], 1
            )
        return tensor[0] if self.step or self.terms.get("flat") else tensor

    def turned(self, states: torch.Tensor) -> torch.Tensor:
        v_first = self.terms.get("v_first", True) and not self.is_ssd
        return states.mT.contiguous() if v_first else states.clone()

    def arguments(self) -> dict[str, Any]:
        """By the function's parameters; all else in its pool, buffer and outputs is NaN."""
        terms, truth = self.terms, self.truth
        state, padding = self.turned(truth.initial), terms.get("slots", -1)
        if self.padded:
            read, state = state, torch.full((7, *state.shape[1:]), torch.nan)
            state[[5, 3]] = read[[0, 2]]
            state[3] *= torch.nan if "new" in terms else 1
        values = {
            name: self.laid(getattr(truth, name)) for name in self.rows if name in truth.tensors
        }
        values |= self.of_ssd(values) if self.is_ssd else self.of_delta_rule(values)
        values |= {
            **{"state": state, "cu_seqlens": None if self.width else truth.cu_seqlens},
            **{"scale": 0.3, "norm": True, "softplus": 1.0, "written_back": True},
            **{"lower_bound": terms.get("bound"), "padding": padding, "frozen": False},
            "has_initial_state": torch.tensor([True, True, False]) if "new" in terms else None,
            "slots": SLOTS.where(SLOTS > 0, padding) if self.padded else None,
        }
        if terms.get("every") == "table":
            values |= {"slots": TABLE.where(TABLE > 0, padding), "accepted": ACCEPTED}
        elif "wide" in terms:
            values["slots"] = torch.stack([values["slots"], torch.ones_like(SLOTS)], 1)
        elif terms.get("every") == "buffer":
            buffer = torch.full((5, 4, *state.shape[1:]), torch.nan)
            values |= {"buffer": buffer, "rows": BUFFER_ROWS, "frozen": True}
        known = {*self.names, *(("A_log", "dt_bias") if "**" in self.names else ())}
        given = dict.fromkeys(self.names) | {
            name: value
            for ours, value in values.items()
            for name in PARAMETERS.get(ours, ours).split()
            if name in known
        }
        if "b" in self.names:
            given["beta"] = 1.0  # of softplus
        given["self"] = SimpleNamespace(**self.raw, kda_lower_bound=terms.get("bound"))
        given |= dict.fromkeys(terms.get("flags", "").split(), True) | terms.get("more", {})
        return given | dict.fromkeys(terms.get("without", "").split())

    def of_delta_rule(self, rows: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {name: self.raw[name] for name in ("A_log", "dt_bias") if self.raw}
        if self.raw:
            in_one_row = self.terms.get("mixed") and {"raw_g", "raw_gate"} & {*self.names}
            laid = torch.clone if in_one_row else self.laid
            values |= {"g": laid(self.raw["a"]), "beta": laid(self.raw["b"])}
        if "longer" in self.terms:
            values |= {name: torch.cat([values[name]] * 2, 1) for name in ("g", "beta")}
        if self.terms.get("plain_beta"):
            values["beta"] = rows["beta"]
        if self.terms.get("more", {}).get("gate_domain") == "linear":
            values["g"] = rows["g"].exp()
        if self.terms.get("mixed"):
            values["mixed"] = torch.cat([rows[name].flatten(1) for name in "qkv"], 1)
            values["out"] = torch.full_like(rows["v"], torch.nan)
        return values

    def of_ssd(self, rows: dict[str, Any]) -> dict[str, Any]:
        truth, names = self.truth, ("A", "D", "dt_bias", "dt_softplus", "dt_limit", "chunk_size")
        values = {name: getattr(truth, name) for name in names}
        values |= {"out": torch.full_like(rows["x"], torch.nan), "initial_states": truth.initial}
        values |= {"last": truth.cu_seqlens[1:] - 1, "final_slots": torch.tensor([5, 6, 3])}
        if self.terms.get("pool"):
            values["final_pool"] = torch.full((7, 2, 3, 4), torch.nan)
        if self.step:
            values["A"] = truth.A[:, None, None].expand(2, 3, 4)
            for name, tensor in (("dt", rows["dt"]), ("D", truth.D), ("dt_bias", truth.dt_bias)):
                values[name] = tensor[..., None].expand(*tensor.shape, 3)
            if "dense" in self.terms:
                values["D"] = values["D"].contiguous()
        return values

    def call(self, given: dict[str, Any]):
        """What the function writes and returns.  It leaves what is padding."""
        out, states = self.outcome
        every, last = self.turned(states), self.turned(states[self.lengths.cumsum(0) - 1])
        overwrites = re.search("chunk_kda|KDAKernel.extend", self.place.function)
        if overwrites and self.place.library in ("vllm", "sglang"):
            given["v"].fill_(torch.nan)  # where they compute their output
        room = (
            torch.full_like(self.laid(out), torch.nan) if given.get("out") is None else given["out"]
        )
        live = self.laid(self.live[None].float()) == 1
        room[live] = self.laid(out)[live]
        pool = next(
            (given[name] for name in PARAMETERS["state"].split() if given.get(name) is not None),
            None,
        )
        owner, column = self.owner[self.kept], self.column[self.kept]
        if self.terms.get("every") == "table":
            pool[TABLE[owner, column]] = every[self.kept]
        elif self.terms.get("every") == "buffer":
            rows = BUFFER_ROWS if "intermediate_state_indices" in self.names else torch.arange(3)
            given["intermediate_states_buffer"][rows[owner], column] = every[self.kept]
        elif self.padded:
            pool[[5, 3]] = last[[0, 2]]
        elif self.terms.get("in_place"):
            pool.copy_(last)
        if given.get("final_states_out") is not None:
            given["final_states_out"][given["final_state_indices"]] = last
        if given.get("return_track_states"):
            return states, last, None
        if given.get("return_intermediate_states"):
            return states
        returned = [] if given.get("out") is not None and not self.terms.get("mixed") else [room]
        returned += [] if self.step or self.padded or self.terms.get("in_place") else [last]
        return tuple(returned) if len(returned) > 1 else returned[0] if returned else None


def entries() -> list[Any]:
    return [
        pytest.param(operator, function, terms, id=f"{operator}-{function}-{number}")
        for operator, functions in CALLS.items()
        for function, several in functions.items()
        for number, terms in enumerate(several)
    ]


@pytest.mark.parametrize(("operator", "function", "terms"), entries())
def test_a_call_is_read_as_inputs_and_output(operator, function, terms):
    (place,) = (
        place
        for place in PLACES
        if place.operator == operator and name_of(place).endswith(function)
    )
    scene = Scene(place, terms)
    truth, live, total = scene.truth, scene.live, len(scene.live)
    given = scene.arguments()
    if (refused := terms.get("refused", "other")) != "other":
        with pytest.raises(ValueError, match=refused):
            place.bind(given)
        return
    call = place.bind(given)
    assert (call is None) == ("refused" in terms)
    if call is None:
        return
    # what the recorder copies before the function in any case, and no more
    before = recorder._copies(call.inputs, call.overwrites - call.copied)
    inputs = operators.get(operator).inputs(**before)
    returned = scene.call(given)
    inputs = call.activate(inputs, call.weights)
    for name, tensor in truth.tensors.items():
        read = getattr(inputs, name)
        if name in scene.rows:
            read, tensor = (rows.flatten(0, 1)[:total][live] for rows in (read, tensor))
        if name != "cu_seqlens" or not scene.width:
            torch.testing.assert_close(read, tensor, rtol=1e-5, atol=1e-6, check_dtype=False)
    for name in ("scale", "use_qk_l2norm", "dt_softplus"):
        assert getattr(inputs, name, None) == getattr(truth, name, None)
    keeps = terms.get("keeps", True)
    assert inputs.state_every == ("every" in terms and keeps)
    assert not scene.padded or torch.equal(call.slots, SLOTS)

    out, states = call.result(returned)
    states = states if states is None else states.clone()
    for name in PARAMETERS["state"].split():  # as the next call does
        if given.get(name) is not None:
            given[name].fill_(torch.nan)
    assert out.shape == inputs.values.shape
    expected_out, expected = scene.outcome
    out = out.flatten(0, 1)
    torch.testing.assert_close(out[:total][live], expected_out[0, live], rtol=1e-5, atol=1e-5)
    if scene.padded and place.phase != "prompt":
        assert not out[:total][~live].any()
        assert not out[total:].any()
    if not keeps:
        assert states is None
        return
    kept = scene.kept
    if "every" not in terms:
        last = scene.lengths.cumsum(0) - 1
        expected, kept = expected[last], kept[last]
    torch.testing.assert_close(states[: len(kept)][kept], expected[kept], rtol=1e-5, atol=1e-5)
    assert not states[: len(kept)][~kept].any()
    assert not states[len(kept) :].any()
