"""The Triton kernels that vLLM and SGLang run for Mamba-2 layers, and `mamba_ssm`'s for a step.

vllm, sglang             prompts, all sequences as one pack: five kernels, forks of those of
                         `mamba_ssm`.  What a server computes on the host, such as which chunk
                         belongs to which sequence, is prepared before the call, and does not count
                         in its time
selective_state_update   `mamba_ssm`'s kernel for a token of each sequence, on a pool in place
vllm_step, sglang_step   the servers' forks of `selective_state_update`, also for several tokens of
                         each sequence, as in the verification of drafted tokens

The import of a server's whole package would patch torch and transformers.  So only its modules
with kernels are imported.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import torch

from ssdprof.kernels.adapters import (
    SHORT,
    Tunings,
    bounds_of,
    import_kernels,
    library_kernel,
    once,
    too_long,
)
from ssdprof.kernels.pools import Bound, Slots, pool_kernel
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, Reasons, UnsupportedError, first_reason
from ssdprof.kernels.ssd.adapters import uneven_chunks
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

_VLLM = "vllm.model_executor.layers.mamba.ops"
_SGLANG = "sglang.kernels.ops.mamba.triton_ops"
_MAMBA_STEP = "selective_state_update"
# modules of a server's package whose kernels tune themselves
_TUNED = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")

StepCall = Callable[[torch.Tensor], torch.Tensor]  # (pool) -> out


# --- prompts


def _sequence_chunks(inputs: SSDInputs) -> dict[str, torch.Tensor]:
    """vLLM's arguments about chunks: the first chunk of a sequence begins with the sequence.

    Reads the bounds of sequences on the host.  Raises UnsupportedError for an empty sequence: it
    has no last chunk, from which vLLM takes its final state.
    """
    bounds = bounds_of(inputs).int()
    starts: list[int] = []
    sequence_of_chunk: list[int] = []
    last_chunks: list[int] = []  # of each sequence
    for sequence, (start, stop) in enumerate(pairwise(bounds.tolist())):
        if start == stop:
            raise UnsupportedError("vllm: no empty sequences")
        chunk_starts = range(start, stop, inputs.chunk_size)
        starts += chunk_starts
        sequence_of_chunk += [sequence] * len(chunk_starts)
        last_chunks.append(len(starts) - 1)
    integers = partial(torch.tensor, dtype=torch.int32, device=inputs.device)
    return {
        "cu_seqlens": bounds,
        "cu_chunk_seqlens": integers([*starts, bounds[-1]]),
        "last_chunk_indices": integers(last_chunks),
        "seq_idx": integers(sequence_of_chunk),
        "final_state_indices": torch.arange(inputs.sequences, device=inputs.device).int(),
    }


def _common_chunks(inputs: SSDInputs) -> dict[str, torch.Tensor]:
    """SGLang's arguments about chunks: the pack is cut into chunks regardless of its sequences, and
    a sequence that begins inside a chunk begins a part of the chunk.  Parts are listed only if
    there are initial states; then the bounds of sequences are read on the host.
    """
    size = inputs.chunk_size
    bounds = bounds_of(inputs).int()
    sequences = torch.arange(inputs.sequences, device=inputs.device).int()
    sequence_of_token = sequences.repeat_interleave(bounds.diff())[None]
    arguments = {"cu_seqlens": bounds, "seq_idx": sequence_of_token}
    if inputs.initial_states is not None:
        tokens = int(bounds[-1])
        # parts begin with chunks and with sequences; an empty last sequence has none
        starts = {*range(0, tokens, size), *bounds[:-1].tolist()} - {tokens}
        part_starts = sorted(starts)
        integers = partial(torch.tensor, dtype=torch.int32, device=inputs.device)
        arguments["chunk_indices"] = integers([start // size for start in part_starts])
        arguments["chunk_offsets"] = integers([start % size for start in part_starts])
    return arguments


# name -> the package of the server's kernels, their function, and its arguments about chunks
_PROMPTS = {
    "vllm": (_VLLM, "mamba_chunk_scan_combined_varlen", _sequence_chunks),
    "sglang": (_SGLANG, "mamba_chunk_scan_combined", _common_chunks),
}


def load_prompt(name: str) -> Implementation:
    """A server's kernels for prompts.  Raises ImportError if they cannot be imported."""
    package, function_name, chunk_arguments = _PROMPTS[name]
    function = getattr(import_kernels(f"{package}.ssd_combined"), function_name)
    tunings = Tunings(import_kernels(f"{package}.{tuned}") for tuned in _TUNED)
    chunks_of = once(chunk_arguments)
    is_vllm = name == "vllm"

    def call(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        tunings.use_for(inputs.x.shape[0] * inputs.x.shape[1] <= SHORT)
        out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
        tensors = inputs.tensors | {"out": out}
        arguments: dict[str, Any] = {}
        for key in ("x", "dt", "B", "C", "z", "out"):
            if key in tensors:
                pack = tensors[key].flatten(0, 1)  # (tokens, ...)
                arguments[key] = pack if is_vllm else pack[None]
        states = torch.empty(inputs.states_shape, device=inputs.device)
        if is_vllm:
            arguments["final_states_out"] = states
        else:
            arguments["return_varlen_states"] = True
        with torch.cuda.device(inputs.x.get_device()), torch.no_grad():
            returned = function(
                **arguments,
                A=inputs.A,
                chunk_size=inputs.chunk_size,
                D=inputs.D,
                dt_bias=inputs.dt_bias,
                initial_states=inputs.initial,
                dt_softplus=inputs.dt_softplus,
                dt_limit=inputs.dt_limit,
                state_dtype=precision.state_dtype,
                **chunks_of(inputs),
            )
        return SSDOutput(out, states if is_vllm else returned)

    @first_reason
    def unsupported(inputs: SSDInputs, precision: Precision) -> Reasons:
        yield not precision.exact, "exact intermediates only"
        yield inputs.x.dtype == torch.float32, "fp16 and bf16 inputs only"
        yield uneven_chunks(inputs)

    reason = "it tunes itself in each process; lists of chunks are prepared outside of its time"
    plan = Plan(variant="triton", launches=5, reason=reason)
    return library_kernel("ssd", name, unsupported, call, plan)


# --- steps


def _step_arguments(
    inputs: SSDInputs, tokens: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The arguments that the kernels of all libraries for steps share.

    tokens: reshapes a tensor (b, l, ...) as the kernel takes tokens
    """
    heads, headdim, dstate = inputs.states_shape[1:]
    zeros = torch.zeros(heads, device=inputs.device)  # for D and dt_bias, if there are none
    tensors = inputs.tensors
    arguments: dict[str, Any] = {
        name: tokens(tensors[name]) for name in ("x", "B", "C", "z") if name in tensors
    }
    for name in ("D", "dt_bias"):
        of_heads = tensors.get(name, zeros)  # (heads), or (heads, headdim)
        arguments[name] = of_heads if of_heads.ndim == 2 else of_heads[:, None].expand(-1, headdim)
    # dt and A are expanded, too: strides of 0 tell the kernels that a head has one number
    dt = tokens(inputs.dt)[..., None]
    return arguments | {
        "dt": dt.expand(*dt.shape[:-1], headdim),
        "A": inputs.A[:, None, None].expand(heads, headdim, dstate),
        "dt_softplus": inputs.dt_softplus,
    }


def _tables(inputs: SSDInputs, slots: Slots) -> dict[str, Any]:
    """vLLM's arguments about slots.

    One token of each sequence that overwrites its slot needs a list of slots.  Other calls, such as
    a verification of several tokens, have two tables with a column for each token: of slots to read
    and of slots to write.
    """
    read = slots.read.int()
    if slots.overwrites and inputs.cu_seqlens is None and inputs.length == 1:
        return {"state_batch_indices": read, "null_block_id": -1}
    written = slots.written.int()
    return {
        "state_batch_indices": read[:, None].expand(written.shape),
        "dst_state_batch_indices": written,
        "null_block_id": -1,
        "num_accepted_tokens": torch.ones_like(read),
        "cu_seqlens": bounds_of(inputs).int(),
    }


def _bind_vllm(function: Any, inputs: SSDInputs, slots: Slots) -> StepCall:
    """vLLM's kernel, bound to a call.  It takes the tokens of all sequences as (tokens, ...)."""
    arguments = _step_arguments(inputs, lambda tensor: tensor.flatten(0, 1))
    arguments |= _tables(inputs, slots)

    def run(pool: torch.Tensor) -> torch.Tensor:
        out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=pool.device)
        function(pool, **arguments, out=out.flatten(0, 1))
        return out

    return run


def _bind_sglang(function: Any, inputs: SSDInputs, slots: Slots) -> StepCall:
    """SGLang's kernel, bound to a call.  It takes tokens as (b, l, ...).  A verification does not
    change the slots that it reads, and writes all new states to a buffer.  Raises UnsupportedError
    for write_indices without a buffer (`Slots.refuse_tables`).
    """
    slots.refuse_tables("sglang_step")
    arguments = _step_arguments(inputs, lambda tensor: tensor)
    arguments["state_batch_indices"] = slots.read.int()

    def run(pool: torch.Tensor) -> torch.Tensor:
        out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=pool.device)
        function(pool, **arguments, **slots.verification(inputs, pool), out=out)
        return out

    return run


def _bind_mamba_ssm(function: Any, inputs: SSDInputs, slots: Slots) -> StepCall:
    """mamba_ssm's kernel, bound to a call with one token of each sequence.  It takes tokens as
    (b, ...).  Raises UnsupportedError for write_indices.
    """
    slots.refuse_tables(_MAMBA_STEP)
    arguments = _step_arguments(inputs, lambda tensor: tensor[:, 0])
    arguments["state_batch_indices"] = slots.read.int()

    def run(pool: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = function(pool, **arguments)
        return out[:, None]

    return run


# name -> the module of the function, and how it is bound to a call
_STEPS = {
    _MAMBA_STEP: (f"mamba_ssm.ops.triton.{_MAMBA_STEP}", _bind_mamba_ssm),
    "vllm_step": (f"{_VLLM}.mamba_ssm", _bind_vllm),
    "sglang_step": (f"{_SGLANG}.mamba_ssm", _bind_sglang),
}


def load_step(name: str) -> Implementation:
    """A kernel for the next token of each sequence, or for a few tokens.  Raises ImportError if it
    cannot be imported.
    """
    module, bind_function = _STEPS[name]
    function = import_kernels(module).selective_state_update

    def bind(inputs: SSDInputs, slots: Slots) -> Bound:
        return bind_function(function, inputs, slots), inputs.x

    @first_reason
    def unsupported(inputs: SSDInputs, precision: Precision) -> Reasons:
        yield precision != Precision(), "exact intermediates and fp32 states only"
        yield inputs.dt_limit != (0.0, inf), "no dt_limit"
        packed = inputs.cu_seqlens is not None
        yield name == _MAMBA_STEP and (packed or inputs.length > 1), "one token of each sequence"
        yield name == "sglang_step" and packed, "as many tokens of each sequence"
        yield too_long(inputs)

    reason = "each call begins with a copy of the states, in its time"
    plan = Plan(variant="triton", launches=2, reason=reason)
    keeps_states = name != _MAMBA_STEP  # after each token
    return pool_kernel("ssd", name, unsupported, bind, plan, keeps=keeps_states)


def load(name: str) -> Implementation:
    """A server's kernel, or mamba_ssm's for a step, by its name.  Raises ImportError if it cannot
    be imported.
    """
    return load_prompt(name) if name in _PROMPTS else load_step(name)
