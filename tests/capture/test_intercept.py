"""Interception of operator calls, in every family: it sees the operator's inputs and does not
change the model.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from capture.exact import FP32_ROUNDING, capture, difference, oracle
from torch import nn

from ssdprof import kernels, operators
from ssdprof.capture import intercept as module
from ssdprof.capture.forward import cache_name
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.capture.layers import CapturedLayer, PromptBuffer, token_major
from ssdprof.checkpoint import mixers
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.inputs import SSDInputs

LENGTH = 70  # two chunks and a part of one


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_models.prompt(LENGTH), use_cache=False, **kwargs).logits


@pytest.mark.parametrize("name", tiny_models.MODELS | tiny_models.IN_MEMORY)
def test_observing_changes_no_bit_and_sees_what_the_operator_computes_from(name: str):
    model = tiny_models.shared(name)
    before = logits(model)
    sites = find_mixers(model)
    seen = []

    def observe(call: OperatorCall) -> Result:
        out, final_state = call.run_original()
        seen.append(call.mixer)
        assert difference(out, oracle(call.inputs)[0]) < FP32_ROUNDING
        assert final_state is None
        return out, final_state

    with intercept(sites, observe) as count:
        during = logits(model)
    assert torch.equal(before, during)
    assert seen == list(sites)
    assert count["calls"] == len(sites)
    assert torch.equal(before, logits(model))


@pytest.mark.parametrize("name", tiny_models.MODELS | tiny_models.IN_MEMORY)
def test_on_our_operator_logits_are_the_same_to_rounding(name: str):
    model = tiny_models.shared(name)
    with intercept(find_mixers(model), lambda call: call.replacement()) as count:
        replaced = logits(model)
    assert count["calls"] == len(tiny_models.OPERATOR_LAYERS[name])
    assert difference(replaced, logits(model)) < FP32_ROUNDING


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_final_states_go_where_the_model_asks_for_them(name: str):
    model = tiny_models.shared(name)
    ids = tiny_models.prompt(LENGTH)
    returned = []

    def handler(call: OperatorCall) -> Result:
        assert call.wants_final_state
        out, final_state = call.replacement()
        returned.append(final_state)
        return out, final_state

    with torch.no_grad(), intercept(find_mixers(model), handler):
        output = model(ids, use_cache=True)
    cache = output[cache_name(model)]
    for site, final_state in zip(find_mixers(model), returned, strict=True):
        assert torch.equal(cache.layers[site.layer_index].recurrent_states[0], final_state)


def test_a_call_from_an_unknown_mixer_is_an_error():
    model = tiny_models.shared("mamba2")
    with (
        pytest.raises(BadInputError, match="mamba2_chunk_scan was called outside the mixers"),
        intercept(find_mixers(model)[:1], lambda call: call.replacement()),
    ):
        logits(model)


# --- transformers' own operator does not run


def captured_without_transformers_operator(
    name: str, model: Any, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> list[CapturedLayer]:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers' own operator ran")

    site = find_mixers(model)[0]
    monkeypatch.setitem(site.namespace, site.function, forbidden)
    return capture(name, tiny_models.prompt(seqlen), model=model)[0]


@pytest.mark.parametrize("name", tiny_models.MODELS | tiny_models.IN_MEMORY)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch):
    layers = captured_without_transformers_operator(
        name, tiny_models.build(name).base_model, 70, monkeypatch
    )
    assert len(layers) == len(tiny_models.OPERATOR_LAYERS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", tiny_models.GDN)
def test_a_long_prompt_on_a_gpu_runs_on_the_fused_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    ran = set()
    get = kernels.get

    def observed(operator: str, implementation: str) -> Any:
        ran.add((operator, implementation))
        return get(operator, implementation)

    monkeypatch.setattr(kernels, "get", observed)
    model = tiny_models.build(name, torch.bfloat16).base_model.cuda()
    layers = captured_without_transformers_operator(name, model, 32768, monkeypatch)
    assert len(layers) == len(tiny_models.OPERATOR_LAYERS[name])
    assert ran == {("gdn", "fused")}


# --- with a cached state, models compute a single token with another function than their operator


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_prompt_in_segments_of_one_token_is_refused(name: str):
    with pytest.raises(
        BadInputError, match=r"With segments of 1 this \w+ model got single tokens"
    ) as raised:
        capture(name, tiny_models.prompt(6), segment_length=1)
    assert "--segment 2" in raised.value.hint


# --- from a model's call to the operator's inputs


BATCH, TOKENS, HEADS, WIDTH, STATE = 2, 5, 4, 8, 16


def ssd_call() -> tuple[list[Any], dict[str, Any]]:
    x = torch.randn(BATCH, TOKENS, HEADS, WIDTH)
    B, C = torch.randn(2, BATCH, TOKENS, 1, STATE)
    args = [x, torch.randn(BATCH, TOKENS, HEADS), -torch.rand(HEADS), B, C]
    return args, {"chunk_size": 32, "D": torch.ones(HEADS), "z": None, "return_final_states": True}


def gdn_call(key_heads: int = 2) -> tuple[list[Any], dict[str, Any]]:
    q, k = torch.randn(2, BATCH, TOKENS, key_heads, WIDTH)
    v = torch.randn(BATCH, TOKENS, HEADS, WIDTH)
    g = -torch.rand(BATCH, TOKENS, HEADS)
    beta = torch.rand(BATCH, TOKENS, HEADS)
    return [q, k, v], {
        "g": g,
        "beta": beta,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": True,
    }


class Mixer(nn.Module):
    num_k_heads = 2


def bind(
    operator: str, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperatorCall:
    return module.bind(
        mixers.Mixer("layers.0.mixer", 0, operator, mixer, "function", {}), print, args, kwargs
    )


def test_arguments_arrive_where_they_belong():
    args, kwargs = ssd_call()
    state = torch.randn(BATCH, HEADS, WIDTH, STATE)
    bound = bind(
        "ssd", Mixer(), tuple(args), {**kwargs, "dt_limit": [0.001, 5], "initial_states": state}
    )
    assert isinstance(bound.inputs, SSDInputs)
    assert bound.wants_final_state
    assert bound.inputs.x is args[0]
    assert bound.inputs.C is args[4]
    assert bound.inputs.D is kwargs["D"]
    assert bound.inputs.initial_states is state
    assert (bound.inputs.chunk_size, bound.inputs.dt_softplus, bound.inputs.dt_limit) == (
        32,
        False,
        (0.001, 5.0),
    )

    args, kwargs = gdn_call()
    bound = bind("gdn", Mixer(), tuple(args), kwargs)
    assert isinstance(bound.inputs, GDNInputs)
    assert not bound.wants_final_state
    assert (bound.inputs.chunk_size, bound.inputs.use_qk_l2norm, bound.inputs.scale) == (
        64,
        True,
        None,
    )
    assert torch.equal(bound.inputs.q, args[0])
    assert bound.inputs.beta is kwargs["beta"]


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_leaking_keyword_arguments_are_dropped(operator: Any):
    args, kwargs = ssd_call() if operator == "ssd" else gdn_call()
    leaked = {
        "use_cache": True,
        "output_router_logits": False,
        "cu_seqlens": None,
        "position_ids": torch.arange(3),
    }
    clean, bound = (
        bind(operator, Mixer(), tuple(args), kwargs | extra).inputs for extra in ({}, leaked)
    )
    assert bound.scalars == clean.scalars
    for name, tensor in clean.tensors.items():
        assert torch.equal(bound.tensors[name], tensor)


@pytest.mark.parametrize(
    ("operator", "name"),
    [("ssd", "seq_idx"), ("ssd", "cu_seqlens"), ("gdn", "state_v_first"), ("gdn", "cp_context")],
)
def test_what_a_capture_cannot_hold_is_refused_by_name(operator: Any, name: str):
    args, kwargs = ssd_call() if operator == "ssd" else gdn_call()
    with pytest.raises(BadInputError, match=f"Mixer passes {name} to its operator"):
        bind(operator, Mixer(), tuple(args), {**kwargs, name: torch.zeros(3, dtype=torch.int32)})


def test_inputs_that_do_not_fit_together_are_refused():
    args, kwargs = ssd_call()
    args[1] = args[1][:, :-1]
    with pytest.raises(
        BadInputError, match="Mixer calls its ssd operator in an unknown way: dt must have shape"
    ):
        bind("ssd", Mixer(), tuple(args), kwargs)
    with pytest.raises(BadInputError, match="required positional argument"):
        bind("ssd", Mixer(), tuple(args[:2]), {})


def test_packed_sequences_of_a_gdn_call_are_taken_as_they_are():
    args, kwargs = gdn_call()
    one_row = [tensor.flatten(0, 1)[None] for tensor in args]
    gates = {name: kwargs[name].flatten(0, 1)[None] for name in ("g", "beta")}
    bounds = torch.tensor([0, 3, 3, BATCH * TOKENS], dtype=torch.int32)
    bound = bind(
        "gdn",
        Mixer(),
        tuple(one_row),
        {**kwargs, **gates, "cu_seqlens": bounds, "output_final_state": True},
    )
    assert bound.inputs.cu_seqlens is bounds
    out, final_states = operators.get("gdn").binding.replacement(bound.inputs)
    first = {name: getattr(bound.inputs, name)[:, :3] for name in ("q", "k", "v", "g", "beta")}
    alone, _ = operators.get("gdn").binding.replacement(
        replace(bound.inputs, cu_seqlens=None, **first)
    )
    assert final_states.shape[0] == 3
    torch.testing.assert_close(out[:, :3], alone)
    with pytest.raises(BadInputError, match="packs sequences"):
        PromptBuffer(bound.inputs, BATCH * TOKENS + 1, torch.device("cpu"))
    whole = token_major(bound.inputs)
    assert torch.equal(whole.cu_seqlens, bounds)
    assert torch.equal(whole.values, bound.inputs.values)


@pytest.mark.parametrize(
    ("stated", "passed", "remark"),
    [
        ((0.0, math.inf), (0.001, math.inf), "dt_limit (0.001, inf)"),
        ((0.001, 0.1), (0.001, 0.1), ""),
    ],
)
def test_limits_of_dt_that_the_config_does_not_state_are_remarked(
    stated: tuple[float, float], passed: tuple[float, float], remark: str
):
    mixer = Mixer()
    mixer.config = SimpleNamespace(time_step_limit=list(stated))
    args, kwargs = ssd_call()
    bound = bind("ssd", mixer, tuple(args), kwargs | {"dt_limit": passed})
    assert bound.inputs.scalars["dt_limit"] == passed
    assert (remark in bound.remark) if remark else not bound.remark
