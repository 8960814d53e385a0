"""Repeats calls with varied arguments, and checks that every launch of a kept kernel is correct.

A launch is correct if Triton would select the kernel that it returned the first time, and if all other arguments are
those of a call without kept kernels.  `test_launch.py` runs this file in a separate process, where kernels are not
interpreted.  Nothing is compiled: a record of Triton's specialization replaces each compiled kernel.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from compile_target import _AbsentGpu
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from ssdprof.kernels import choice
from ssdprof.kernels import launch as launching
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd import fused
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.unfused import five_stages

CALLS, SEEDS = 1500, 30


class Launched(NamedTuple):
    """A launch, as text: the addresses of new tensors differ in every call."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: list[str]


launches: list[Launched] = []
counts = {"first": 0, "repeated": 0, "wrong": 0}  # wrong: Triton would have launched another kernel


def specialized(kernel: JITFunction, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], str]:
    """All arguments in order, and Triton's specialization: types, constants, alignment, options."""
    binder = kernel.create_binder()[-1]
    bound, specialization, rest = binder(*arguments, debug=False, instrumentation_mode="", **options)
    return list(bound.values()), f"{specialization} {rest}"


class Kept:
    """Replaces a compiled kernel."""

    def __init__(self, kernel: JITFunction, specialization: str, options: dict[str, Any]) -> None:
        self._kernel, self._specialization = kernel, specialization
        self._options = {name: value for name, value in options.items() if name not in kernel.arg_names}

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            bound, specialization = specialized(self._kernel, arguments, self._options)
            counts["repeated"] += 1
            counts["wrong"] += specialization != self._specialization or len(bound) != len(arguments)
            launches.append(Launched(self._kernel.__name__, grid, in_words(arguments)))

        return run


def first_launch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Kept:  # noqa: ARG001
    bound, specialization = specialized(self, arguments, options)
    counts["first"] += 1
    launches.append(Launched(self.__name__, grid, in_words(bound)))
    return Kept(self, specialization, options)


def in_words(arguments: Iterable[Any]) -> list[str]:
    words: list[str] = []
    for value in arguments:
        if isinstance(value, tuple):
            words.append(str(in_words(value)))
        elif isinstance(value, torch.Tensor):
            words.append(f"{value.dtype} {tuple(value.shape)} {value.stride()}")
        elif isinstance(value, TensorDescriptor):
            base = value.base
            words.append(f"{base.dtype} {value.shape} {value.strides} {value.block_shape} {value.layout}")
        else:
            words.append(repr(value))
    return words


def launched(call: Callable[[], object]) -> list[Launched]:
    launches.clear()
    call()
    return list(launches)


class Draw:
    """Choices that are the same for the same seed, except for one in fifty."""

    def __init__(self, seed: int, others: random.Random) -> None:
        self._random, self._others = random.Random(seed), others

    def __call__(self, *choices: Any) -> Any:
        usual = self._random.choice(choices)
        return self._others.choice(choices) if self._others.random() < 0.02 else usual

    def tensor(self, *shape: int, dtype: torch.dtype, step: int = 1) -> torch.Tensor:
        """A view of a wider tensor, beginning at a multiple of `step` elements."""
        rows, columns = shape[:-1], shape[-1]
        width, offset = columns + self(0, 8, step), self(0, 8, step, 3 * step)
        elements = torch.Size(rows).numel() * width
        return torch.empty(elements + offset, dtype=dtype)[offset:].view(*rows, width)[..., :columns]


def inputs_of(draw: Draw, *, for_hopper: bool) -> SSDInputs:
    """Inputs with any alignment and order of axes that the kernel supports."""
    step = 8 if for_hopper else 1
    dtype = draw(torch.float16, torch.bfloat16) if for_hopper else draw(torch.float32, torch.bfloat16)
    packed = draw(True, False, False)
    batch, seqlen = 1 if packed else draw(1, 2), draw(1, 16, 200, 500)
    heads, groups = 4 if for_hopper else draw(2, 4), draw(1, 2)
    headdim, dstate = (draw(64, 80), 64) if for_hopper else (draw(8, 16), 16)
    sequences = draw(1, 3) if packed else batch

    def columns(count: int, size: int) -> torch.Tensor:
        return draw.tensor(batch, seqlen, count * size, dtype=dtype, step=step).unflatten(-1, (count, size))

    def fp32(*shape: int) -> torch.Tensor:
        return draw.tensor(*shape, dtype=torch.float32)

    states = fp32(sequences, heads, headdim, dstate)
    return SSDInputs(
        x=columns(heads, headdim), dt=draw.tensor(batch, seqlen, heads, dtype=draw(dtype, torch.float32)),
        A=draw(fp32(heads), fp32(heads, 2)[:, 0]), B=columns(groups, dstate), C=columns(groups, dstate),
        D=draw(None, fp32(heads), fp32(heads, headdim)), z=None if for_hopper else draw(None, columns(heads, headdim)),
        dt_bias=draw(None, fp32(heads)), dt_softplus=draw(True, False), dt_limit=draw((0.0, float("inf")), (0, 1)),
        initial_states=draw(None, states, states.transpose(2, 3).contiguous().transpose(2, 3)),
        cu_seqlens=torch.empty(sequences + 1, dtype=draw(torch.int32, torch.int64)) if packed else None, chunk_size=32,
    )  # fmt: skip


def main(name: str) -> None:
    triton.runtime.driver.set_active(_AbsentGpu(90))
    others = random.Random(name)
    run = five_stages if name == "unfused" else fused.run
    with (
        patch.object(JITFunction, "run", first_launch),
        patch.object(choice, "refuse_device", lambda *_: None),
        patch.object(fused.hopper_config, "unsupported", lambda _: "" if name == "hopper" else "anything"),
        patch.object(fused, "sm_count", lambda _: 132),
    ):
        for index in range(CALLS):
            draw = Draw(index % SEEDS, others)
            inputs = inputs_of(draw, for_hopper=name == "hopper")
            call = partial(run, inputs, Precision(state_dtype=draw(torch.float32, torch.bfloat16)))
            ours, before = launched(call), counts.copy()
            with patch.dict(fused.FUSED.launches, clear=True), patch.dict(launching._kept, clear=True):
                theirs = launched(call)
            counts.update(before)
            counts["wrong"] += ours != theirs
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1])
