"""Memory between guards, which detect writes out of bounds.

The guards hold bytes of 0xFF, a NaN in every floating dtype, so that reads out of bounds give NaN in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdprof.measure.fingerprint import fingerprint
from ssdprof.operators import tensors

GUARD = 1 << 20  # bytes on each side
_ALIGNED = 512  # bytes; a copy keeps the tensor's offset within such a block
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "zeros", "zeros_like",
                "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of memory between two guards.  names: of the tensors in it."""

    memory: torch.Tensor
    start: int
    stop: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, size: int, offset: int, device: torch.device, names: tuple[str, ...]) -> _Block:
        """size: bytes between the guards.  offset: where the first of them lies within `_ALIGNED` bytes."""
        start = GUARD + offset
        whole = -(-(start + size + GUARD) // 8)
        memory = torch.full((whole,), -1, dtype=torch.int64, device=device).view(torch.uint8)
        return cls(memory=memory, start=start, stop=start + size, names=names)

    def overrun(self) -> str:
        """ "before", "behind" or "around", by which guard has changed; empty if none has."""
        before, behind = (
            not bool((side == 0xFF).all()) for side in (self.memory[: self.start], self.memory[self.stop :])
        )
        return "around" if before and behind else "before" if before else "behind" if behind else ""


class GuardedInputs:
    """A copy of an operator's inputs between guards, with the same strides and alignment.

    inputs: the copy.  Tensors that share memory share it in the copy.
    """

    def __init__(self, inputs: Any) -> None:
        given = tensors.tensors(inputs)
        self._blocks = [_copied(group, given) for group in _sharing(given)]
        copies = {name: _placed(block, given[name], given) for block in self._blocks for name in block.names}
        self.inputs = replace(inputs, **copies)
        self._elements = {name: fingerprint(tensor) for name, tensor in copies.items()}
        self._bytes = [_bytes(block) for block in self._blocks]

    def damage(self) -> str:
        """A phrase on writes to the inputs or next to them; empty if there were none."""
        now = tensors.tensors(self.inputs)
        changed = [name for name, before in self._elements.items() if fingerprint(now[name]) != before]
        if changed:
            return f"it changes its inputs: {', '.join(changed)}"
        for block, before in zip(self._blocks, self._bytes, strict=True):
            if where := block.overrun():
                return f"it writes out of bounds, {where} its inputs {', '.join(block.names)}"
            if _bytes(block) != before:
                return f"it writes out of bounds, between the elements of its inputs {', '.join(block.names)}"
        return ""


@contextmanager
def guarded_allocations() -> Iterator[Callable[[], str]]:
    """While the context is open, torch allocates tensors between guards.

    The value is a function that describes writes next to them, to be called in the context; "" if there were none.
    """
    mode = _GuardedAllocations()
    with mode:
        yield mode.damage


class _GuardedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: list[_Block] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _ALLOCATIONS or made.layout != torch.strided or not made.numel():
            return made
        if made.is_meta:  # it has no memory
            return made
        shape = f"a tensor of shape {tuple(made.shape)} that it allocates"
        block = _Block.of(_extent(made), 0, made.device, (shape,))
        self._blocks.append(block)
        placed = block.memory[block.start : block.stop].view(made.dtype).as_strided(made.shape, made.stride())
        return placed.copy_(made) if "empty" not in func.overloadpacket.__name__ else placed

    def damage(self) -> str:
        for block in self._blocks:
            if where := block.overrun():
                return f"it writes out of bounds, {where} {block.names[0]}"
        return ""


def unwritten(tensor: torch.Tensor) -> int:
    """The number of elements whose bytes all equal those of the guards.  In a tensor made under
    `guarded_allocations`, they were never written.  A NaN that a GPU or torch computes has other bits."""
    elements = tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
    return int((elements == 0xFF).all(-1).sum())


def _sharing(given: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Names of tensors that share memory, together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in given.items():
        groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [tuple(names) for names in groups.values()]


def _copied(names: tuple[str, ...], given: Mapping[str, torch.Tensor]) -> _Block:
    """The memory from the first to the last byte that the tensors reach."""
    first = min(given[name].data_ptr() for name in names)
    size = max(given[name].data_ptr() + _extent(given[name]) for name in names) - first
    one = given[names[0]]
    storage = one.untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=one.device)
    source.set_(storage, first - storage.data_ptr(), (size,), (1,))
    block = _Block.of(size, first % _ALIGNED, one.device, names)
    block.memory[block.start : block.stop].copy_(source)
    return block


def _placed(block: _Block, tensor: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor's copy in the block."""
    start = block.start + tensor.data_ptr() - min(given[name].data_ptr() for name in block.names)
    return block.memory[start : start + _extent(tensor)].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, those between strides counted."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes(block: _Block) -> tuple[int, ...]:
    """A fingerprint of the block, with its guards."""
    return fingerprint(block.memory.view(torch.int64))
