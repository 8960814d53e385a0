"""Inputs and outputs of the operator.  `SSDInputs(...)` checks its arguments; `SSDInputs.unchecked`
leaves that to its caller.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssdprof.kernels.inputs import INPUT_DTYPES, Inputs, Output, tensor_signature

SSDOutput = Output


@dataclass(frozen=True, kw_only=True)
class SSDInputs(Inputs):
    """Inputs of one SSD (Mamba-2) call, whose mathematics is in `reference.py`; any strides.

    x, z: (b, l, h, p)
    dt: (b, l, h), before bias, softplus and limit
    A: (h), at most 0, which is not checked.  With -inf, which the oracle takes for a decay to 0,
        a head gets NaN from `unfused`, and from all kernels if a dt is 0
    B, C: (b, l, g, n), h a multiple of g
    D: (h) or (h, p)
    dt_bias: (h)
    chunk_size: positions per chunk by the model's configuration; kernels use `power_of_two_chunk`,
        or choose chunks of their own
    dt_softplus, dt_limit: whether softplus is applied to dt, and the limits (low, high) after it
    initial_states: (b, h, p, n), or (sequences, h, p, n) if packed
    cu_seqlens: (sequences + 1) int32 or int64, from 0 to l, on x's device: then b = 1 and sequence
        i is x[:, cu_seqlens[i]:cu_seqlens[i+1]].  The host does not read its values.
    state_every: if it is N > 0, the call returns the states after every N positions and at the
        end, (b * ceil(l / N), h, p, n); 0: only the final states
    state_indices: (sequences) int32 or int64: initial_states is a pool (slots, h, p, n), and
        sequence i begins with slot state_indices[i].  The host does not read the values; they must
        name slots
    write_indices, accepted: for a call that updates a pool in place (`kernels/inputs.py`)

    x, B, C and z share a dtype: fp32, fp16 or bf16.  Each other floating-point tensor may have any
    of these, or fp64.

    Raises ValueError, naming the argument.
    """

    operator: ClassVar[str] = "ssd"
    FIRST: ClassVar[str] = "x"
    VALUES: ClassVar[str] = "x"
    STATES: ClassVar[str] = "initial_states"
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    chunk_size: int = 256
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    initial_states: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state_every: int = 0
    state_indices: Tensor | None = None
    write_indices: Tensor | None = None
    accepted: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError, naming the argument that does not fit the others."""
        for name in ("x", "dt", "A", "B", "C"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a tensor, not None")
        if self.x.ndim != 4:
            raise ValueError(f"x must be (b, l, h, p), not {tuple(self.x.shape)}")
        if self.B.ndim != 4:
            raise ValueError(f"B must be (b, l, g, n), not {tuple(self.B.shape)}")
        b, l, h, p = self.x.shape
        g, n = self.B.shape[2:]
        if self.x.dtype not in INPUT_DTYPES:
            raise ValueError(f"x must be float32, float16 or bfloat16, not {self.x.dtype}")
        for name, tensor in (("x", self.x), ("B", self.B)):
            if tensor.numel() == 0:
                raise ValueError(f"{name} is empty: {tuple(tensor.shape)}")
        if h % g:
            raise ValueError(
                f"the number of heads ({h}) must be a multiple of B's number of groups ({g})"
            )
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size must be a positive integer, not {self.chunk_size!r}")
        if len(self.dt_limit) != 2 or not self.dt_limit[0] <= self.dt_limit[1]:
            raise ValueError(f"dt_limit must be (low, high), not {self.dt_limit}")
        if self.dt_limit[0] < 0 and not self.dt_softplus:
            raise ValueError(
                f"dt_limit must not let a negative dt pass, as {self.dt_limit} does without "
                "softplus"
            )
        self._check("dt", (b, l, h))
        self._check("A", (h,))
        self._check("B", (b, l, g, n), same_dtype=True)
        self._check("C", (b, l, g, n), same_dtype=True)
        self._check("z", (b, l, h, p), same_dtype=True)
        self._check("dt_bias", (h,))
        self._check("D", (h, p) if self.D is not None and self.D.ndim == 2 else (h,))
        self._check_sequences()
        pool = None if self.state_indices is None else self.initial_states
        self._check("initial_states", (self.sequences if pool is None else len(pool), h, p, n))
        self._check_devices()

    @property
    def kernel_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, except those for a pool, in the order in which kernels take them; None for
        those that the call does not have.
        """
        return (
            self.x,
            self.dt,
            self.A,
            self.B,
            self.C,
            self.D,
            self.z,
            self.dt_bias,
            self.initial_states,
            self.cu_seqlens,
        )

    @property
    def pool_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors for a pool, in the order in which the recurrent kernel takes them."""
        return self.state_indices, self.accepted, self.write_indices

    @property
    def signature(self) -> Hashable:
        """Equal for inputs that differ only in the values of their tensors, and in addresses by a
        multiple of 16 bytes.  It determines whether inputs fit together, which kernels run, and
        what Triton compiles.
        """
        return (
            *map(tensor_signature, (*self.kernel_tensors, *self.pool_tensors)),
            self.chunk_size,
            bool(self.dt_softplus),
            *map(float, self.dt_limit),
            self.state_every,
        )

    @property
    def power_of_two_chunk(self) -> int:
        """The largest power of two up to chunk_size, limited to 16 .. 256.  It affects speed and
        rounding only.
        """
        return min(256, max(16, 1 << (self.chunk_size.bit_length() - 1)))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a layer, by name."""
        (nheads, headdim), (ngroups, dstate) = self.x.shape[2:], self.B.shape[2:]
        return {"nheads": nheads, "headdim": headdim, "dstate": dstate, "ngroups": ngroups}

    @property
    def states_shape(self) -> tuple[int, int, int, int]:
        """The shape of one state for each sequence, (sequences, h, p, n)."""
        return (self.sequences, self.x.shape[2], self.x.shape[3], self.B.shape[3])

    @property
    def heads_per_group(self) -> int:
        """Heads that share B and C."""
        return self.x.shape[2] // self.B.shape[2]
