"""Outputs, workspace and prepared launch of a kernel that computes SSD in one launch."""

from collections.abc import Callable

import torch

from ssdprof.kernels.inputs import Output, PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.ssd.inputs import SSDInputs

# name -> number of elements, and dtype, of each part of a workspace
Buffers = dict[str, tuple[int, torch.dtype]]


def nbytes(buffers: Buffers) -> int:
    """Bytes of a workspace."""
    return sum(count * dtype.itemsize for count, dtype in buffers.values())


def allocated(buffers: Buffers, device: torch.device) -> dict[str, torch.Tensor]:
    """New tensors for the parts of a workspace, by name.

    `sync`, with tickets and flags, is zeroed.  Callers put it first, so that the GPU zeroes it
    while the host prepares the launch.  Torch aligns new tensors on a GPU to far more than 16
    bytes, so that launches need not check their alignment.
    """
    tensors = {}
    for name, (count, dtype) in buffers.items():
        allocate = torch.zeros if name == "sync" else torch.empty
        tensors[name] = allocate(count, dtype=dtype, device=device)
    return tensors


def prepared(
    launcher: Launcher,
    programs: int,
    inputs: SSDInputs,
    tensors: Callable[..., tuple[object, ...]],
    buffers: Buffers,
    *,
    in_place: bool = False,
    out_dtype: torch.dtype | None = None,
) -> PreparedLaunch:
    """The prepared launch of a kernel, with new outputs and a new workspace at every call.

    programs: number of programs of the launch
    inputs: any inputs of the signature
    tensors: a function of the inputs, out, final states and, by name, the buffers, which returns
        the tensors that the launcher takes
    in_place: final states overwrite the initial ones, which there must be
    out_dtype: of out; None: x's

    Without `in_place`, final states are fp32.
    """
    index = inputs.x.get_device()
    shape = inputs.final_shape

    def call(call_inputs: SSDInputs) -> Output:
        x = call_inputs.x
        final = call_inputs.initial_states if in_place else None
        with torch.cuda.device(index):  # no effect for -1, the CPU
            workspace = allocated(buffers, x.device)
            out = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
            if final is None:
                final = torch.empty(shape, dtype=torch.float32, device=x.device)
            launcher(programs, *tensors(call_inputs, out, final, **workspace))
        return Output(out, final)

    return call
