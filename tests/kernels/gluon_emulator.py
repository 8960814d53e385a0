"""Runs the source of the Hopper kernels on a CPU: Gluon's operations in torch, and the roles in
random order.

Each role is a thread, or one thread per lane if it has both lanes, and one thread runs at a time.
At a barrier, an atomic or a wait, the emulator switches to a random thread.  TMA copies happen at
some time in between.  A matrix product is computed when a thread waits for it: the latest time at
which the hardware may read its operands.  This reveals a slot that was released too early.  Shared
memory holds NaN at first.  Layouts have no effect.  Several programs are resident at once, and
another one begins when one has ended, in random order.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import ptx
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from ssdprof.kernels.gdn.hopper import launch as gdn_launch
from ssdprof.kernels.kda.hopper import launch as kda_launch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.ssd.hopper import launch as ssd_launch
from ssdprof.kernels.tensors import Part

THREADS = 128  # of a role, or of a lane of the first role
PATIENCE = 60.0  # seconds
ENOUGH = 100_000  # thread switches: far more than any test needs
SLOW = 0.02  # probability weight of a slow thread; others have 1


class Source(NamedTuple):
    """Kernels of one operator.

    launch: the module that launches them, in the kernels' package
    lanes: number of threads of the first role
    files: names of their modules, with the package if it is another, each after those that it
    imports
    in_order: programs wait for others of lower numbers, which a GPU starts first
    """

    launch: ModuleType
    lanes: int
    files: tuple[str, ...]
    in_order: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        package = self.launch.__name__.rpartition(".")[0]
        common = (f"ssdprof.kernels.{file}" for file in ("_gluon", "hopper.ring"))
        own = (
            f"ssdprof.kernels.{file}" if "." in file else f"{package}.{file}" for file in self.files
        )
        return (*common, *own)


SSD = Source(
    ssd_launch, 2, ("rings", "lanes", "role_gates", "role_copies", "role_states", "hopper_kernel")
)
GDN = Source(
    gdn_launch,
    1,
    (
        "rings",
        "assignment",
        "inverse",
        "role_gates",
        "prep_kernel",
        "role_scores",
        "role_states",
        "role_copies",
        "parts",
        "hopper_kernel",
    ),
)
KDA = Source(
    kda_launch,
    1,
    (
        "gdn.hopper.rings",
        "gdn.hopper.assignment",
        "gdn.hopper.inverse",
        "gdn.hopper.role_gates",
        "gdn.hopper.prep_kernel",
        "gdn.hopper.role_states",
        "tiles",
        "prep",
        "scan",
        "hopper_kernel",
        "rings",
        "decays",
        "scores",
        "states",
        "whole_kernel",
    ),
    in_order=True,
)


class Turns:
    """Programs and the roles that they start, as threads that run one at a time.

    One thread in three is slow, and copies are slow in one run in three, so that other threads get
    far ahead of them.
    """

    def __init__(self, turns: random.Random):
        self.turns = turns
        # live thread -> its condition, or None
        self.waits: dict[int, Callable[[], bool] | None] = {}
        self.copies: list[tuple[int, Callable[[], None]]] = []  # owner, and the copy
        self.left = ENOUGH
        self.running: int | None = None
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self.local = threading.local()
        self.threads: list[threading.Thread] = []
        self.speeds: list[float] = []
        self.speed_of_copies = self.speed()

    def speed(self) -> float:
        return self.turns.choice((SLOW, 1.0, 1.0))

    def add(self, function: Callable[[], None]):
        me = len(self.threads)
        self.waits[me] = None
        self.speeds.append(self.speed())
        self.threads.append(threading.Thread(target=self.live, args=(me, function), daemon=True))
        self.threads[me].start()

    def run(self):
        """Runs until all threads have ended."""
        with self.changed:
            self.hand_on()
            while self.waits and self.failure is None:
                if not self.changed.wait(PATIENCE):
                    raise TimeoutError("nobody moves")
        if self.failure is not None:
            raise self.failure

    def live(self, me: int, function: Callable[[], None]):
        self.local.me = me
        try:
            with self.changed:
                self.until_mine(me)
            function()
        except BaseException as error:  # `run` raises it
            self.failure = self.failure or error
        with self.changed:
            del self.waits[me]
            self.hand_on()

    def wait(self, ready: Callable[[], bool] | None = None):
        """Let other threads run, at least until `ready`."""
        me = self.local.me
        with self.changed:
            self.waits[me] = ready
            self.hand_on()
            self.until_mine(me)

    def until_mine(self, me: int):
        while self.running != me:
            if self.failure is not None or not self.changed.wait(PATIENCE):
                raise self.failure or TimeoutError("nobody moves")

    def hand_on(self):
        self.running = None
        while self.waits and self.failure is None:
            able = [one for one, ready in self.waits.items() if ready is None or ready()]
            choices: list[int | None] = [*able, *([None] if self.copies else [])]
            if not choices:
                self.failure = RuntimeError("deadlock: all wait, and no copy is on its way")
                break
            self.left -= 1
            if self.left == 0:
                self.failure = RuntimeError("someone polls for what never comes")
                break
            speeds = [self.speed_of_copies if one is None else self.speeds[one] for one in choices]
            (chosen,) = self.turns.choices(choices, speeds)
            if chosen is not None:
                self.running = chosen
                break
            self.copies.pop(self.turns.randrange(len(self.copies)))[1]()
        self.changed.notify_all()

    def finish_copies(self):
        """Completes the pending copies of the calling thread."""
        mine = [copy for owner, copy in self.copies if owner == self.local.me]
        self.copies = [(owner, copy) for owner, copy in self.copies if owner != self.local.me]
        for copy in mine:
            copy()


class Barrier:
    def __init__(self, count: int = 0):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0):
        assert self.pending >= count, "more arrivals than the barrier was made for"
        self.pending -= count
        self.bytes += expected
        self.end_phase()

    def end_phase(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Shared:
    """A part of shared memory that holds numbers or barriers."""

    layout = None

    def __init__(self, content):
        self.content = content

    @property
    def dtype(self) -> torch.dtype:
        return self.content.dtype

    @property
    def shape(self) -> torch.Size:
        if isinstance(self.content, list):
            return torch.Size([len(self.content), *self.content[0].shape])
        return self.content.shape

    def index(self, place):
        part = self.content[int(place)]
        return part[0] if isinstance(part, list) else Shared(part)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.content.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.content.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.content.view(shape))

    def _reinterpret(self, _dtype: torch.dtype, shape: list[int], _layout) -> Shared:
        """Views half rows or pairs of rows as rows, splits the rows, or views an operand's 16-bit
        rows, in blocks of 64 columns.
        """
        rows, *columns = self.content.shape
        if not columns and len(shape) == 2:  # a vector, as rows
            return Shared(self.content.view(shape))
        if shape == [2, rows, *(size // 2 for size in columns)]:  # halves of the columns
            return Shared(self.content.view(rows, 2, -1).transpose(0, 1))
        if shape == [rows, 1, *columns]:
            return Shared(self.content[:, None])
        if len(shape) == 4:
            assert shape == [1, columns[0] // 64, rows, 64]
            return Shared(self.content.view(rows, -1, 64).transpose(0, 1)[None])
        halves = [2 * rows, columns[0] // 2] if columns else []
        pairs = [rows // 2, 2 * columns[0]] if columns else []
        assert shape in (halves, pairs, [1, rows, *columns], [2, rows // 2, *columns])
        return Shared(self.content.view(shape))

    def load(self, _layout) -> Tensor:
        return self.content.clone()

    def store(self, value: Tensor):
        assert value.shape == self.content.shape
        self.content.copy_(value)


class Pointer:
    """Elements of a tensor's memory, by offset.  Access outside of that memory is an error."""

    def __init__(self, memory: Tensor, offset=0):
        self.memory = memory
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor: Tensor | Part) -> Pointer:
        if isinstance(tensor, Part):
            return cls(tensor.tensor())
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((length,), (1,), 0), tensor.storage_offset())

    def __add__(self, offset) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset) -> Pointer:
        return Pointer(self.memory, self.offset - offset)

    def __getitem__(self, index) -> Pointer:
        return Pointer(self.memory, self.offset[index])

    def places(self, mask) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(self.offset)
        mask = torch.as_tensor(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(offset, mask)
        assert not mask.any() or 0 <= offset[mask].min() <= offset[mask].max() < len(self.memory), (
            "out of bounds"
        )
        return torch.where(mask, offset, 0).long(), mask


class Descriptor:
    """A TMA descriptor: an address, sizes, strides.  Reads outside of those sizes give zeros."""

    def __init__(self, host):
        self.shape = host.shape
        self.strides = host.strides
        base = host.base
        self.block = tuple(host.block_shape)
        self.dtype = base.dtype
        self.layout = None
        ahead = isinstance(base, Part) and base.begin < 0
        self.start = (
            Pointer.to(base.memory) + base.begin // base.dtype.itemsize
            if ahead
            else Pointer.to(base)
        )

    def tile(self, start: list[Any]) -> tuple[Pointer, Tensor]:
        """Pointers to a tile's elements, and a mask of those that TMA reads or writes."""
        places = torch.tensor(0)
        inside = torch.tensor(True)
        of_dimensions = zip(start, self.shape, self.strides, self.block, strict=True)
        for k, (first, size, stride, length) in enumerate(of_dimensions):
            assert 0 <= int(first) < 2**31
            along = (int(first) + torch.arange(length)).view([-1] + [1] * (len(self.block) - 1 - k))
            places = places + along * stride
            inside = inside & (along < size)
        return self.start + places, inside


class Product:
    """A matrix product that may not have been computed yet."""

    def __init__(self, a, b: Shared, accumulator):
        self.a = a
        self.b = b
        self.accumulator = accumulator
        self.result: Tensor | None = None

    def value(self) -> Tensor:
        if self.result is None:
            a = self.a.content if isinstance(self.a, Shared) else self.a
            assert a.dtype == self.b.dtype
            self.result = a.float() @ self.b.content.float()
            if self.accumulator is not None:
                before = self.accumulator
                self.result = self.result + (
                    before.value() if isinstance(before, Product) else before
                )
        return self.result


def _bitcast(value: Tensor | int, dtype: torch.dtype, *, bitcast: bool) -> Tensor:
    assert bitcast
    return (torch.tensor(value, dtype=torch.int32) if isinstance(value, int) else value).view(dtype)


class Machine:
    """A GPU with room for `resident` programs, and the parts of Gluon that they use."""

    def __init__(self, source: Source, seed: int, resident: int):
        self.source = source
        self.random = random.Random(seed)
        self.resident = resident
        self.turns = Turns(self.random)

    def start(self, programs: Iterator[Callable[[], None]]):
        """Starts the next of `programs`, and the one after it when its roles have ended."""
        program = next(programs, None)
        if program is None:
            return

        def body():
            self.turns.local.roles = []
            program()
            first, *others = self.turns.local.roles or [None]
            meeting = Barrier(2)  # for the first role's lanes
            lanes = range(self.source.lanes) if self.source.lanes > 1 else (None,)
            roles = (
                [*((first, lane) for lane in lanes), *((role, None) for role in others)]
                if first
                else []
            )
            left = len(roles)

            def live(role: tuple[Callable[..., None], tuple[Any, ...]], lane: int | None):
                nonlocal left
                self.turns.local.lane, self.turns.local.meeting = lane, meeting
                function, args = role
                function(*args)
                left -= 1
                if left == 0:
                    self.start(programs)

            for role, lane in roles:
                self.turns.add(partial(live, role, lane))
            if not roles:
                self.start(programs)

        self.turns.add(body)

    def launch(self, programs: list[Callable[[], None]]):
        self.turns = Turns(self.random)
        order = iter(
            programs if self.source.in_order else self.random.sample(programs, len(programs))
        )
        for _ in range(self.resident):
            self.start(order)
        self.turns.run()

    # --- the language

    def language(self) -> SimpleNamespace:
        def either(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *values: of(*torch.broadcast_tensors(*map(torch.as_tensor, values)))

        def layout(*_args, **_kwargs):
            return None

        def specialize(functions: list[Any], _warps, _registers):
            self.turns.local.roles = functions

        return SimpleNamespace(
            constexpr=_Constant,
            **{
                name: getattr(torch, name)
                for name in ("float32", "float16", "bfloat16", "int16", "int32", "int64")
            },
            uint32=torch.int64,
            tensor=object,
            tuple=tuple,
            shared_memory_descriptor=Shared,
            BlockedLayout=layout,
            SliceLayout=layout,
            DotOperandLayout=layout,
            NVMMADistributedLayout=layout,
            DistributedLinearLayout=layout,
            to_linear_layout=_LinearLayout,
            SwizzledSharedLayout=layout,
            SharedLinearLayout=layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
            arange=lambda start, end, _layout: torch.arange(start, end),
            full=lambda shape, value, dtype, _layout: torch.full(shape, int(value), dtype=dtype),
            full_like=torch.full_like,
            fma=lambda a, b, c: a * b + c,
            where=either(torch.where),
            maximum=either(torch.maximum),
            minimum=either(torch.minimum),
            cdiv=lambda a, b: -(-a // b),
            sum=lambda value, axis: value.sum(axis),
            max=lambda value, axis: value.amax(axis),
            reduce=lambda value, axis, function: reduce(function, value.unbind(axis)),
            associative_scan=_scan,
            min=lambda value, axis: value.amin(axis),
            exp2=lambda value: torch.exp2(torch.as_tensor(value)),
            log2=torch.log2,
            rsqrt=torch.rsqrt,
            abs=torch.abs,
            permute=lambda value, order: value.permute(order),
            join=lambda a, b: torch.stack((a, b), -1),
            split=lambda value: (value[..., 0], value[..., 1]),
            convert_layout=lambda value, _layout: value,
            broadcast=torch.broadcast_tensors,
            inline_asm_elementwise=self.assembly,
            static_range=range,
            num_warps=lambda: 4,
            program_id=lambda _axis: torch.tensor(self.turns.local.program),
            num_programs=lambda _axis: self.count,
            barrier=self.meet,
            cast=_bitcast,
            to_tensor=torch.as_tensor,
            load=self.load,
            store=self.store,
            atomic_add=self.atomic_add,
            atomic_xchg=self.atomic_xchg,
            allocate_shared_memory=self.allocate,
            warp_specialize=specialize,
        )

    def meet(self):
        """A barrier of all threads of a role.  Here each lane is a thread, if the role has both
        lanes.
        """
        if getattr(self.turns.local, "lane", None) is not None:
            meeting = self.turns.local.meeting
            phase = self.turns.local.meeting.phase
            meeting.arrive()
            self.turns.wait(lambda: meeting.phase != phase)

    @staticmethod
    def load(pointer: Pointer, mask=None, other=0, cache_modifier: str = "") -> Tensor:
        del cache_modifier
        places, mask = pointer.places(mask)
        read = pointer.memory[places]
        return torch.where(mask, read, torch.as_tensor(other, dtype=read.dtype))

    @staticmethod
    def store(pointer: Pointer, value: Tensor, mask=None):
        places, mask = pointer.places(mask)
        pointer.memory[places[mask]] = value[mask].to(pointer.memory.dtype)

    def assembly(
        self,
        code: str,
        constraints: str,
        args: list[Any],
        *,
        dtype: torch.dtype,
        is_pure: bool,
        pack: int,
    ) -> Tensor:
        if code == "ld.acquire.gpu.global.b32 $0, [$1];":
            return self.atomic_add(args[0], 0, "acquire")
        if "fence.proxy.async" in code:
            if "wait_group" in code:
                self.turns.finish_copies()
            return torch.tensor(0)
        if not is_pure:
            return self.load_bits(code, *args)
        args = [
            arg.to(torch.int32) if arg.dtype == torch.int64 else arg
            for arg in map(torch.as_tensor, args)
        ]
        return ptx.run(code, constraints, args, dtype, pack)

    def load_bits(self, code: str, pointer: Pointer, inside: Tensor) -> Tensor:
        """Loads 16-bit or 32-bit numbers, if `inside`, into the low bits of 32."""
        bits = {2: torch.int16, 4: torch.int32}[pointer.memory.element_size()]
        predicated = [
            "setp.ne.b32 inside, $2, 0",
            "mov.b32 $0, 0",
            f"@inside ld.global.b{8 * bits.itemsize} $0, [$1]",
        ]
        assert [
            one.strip() for one in code.strip("{}").split(";") if ".reg" not in one and one.strip()
        ] == predicated
        return (
            self.load(pointer, inside != 0).view(bits).to(torch.int32)
            & (1 << 8 * bits.itemsize) - 1
        )

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> Tensor:
        del sem
        self.turns.wait()
        place = int(pointer.offset)
        old = pointer.memory[place].clone()
        pointer.memory[place] += value
        return old

    def atomic_xchg(self, pointer: Pointer, value: Tensor, sem: str):
        del sem
        pointer.memory[int(pointer.offset)] = value
        self.turns.wait()

    @staticmethod
    def allocate(dtype: torch.dtype, shape: list[int], layout) -> Shared:
        if layout == "barrier":
            return Shared([[Barrier()] for _ in range(shape[0])])
        return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))

    # --- Gluon's operations for Hopper

    def hopper(self) -> dict[str, Any]:
        def init(barrier: Barrier, count: int):
            barrier.count = barrier.pending = count

        def wait(barrier: Barrier, parity, pred=True):
            if pred:
                self.turns.wait(lambda: barrier.phase & 1 != int(parity))

        def arrive(barrier: Barrier, count: int = 1, pred=True):
            if pred:
                barrier.arrive(count)
                self.turns.wait()

        def arrive_of_lane(barrier: Barrier, increment_count: bool):
            assert not increment_count
            arrive(barrier, count=THREADS)

        mbarrier = SimpleNamespace(
            init=init,
            wait=wait,
            arrive=arrive,
            invalidate=lambda _barrier: None,
            expect=lambda barrier, size: barrier.arrive(expected=size),
            MBarrierLayout=lambda: "barrier",
        )
        tma = SimpleNamespace(
            async_load=self.copy_in,
            async_store=self.copy_out,
            store_wait=lambda _count: self.turns.finish_copies(),
        )

        def product(a, b: Shared, accumulator, *, use_acc: bool = True, is_async: bool) -> Product:
            assert is_async
            begun = Product(a, b, accumulator if use_acc else None)
            self.turns.local.begun = [*getattr(self.turns.local, "begun", []), begun]
            return begun

        def product_wait(left: int, deps: list[Product]):
            self.turns.wait()
            begun = self.turns.local.begun
            for one in begun[: len(begun) - left]:
                one.value()
            self.turns.local.begun = begun[len(begun) - left :]
            values = [dep if dep.result is None else dep.result for dep in deps]
            return values[0] if len(values) == 1 else tuple(values)

        return {
            "mbarrier": mbarrier,
            "tma": tma,
            "fence_async_shared": lambda: None,
            "async_copy": SimpleNamespace(mbarrier_arrive=arrive_of_lane),
            "warpgroup_mma": product,
            "warpgroup_mma_wait": product_wait,
            "mma_v2": lambda a, b, accumulator: a.float() @ b.float() + accumulator,
        }

    def copy_in(self, source: Descriptor, start: list[Any], barrier: Barrier, target: Shared):
        pointer, inside = source.tile(start)

        def copy():
            target.content.copy_(self.load(pointer, inside))
            barrier.bytes -= target.content.numel() * target.content.element_size()
            barrier.end_phase()

        self.turns.copies.append((-1, copy))
        self.turns.wait()

    def copy_out(self, target: Descriptor, start: list[Any], source: Shared):
        pointer, inside = target.tile(start)

        def copy():
            self.store(pointer, source.content, inside)

        self.turns.copies.append((self.turns.local.me, copy))
        self.turns.wait()

    # --- the kernel

    def kernels(self) -> dict[str, Callable[..., None]]:
        """Name -> function, for all functions of the source, unchanged."""
        modules = {
            "triton.experimental.gluon": SimpleNamespace(
                jit=lambda function=None, **_options: function or (lambda one: one),
                constexpr_function=lambda one: one,
            ),
            "triton.experimental.gluon.language": self.language(),
            "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(**self.hopper()),
            "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(**self.hopper()),
            "triton.language.core": SimpleNamespace(_aggregate=lambda one: one),
        }
        fakes = {name: ModuleType(name) for name in ("triton.experimental", *modules)}
        for name, content in modules.items():
            vars(fakes[name]).update(vars(content))
        vars(fakes["triton.experimental"])["gluon"] = fakes["triton.experimental.gluon"]
        vars(fakes["triton.experimental.gluon"])["language"] = fakes[
            "triton.experimental.gluon.language"
        ]
        functions = {}
        with _modules(fakes, self.source.modules):
            for full in self.source.modules:
                file = Path(str(importlib.util.find_spec(full).origin))  # type: ignore[union-attr]
                sys.modules[full] = module = ModuleType(full)
                exec(compile(file.read_text(), file, "exec"), vars(module))
                if full.endswith(".lanes"):
                    vars(module).update(
                        LANES=1, lane_number=lambda: torch.tensor(self.turns.local.lane)
                    )
                functions |= {
                    name: one
                    for name, one in vars(module).items()
                    if callable(one) and not isinstance(one, KernelInterface)
                }
        return functions

    def launcher(self) -> Callable[..., Callable[..., None]]:
        """Replaces `ssdprof.kernels.launch.Launcher`."""
        kernels = self.kernels()

        def make(jitted, scalars: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None]:
            if jitted.__name__ not in kernels:  # not in Gluon: Triton's interpreter runs it
                interpreted = Launcher(InterpretedFunction(jitted.fn), scalars, options)
                return lambda programs, *tensors: interpreted(programs, *map(_tensor, tensors))
            constants = {
                name: _DTYPES.get(str(value), value)
                for name, value in options.items()
                if name.isupper()
            }
            kernel = kernels[jitted.__name__]
            names = list(signature(kernel).parameters)
            if "S" in names:
                constants = {"S": SimpleNamespace(**constants)}

            def program(number: int, tensors: tuple[Any, ...]):
                self.turns.local.program = number
                given = list(map(_argument, tensors))
                if "tensors" in names:  # after the descriptors
                    given[names.index("tensors") :] = [tuple(given[names.index("tensors") :])]
                kernel(*given, *scalars, **constants)

            def launch(count: int, *tensors):
                self.count = count
                self.launch([partial(program, number, tensors) for number in range(count)])

            return launch

        return make


def _scan(value: Tensor, axis: int, function: Callable[..., Tensor]) -> Tensor:
    """The inclusive scan of `function`, from the first element."""
    parts = list(value.unbind(axis))
    for i in range(1, len(parts)):
        parts[i] = function(parts[i - 1], parts[i])
    return torch.stack(parts, axis)


class _LinearLayout:
    """A layout that holds only its shape."""

    reg_bases = lane_bases = warp_bases = block_bases = ()

    def __init__(self, _layout, shape: list[int]):
        self.shape = shape


class _Constant:
    """A class, because annotations use it too."""

    def __new__(cls, value):
        return value


_DTYPES = {  # of Triton
    "int32": torch.int32,
    "int64": torch.int64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def _tensor(value):
    return value.tensor() if isinstance(value, Part) else value


def _argument(value):
    if isinstance(value, Tensor | Part):
        return Pointer.to(value)
    return value if value is None else Descriptor(value)


@contextmanager
def _modules(fakes: dict[str, Any], own: tuple[str, ...]) -> Iterator[None]:
    """Replaces imported modules with `fakes`, and restores them and the modules in `own`
    afterwards.
    """
    kept = {name: sys.modules.get(name) for name in (*fakes, *own)}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def emulate(monkeypatch, *, seed: int, resident: int = 3, source: Source = SSD):
    """Launch the Hopper kernels of `source` in the emulator until the test ends."""
    monkeypatch.setattr(source.launch, "Launcher", Machine(source, seed, resident).launcher())
