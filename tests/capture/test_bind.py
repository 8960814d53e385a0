"""From a model's call to the operator's inputs."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ssdprof import operators
from ssdprof.capture.intercept import bind
from ssdprof.capture.store import PromptBuffer, token_major
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.inputs import SSDInputs

BATCH, LENGTH, HEADS, WIDTH, STATE = 2, 5, 4, 8, 16


def ssd_call() -> tuple[list[Any], dict[str, Any]]:
    x = torch.randn(BATCH, LENGTH, HEADS, WIDTH)
    B, C = torch.randn(2, BATCH, LENGTH, 1, STATE)
    args = [x, torch.randn(BATCH, LENGTH, HEADS), -torch.rand(HEADS), B, C]
    return args, {"chunk_size": 32, "D": torch.ones(HEADS), "z": None, "return_final_states": True}


def gdn_call(key_heads: int = 2) -> tuple[list[Any], dict[str, Any]]:
    q, k = torch.randn(2, BATCH, LENGTH, key_heads, WIDTH)
    v = torch.randn(BATCH, LENGTH, HEADS, WIDTH)
    g, beta = -torch.rand(BATCH, LENGTH, HEADS), torch.rand(BATCH, LENGTH, HEADS)
    return [q, k, v], {"g": g, "beta": beta, "output_final_state": False, "use_qk_l2norm_in_kernel": True}


class Mixer(nn.Module):
    num_k_heads = 2


def test_arguments_arrive_where_they_belong() -> None:
    args, kwargs = ssd_call()
    state = torch.randn(BATCH, HEADS, WIDTH, STATE)
    bound = bind("ssd", Mixer(), tuple(args), {**kwargs, "dt_limit": [0.001, 5], "initial_states": state})
    assert isinstance(bound.inputs, SSDInputs)
    assert bound.wants_final_state
    assert bound.inputs.x is args[0]
    assert bound.inputs.C is args[4]
    assert bound.inputs.D is kwargs["D"]
    assert bound.inputs.initial_states is state
    assert (bound.inputs.chunk_size, bound.inputs.dt_softplus, bound.inputs.dt_limit) == (32, False, (0.001, 5.0))

    args, kwargs = gdn_call()
    bound = bind("gdn", Mixer(), tuple(args), kwargs)
    assert isinstance(bound.inputs, GDNInputs)
    assert not bound.wants_final_state
    assert (bound.inputs.chunk_size, bound.inputs.use_qk_l2norm, bound.inputs.scale) == (64, True, None)
    assert torch.equal(bound.inputs.q, args[0])
    assert bound.inputs.beta is kwargs["beta"]


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_leaking_keyword_arguments_are_dropped(operator: Any) -> None:
    args, kwargs = ssd_call() if operator == "ssd" else gdn_call()
    leaked = {"use_cache": True, "output_router_logits": False, "cu_seqlens": None, "position_ids": torch.arange(3)}
    clean, bound = (bind(operator, Mixer(), tuple(args), kwargs | extra).inputs for extra in ({}, leaked))
    for field in fields(clean):
        ours, theirs = getattr(bound, field.name), getattr(clean, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, field.name


@pytest.mark.parametrize(
    ("operator", "name"), [("ssd", "seq_idx"), ("ssd", "cu_seqlens"), ("gdn", "state_v_first"), ("gdn", "cp_context")]
)
def test_what_a_capture_cannot_hold_is_refused_by_name(operator: Any, name: str) -> None:
    args, kwargs = ssd_call() if operator == "ssd" else gdn_call()
    with pytest.raises(BadInputError, match=f"Mixer passes {name} to its operator"):
        bind(operator, Mixer(), tuple(args), {**kwargs, name: torch.zeros(3, dtype=torch.int32)})


def test_inputs_that_do_not_fit_together_are_refused() -> None:
    args, kwargs = ssd_call()
    args[1] = args[1][:, :-1]
    with pytest.raises(BadInputError, match="Mixer calls its ssd operator in an unknown way: dt must have shape"):
        bind("ssd", Mixer(), tuple(args), kwargs)
    with pytest.raises(BadInputError, match="required positional argument"):
        bind("ssd", Mixer(), tuple(args[:2]), {})


def test_key_heads_that_a_mixer_repeated_are_taken_once() -> None:
    (q, k, v), kwargs = gdn_call()
    repeated = [tensor.repeat_interleave(2, dim=2) for tensor in (q, k)]
    inputs = bind("gdn", Mixer(), (*repeated, v), kwargs).inputs
    assert isinstance(inputs, GDNInputs)
    assert torch.equal(inputs.q, q)
    assert torch.equal(inputs.k, k)

    repeated[1] = repeated[1].clone()
    repeated[1][0, 3, 1, 0] += 1
    with pytest.raises(BadInputError, match="not copies of 2"):
        bind("gdn", Mixer(), (*repeated, v), kwargs)


def test_packed_sequences_of_a_gdn_call_are_taken_as_they_are() -> None:
    args, kwargs = gdn_call()
    one_row = [tensor.flatten(0, 1)[None] for tensor in args]
    gates = {name: kwargs[name].flatten(0, 1)[None] for name in ("g", "beta")}
    bounds = torch.tensor([0, 3, 3, BATCH * LENGTH], dtype=torch.int32)
    bound = bind("gdn", Mixer(), tuple(one_row), {**kwargs, **gates, "cu_seqlens": bounds, "output_final_state": True})
    assert bound.inputs.cu_seqlens is bounds
    out, final_states = operators.get("gdn").door.stand_in(bound.inputs)
    first = {name: getattr(bound.inputs, name)[:, :3] for name in ("q", "k", "v", "g", "beta")}
    alone, _ = operators.get("gdn").door.stand_in(replace(bound.inputs, cu_seqlens=None, **first))
    assert final_states.shape[0] == 3
    torch.testing.assert_close(out[:, :3], alone)
    with pytest.raises(BadInputError, match="packs sequences"):
        PromptBuffer(bound.inputs, BATCH * LENGTH + 1, torch.device("cpu"))
    whole = token_major(bound.inputs)
    assert torch.equal(whole.cu_seqlens, bounds)
    assert torch.equal(whole.v, bound.inputs.v)


@pytest.mark.parametrize(
    ("stated", "passed", "remark"),
    [((0.0, math.inf), (0.001, math.inf), "dt_limit (0.001, inf)"), ((0.001, 0.1), (0.001, 0.1), "")],
)
def test_limits_of_dt_that_the_config_does_not_state_are_remarked(
    stated: tuple[float, float], passed: tuple[float, float], remark: str
) -> None:
    mixer = Mixer()
    mixer.config = SimpleNamespace(time_step_limit=list(stated))
    args, kwargs = ssd_call()
    bound = bind("ssd", mixer, tuple(args), kwargs | {"dt_limit": passed})
    assert bound.inputs.dt_limit == passed
    assert (remark in bound.remark) if remark else not bound.remark
