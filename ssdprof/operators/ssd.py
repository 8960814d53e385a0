"""The record of the operator "ssd".  torch is imported only when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.kernels.registry import Implementation
from ssdprof.operators import generate
from ssdprof.operators.definition import Definition, states_in
from ssdprof.operators.generate import InputDType, Library, installed_library
from ssdprof.operators.late import deferred, lazy, torch
from ssdprof.operators.operator import BoundCall, CallBinding, Operator, Stages, computed, from_call
from ssdprof.operators.ssd_inputs import GENERATOR, SIZE_WORDS
from ssdprof.operators.ssd_oracle import ORACLE
from ssdprof.operators.tensors import exact_fp32, requested_precisions

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.ssd import adapters
    from ssdprof.operators import ssd_tuning
else:
    adapters = lazy("ssdprof.kernels.ssd.adapters")
    ssd_tuning = lazy("ssdprof.operators.ssd_tuning")

STAGES = Stages.of("ssd")


# --- how a model calls it


def bind(
    mixer: torch.nn.Module,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **arguments: Any,
) -> BoundCall:
    """The call of a mixer for a prompt as inputs, with a remark on the limits of dt if there is
    one: see `CallBinding.bind`.
    """
    arguments |= {"x": x, "dt": dt, "A": A, "B": B, "C": C, "chunk_size": chunk_size}
    limits = tuple(map(float, dt_limit))
    inputs = from_call(kernels.SSDInputs, **arguments, dt_limit=limits)
    return inputs, return_final_states, _limit_remark(mixer, inputs.dt_limit)


def _limit_remark(mixer: torch.nn.Module, passed: tuple[float, float]) -> str:
    """A sentence for the report if the limits of dt in the config differ from those that the model
    passed; empty if they are the same.
    """
    stated = getattr(getattr(mixer, "config", None), "time_step_limit", None)
    if stated is None or tuple(map(float, stated)) == passed:
        return ""
    low, high = map(float, stated)
    return (
        f"The model calls the operator with dt_limit ({passed[0]:g}, {passed[1]:g}), and these "
        f"limits were used; its config states time_step_limit ({low:g}, {high:g}), which other "
        "runtimes use."
    )


def bind_step(
    mixer: torch.nn.Module,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> BoundCall:
    """The call of a mixer for one token as inputs: see `CallBinding.bind_step`.

    state (b, h, p, n), x and z (b, h, p), B and C (b, g, n).  A model repeats dt, A, D and dt_bias
    over the channels of a head: dt (b, h, p), A (h, p, n), D and dt_bias (h, p); dt (b, h), A, D
    and dt_bias (h) will do as well.  Such a call updates the state in place and returns only the
    output.  The limits of dt are not among its arguments, because a model applies them to prompts
    only.  Other arguments have no effect on models of transformers, and are dropped.

    Raises ValueError if a repeated value differs between the channels of a head, or if the tensors
    do not fit each other.
    """
    inputs = kernels.SSDInputs(
        x=x[:, None],
        dt=_of_heads("dt", dt, 2)[:, None],
        A=_of_heads("A", A, 1),
        B=B[:, None],
        C=C[:, None],
        chunk_size=getattr(mixer, "chunk_size", kernels.SSDInputs.chunk_size),
        z=None if z is None else z[:, None],
        dt_softplus=dt_softplus,
        initial_states=state,
        D=None if D is None else _of_heads("D", D, 1),
        dt_bias=None if dt_bias is None else _of_heads("dt_bias", dt_bias, 1),
    )
    return inputs, False, ""


def _of_heads(name: str, tensor: Tensor, dims: int) -> Tensor:
    """The value for each head of a tensor that repeats it over the dimensions after the first
    `dims`, as a view; the tensor itself if it has only these.  Raises ValueError if the values in
    the other dimensions differ.

    name: of the tensor, for the message.
    """
    first = tensor
    for _ in range(tensor.ndim - dims):
        first = first.select(-1, 0)
    # strides of 0: the values are in memory once, and need no comparison
    is_expanded = not any(tensor.stride()[dims:])
    if not is_expanded and not bool((tensor.flatten(dims) == first[..., None]).all()):
        raise ValueError(f"{name} differs between the channels of a head")
    return first


def read_step(
    *,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
) -> kernels.SSDInputs:
    """Packed inputs from a definition of one decode step: each sequence has one token, and begins
    with the state in its slot of the pool `state`.

    Raises ValueError as `bind_step` does, and for a slot outside of the pool, also -1, by which a
    server marks padding.
    """
    inputs: kernels.SSDInputs
    inputs, _, _ = bind_step(
        torch.nn.Identity(),  # a mixer without attributes
        states_in(state, state_batch_indices),
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias=dt_bias,
        dt_softplus=True,
    )
    tokens = {name: getattr(inputs, name).flatten(0, 1)[None] for name in ("x", "dt", "B", "C")}
    return replace(inputs, **tokens, cu_seqlens=torch.arange(len(x) + 1, device=x.device))


_DEFINITION = Definition(
    name="mamba_ssu_decode_h{nheads}_d{head_dim}_s{dstate}_ng{ngroups}",
    tokens=("batch_size",),
    sequences="batch_size",
    read=read_step,
)


def gate_bytes(item: int, _sizes: Mapping[str, int]) -> int:
    """`CallBinding.gate_bytes`: a head has one dt, in the model's dtype.  Mixers pass no z."""
    return item


BINDING: CallBinding[kernels.SSDInputs] = CallBinding(
    function="mamba2_chunk_scan",
    step="mamba2_selective_state_update",
    bind=bind,
    bind_step=bind_step,
    refused=("seq_idx", "cu_seqlens", "return_varlen_states"),
    views=("x", "B", "C"),
    per_position=("dt", "z"),
    gate_bytes=gate_bytes,
    replacement=partial(computed, deferred("ssd.reference:ssd_chunked")),
)


# --- other libraries


_MAMBA = "mamba-ssm"
_MAMBA_VERSION = deferred("ssd.adapters:mamba_ssm_version")


def _mamba_ssm_precisions(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    """The precisions of `mamba_ssm`.  It multiplies fp32 inputs in tf32, which is a relaxed
    precision.  Some versions pass states from chunk to chunk in the dtype of the inputs only.
    """
    if dtype == "fp32":
        return requested_precisions(dtype, "relaxed", ("fp32",))
    if adapters.mamba_ssm_passes_any_states():
        return requested_precisions(dtype, "exact", (dtype, "fp32"))
    return requested_precisions(dtype, "exact", (dtype,))


def _published_precisions(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    """The precisions of the published kernel: that of its setting "high", exact intermediates and
    fp32 states; with fp16 inputs also that of "medium", relaxed intermediates and fp16 states, and
    each of the two with the state dtype of the other.
    """
    if dtype == "fp16":
        return requested_precisions(dtype, "all", ("fp32", "fp16"))
    return exact_fp32(dtype)


def _load_published(checkout: Path | None) -> Implementation:
    """`Library.load` of the published kernel."""
    assert checkout is not None  # because the library has a `repository`
    return replace(
        adapters.load_published(checkout),
        version=adapters.published_version(checkout),
        precisions=_published_precisions,
    )


def _fork_precisions(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    """The precisions of the servers' forks of `mamba_ssm`: a server chooses the dtype of its
    states.
    """
    return requested_precisions(dtype, "exact", tuple(dict.fromkeys((dtype, "fp32"))))


LIBRARIES = {
    "mamba_ssm": installed_library(
        _MAMBA,
        deferred("ssd.adapters:load_mamba_ssm"),
        _mamba_ssm_precisions,
        version=_MAMBA_VERSION,
    ),
    "selective_state_update": installed_library(
        _MAMBA,
        deferred("ssd.servers:load", "selective_state_update"),
        exact_fp32,
        version=_MAMBA_VERSION,
    ),
    **generate.of_servers("ssd.servers:load", _fork_precisions),
    "published": Library(
        load=_load_published,
        hint="Give a checkout of github.com/RishiAstra/mamba.",
        repository="github.com/RishiAstra/mamba",
    ),
    "model": generate.model("ssd.adapters:load_model"),
}


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """`Operator.refusal`: every rank takes the same number of heads.  Groups are divided too,
    except for a single group, which is on every rank.
    """
    heads, groups = sizes["nheads"], sizes["ngroups"]
    if heads % ranks:
        return f"its {heads} heads cannot be divided by {ranks}"
    if groups % ranks and groups != 1:
        return (
            f"its {groups} groups cannot be divided by {ranks}, and only a single group is "
            "repeated on every rank"
        )
    return ""


OPERATOR = Operator(
    name="ssd",
    title="SSD (Mamba-2)",
    layers="Mamba-2",
    served="prompts: vllm, sglang; steps: vllm_step, sglang_step",
    load_inputs=lambda: kernels.SSDInputs,
    mixer_sizes={
        "nheads": "num_heads",
        "headdim": "head_dim",
        "dstate": "ssm_state_size",
        "ngroups": "n_groups",
        "chunk_size": "chunk_size",
    },
    words=f"{SIZE_WORDS}, chunk {{chunk_size}}",
    stages=STAGES,
    binding=BINDING,
    oracle=ORACLE,
    generated=GENERATOR,
    libraries=LIBRARIES,
    load_tuning=lambda: ssd_tuning.TUNING,
    load_definitions=lambda: (_DEFINITION,),
    refusal=refusal,
    divided={
        "x": 2,
        "dt": 2,
        "A": 0,
        "B": 2,
        "C": 2,
        "D": 0,
        "z": 2,
        "dt_bias": 0,
        "initial_states": 1,
    },
)
