"""Inputs and outputs of the operator.  The constructor of the inputs checks them; `unchecked` does
not.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ssdprof.kernels.inputs import INPUT_DTYPES, Inputs, Output, tensor_signature

GDNOutput = Output
MAX_DIM = 256  # largest K and V


@dataclass(frozen=True, kw_only=True)
class GDNInputs(Inputs):
    """Inputs of one gated-delta-rule call; any strides.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T
        out_t = S_t^T (scale q_t)

    q, k: (B, T, H, K)
    v: (B, T, HV, V), HV a multiple of H: value head i uses q and k head i // (HV / H)
    K and V: 1 to 256, independent of each other
    g: (B, T, HV), natural logarithm of the decay.  A decay is at most 1: a g above 0 counts as 0,
        clamped on the device, and -inf forgets everything
    beta: (B, T, HV), any value; models use 0 to 1, or 0 to 2
    initial_state: (sequences, HV, K, V), K before V
    scale: K ** -0.5 if None
    use_qk_l2norm: q and k are divided by sqrt(sum of their squares + 1e-6) first
    chunk_size: positions per chunk of the chunked algorithm; a power of two, at least 16
    cu_seqlens: (sequences + 1) int32 or int64, from 0 to T, on q's device: then B = 1 and sequence
        i is q[:, cu_seqlens[i]:cu_seqlens[i+1]], possibly empty.  The host does not read its
        values.
    state_every: N: the call returns the states after every N positions and at the end,
        (B * ceil(T / N), HV, K, V); 0: only the final states
    state_indices: (sequences) int32 or int64: initial_state is a pool (slots, HV, K, V), and
        sequence i begins with slot state_indices[i].  A server's pool (slots, HV, V, K) is passed
        as pool.mT.  The host does not read the values; they must name slots
    write_indices, accepted: for a call that updates a pool in place (`kernels/inputs.py`)

    q, k and v share a dtype: fp32, fp16 or bf16.  g, beta and initial_state may have any of these,
    and fp64.

    Raises ValueError, naming the argument.  Source: Yang, Kautz and Hatamizadeh 2024
    (arXiv:2412.06464).
    """

    operator: ClassVar[str] = "gdn"
    FIRST: ClassVar[str] = "q"
    VALUES: ClassVar[str] = "v"
    STATES: ClassVar[str] = "initial_state"
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    scale: float | None = None
    use_qk_l2norm: bool = False
    chunk_size: int = 64
    cu_seqlens: Tensor | None = None
    state_every: int = 0
    state_indices: Tensor | None = None
    write_indices: Tensor | None = None
    accepted: Tensor | None = None

    def check(self) -> None:
        """Raises ValueError, naming the argument that does not fit the others, or is not
        supported.
        """
        for name in ("q", "k", "v", "g", "beta"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a tensor, not None")
        for name, tensor, dims in (("q", self.q, "(B, T, H, K)"), ("v", self.v, "(B, T, HV, V)")):
            if tensor.ndim != 4:
                raise ValueError(f"{name} must be {dims}, not {tuple(tensor.shape)}")
            if tensor.numel() == 0:
                raise ValueError(f"{name} is empty: {tuple(tensor.shape)}")
            if tensor.shape[3] > MAX_DIM:
                raise ValueError(
                    f"{name}'s last dimension is at most {MAX_DIM}, not {tensor.shape[3]}"
                )
        batch, length, heads, key_dim = self.q.shape
        value_heads, value_dim = self.v.shape[2:]
        if self.q.dtype not in INPUT_DTYPES:
            raise ValueError(f"q must be float32, float16 or bfloat16, not {self.q.dtype}")
        if value_heads % heads:
            raise ValueError(f"v's heads ({value_heads}) must be a multiple of q's ({heads})")
        if self.chunk_size < 16 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(
                f"chunk_size must be a power of two of at least 16, not {self.chunk_size}"
            )
        self._check("k", (batch, length, heads, key_dim), same_dtype=True)
        self._check("v", (batch, length, value_heads, value_dim), same_dtype=True)
        self._check("g", self.gate_shape)
        self._check("beta", (batch, length, value_heads))
        self._check_sequences()
        state = self.initial_state
        if state is not None:
            # a pool may have any number of slots
            rows = self.sequences if self.state_indices is None else len(state)
            shape = rows, value_heads, key_dim, value_dim
            if tuple(state.shape) != shape:
                raise ValueError(
                    f"initial_state must have shape {shape}; with state_v_first, V before K"
                )
            self._check("initial_state", shape)
        self._check_devices()

    @property
    def kernel_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order in which the recurrent kernel takes them; None for those that
        the call does not have.
        """
        return (
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.initial_state,
            self.cu_seqlens,
            self.state_indices,
            self.accepted,
            self.write_indices,
        )

    @property
    def signature(self) -> Hashable:
        """Equal for inputs that differ only in the values of their tensors, and in addresses by a
        multiple of 16 bytes.

        It determines whether inputs fit together.  Together with the precision and the options of a
        call, it determines which kernels run, and what Triton compiles.
        """
        return (
            *map(tensor_signature, self.kernel_tensors),
            None if self.scale is None else float(self.scale),
            bool(self.use_qk_l2norm),
            self.chunk_size,
            self.state_every,
        )

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Shape of g: (B, T, HV)."""
        return tuple(self.v.shape[:3])

    @property
    def states_shape(self) -> tuple[int, int, int, int]:
        """Shape of initial states: (sequences, HV, K, V)."""
        return (self.sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3])

    @property
    def power_of_two_chunk(self) -> int:
        """Positions per chunk: chunk_size, which `check` requires to be a power of two."""
        return self.chunk_size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a layer, by name."""
        (key_heads, key_dim), (value_heads, value_dim) = self.q.shape[2:], self.v.shape[2:]
        return {
            "key_heads": key_heads,
            "value_heads": value_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
        }

    def slot_count(self, size: int) -> int:
        """The number of slots if sequences are cut into pieces of `size` positions, and each piece
        has one; an upper bound for packed sequences, whose lengths are on the device.
        """
        if self.cu_seqlens is not None:
            return self.length // size + self.sequences
        return self.sequences * -(-self.length // size)

    @property
    def values_per_key(self) -> int:
        """Value heads that share one q and k head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def scale_or_default(self) -> float:
        """The factor of q: `scale`, by default K ** -0.5."""
        return float(self.q.shape[3] ** -0.5 if self.scale is None else self.scale)


def state_strides(
    heads: int, key_dim: int, value_dim: int, *, v_first: bool
) -> tuple[int, int, int, int]:
    """Strides of states (sequences, HV, K, V) without gaps.  v_first: V precedes K in memory."""
    inner = (1, key_dim) if v_first else (value_dim, 1)
    return (heads * key_dim * value_dim, key_dim * value_dim, *inner)
