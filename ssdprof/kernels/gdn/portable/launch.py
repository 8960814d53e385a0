"""The portable kernel: its workspace and its two launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import TL_DTYPE
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.portable.config import PortableConfig
from ssdprof.kernels.gdn.portable.factors import _gdn_factors_kernel
from ssdprof.kernels.gdn.portable.positions import slot_count
from ssdprof.kernels.gdn.portable.scan import _gdn_scan_kernel
from ssdprof.kernels.gdn.states import FinalStates
from ssdprof.kernels.gdn.unfused.precisions import inverse_products, operand_dtype
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.tensors import strides_of, tile_strides


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Shapes of the tensors that the first launch writes for the second, and the dtype of operands."""

    state_factor: tuple[int, ...]
    out_factor: tuple[int, ...]
    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    operand_dtype: torch.dtype

    @classmethod
    def of(cls, inputs: GDNInputs, precision: Precision, config: PortableConfig) -> Workspace:
        length, heads = inputs.v.shape[1:3]
        slots = slot_count(length, inputs.sequences, config.chunk, packed=inputs.cu_seqlens is not None)
        padded = triton.cdiv(inputs.q.shape[3], config.block_k) * config.block_k
        return cls(
            state_factor=(slots, heads, config.chunk, padded),
            out_factor=(slots, heads, config.chunk, config.chunk),
            rows=(slots, heads, 2, config.chunk),
            chunks=(slots, heads, 2),
            operand_dtype=operand_dtype(inputs.q.dtype, precision),
        )

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Uninitialised tensors, in the order of the fields."""
        operands, gates = (self.state_factor, self.out_factor), (self.rows, self.chunks)
        return (
            *(torch.empty(shape, dtype=self.operand_dtype, device=device) for shape in operands),
            *(torch.empty(shape, dtype=torch.float32, device=device) for shape in gates),
        )

    @property
    def bytes(self) -> int:
        operands = prod(self.state_factor) + prod(self.out_factor)
        return operands * self.operand_dtype.itemsize + 4 * (prod(self.rows) + prod(self.chunks))


class PortableLaunch:
    """A call without its tensors.  It serves all inputs of one `GDNInputs.signature` and keeps none of them."""

    def __init__(self, inputs: GDNInputs, precision: Precision, config: PortableConfig, *, state_v_first: bool) -> None:
        self._workspace = Workspace.of(inputs, precision, config)
        self._final_states = FinalStates.of(inputs, state_v_first=state_v_first)
        self._index = inputs.q.get_device()
        slots, heads, chunk, _ = self._workspace.state_factor
        self._factors_programs = slots * heads
        segments = inputs.sequences
        packed = inputs.cu_seqlens is not None
        if config.segment:
            segments = slot_count(inputs.v.shape[1], inputs.sequences, config.segment * chunk, packed=packed)
        self._scan_programs = segments * heads * triton.cdiv(inputs.v.shape[3], config.block_v)
        new = torch.empty(inputs.v.shape, device="meta")
        q_strides, k_strides, cu_strides = tile_strides(inputs.q), tile_strides(inputs.k), strides_of(inputs.cu_seqlens)
        spans = [chunk * one.stride(1) + one.shape[3] * one.stride(3) for one in (inputs.q, inputs.k, inputs.v, new)]
        spans += [
            inputs.q.shape[3] * strides[2] + inputs.v.shape[3] * strides[3]
            for strides in (strides_of(inputs.initial_state), self._final_states.strides)
            if strides
        ]
        wide = self._workspace.operand_dtype == torch.float32
        common: dict[str, Any] = {
            "VALUE_HEADS": heads,
            "VALUES_PER_KEY": inputs.values_per_key,
            "KEY_DIM": inputs.q.shape[3],
            "CHUNK": chunk,
            "BLOCK_K": config.block_k,
            "OPERAND": TL_DTYPE[self._workspace.operand_dtype],
            "ALIGNED": not packed and inputs.v.shape[1] % chunk == 0,
            "ALIGNMENT": _alignment(inputs.q, inputs.k, inputs.v),
            "OFFSET": tl.int32 if max(spans) < 2**31 else tl.int64,
        }
        sizes = (inputs.v.shape[1], inputs.sequences)
        self._factors = Launcher(
            _gdn_factors_kernel,
            (
                (q_strides, k_strides, inputs.g.stride(), inputs.beta.stride(), cu_strides),
                *sizes,
                inputs.scale_or_default,
            ),
            common
            | {
                "L2NORM": bool(inputs.use_qk_l2norm),
                "MERGE": tl.float16 if inputs.use_qk_l2norm and not wide else tl.float32,
                "MERGE_PRECISION": inverse_products(self._workspace.operand_dtype),
                "num_warps": config.factors_warps,
            }
            | ({"maxnreg": config.factors_registers} if config.factors_registers else {}),
        )
        self._scan = Launcher(
            _gdn_scan_kernel,
            (
                (
                    q_strides, k_strides, tile_strides(inputs.v), strides_of(inputs.initial_state), cu_strides,
                    tile_strides(new), self._final_states.strides,
                ),
                *sizes,
            ),
            common
            | {
                "VALUE_DIM": inputs.v.shape[3],
                "SEGMENT": config.segment,
                "CUT": config.segment > 0,
                "BLOCK_V": config.block_v,
                "V_ROWS": config.v_rows,
                "SCAN_STAGES": config.scan_stages,
                "num_warps": config.num_warps,
            },
        )  # fmt: skip

    def __call__(self, inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(self._index):  # no effect for -1, the CPU
            device = inputs.q.device
            factors = self._workspace.allocate(device)
            self._factors(
                self._factors_programs, inputs.q, inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens, *factors
            )
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = self._final_states.empty(device)
            self._scan(
                self._scan_programs, inputs.q, inputs.k, inputs.v, *factors, inputs.initial_state, inputs.cu_seqlens,
                out, final_states,
            )  # fmt: skip
        return GDNOutput(out, final_states)


def _alignment(*tensors: torch.Tensor) -> int:
    """Alignment in bytes, up to 16, of all rows of these tensors.

    Triton itself detects it only for strides that are multiples of 16 elements.
    """
    strides = (stride * one.element_size() for one in tensors for stride in one.stride()[:3])
    return gcd(16, *strides, *(one.data_ptr() for one in tensors))
