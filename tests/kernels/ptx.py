"""The PTX instructions of the kernels' inline assembly, each run in torch."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

Registers = dict[str, Tensor]  # 32 bits each, as int32

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
IMMEDIATE = re.compile(r"-?(0x[0-9a-f]+|\d+)")


def run(code: str, constraints: str, args: list[Tensor], dtype: torch.dtype, pack: int) -> Tensor:
    """`gl.inline_asm_elementwise`: `pack` elements at a time, with two 16-bit elements per
    register.
    """
    args = list(torch.broadcast_tensors(*args))
    shape = args[0].shape
    inputs = [register for arg in args for register in _registers(arg, pack)]
    outputs = constraints.count("=")
    registers: Registers = {f"${outputs + i}": register for i, register in enumerate(inputs)}
    assert outputs + len(inputs) == len(constraints.split(",")), "constraints and arguments"
    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            _execute(statement.strip(), registers)
    results = [registers[f"${i}"] for i in range(outputs)]
    return _elements(results, dtype).reshape(shape)


def _registers(arg: Tensor, pack: int) -> list[Tensor]:
    """The registers that hold each group of `pack` adjacent elements."""
    flat = arg.contiguous().reshape(-1, pack)
    if arg.element_size() == 2:
        return [flat.contiguous().view(torch.int32).reshape(-1)]
    return [flat[:, i].contiguous().view(torch.int32) for i in range(pack)]


def _elements(registers: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(registers, -1).contiguous().view(dtype)


def _execute(statement: str, registers: Registers) -> None:
    name, _, rest = statement.partition(" ")
    operands = [
        operand.strip() for operand in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if operand.strip()
    ]
    target, *sources = operands
    if target.startswith("{"):  # one register into two of 16 bits
        low, high = _names(target)
        word = _value(sources[0], registers)
        registers[low], registers[high] = word & 0xFFFF, (word >> 16) & 0xFFFF
    elif sources[0].startswith("{"):
        low, high = (registers[one] for one in _names(sources[0]))
        registers[target] = (low & 0xFFFF) | (high << 16)
    else:
        registers[target] = _compute(name, [_value(source, registers) for source in sources])


def _names(braced: str) -> list[str]:
    return [name.strip() for name in braced.strip("{}").split(",")]


def _value(operand: str, registers: Registers) -> Tensor:
    if IMMEDIATE.fullmatch(operand):
        return _wrapped(int(operand, 0))
    return registers[operand]


def _wrapped(number: int) -> Tensor:
    return torch.tensor((number + (1 << 31)) % (1 << 32) - (1 << 31), dtype=torch.int32)


def _compute(name: str, values: list[Tensor]) -> Tensor:
    operation, *modifiers = name.split(".")
    if operation == "cvt":
        to, of = (one for one in modifiers if one not in ("rn", "rna"))
        if to == "tf32":
            return (values[0] + 0x1000) & ~0x1FFF
        return (
            _of_half(_float(values[0]), HALVES[to])
            if of == "f32"
            else _bits(_half(values[0], HALVES[of]).float())
        )
    if operation == "prmt":
        return _permuted(*values)
    assert operation != "setp" or modifiers[0] == "ne"
    if operation in BITWISE:
        return BITWISE[operation](*values)
    compute = ARITHMETIC[operation]
    kind = modifiers[-1]
    if kind == "f32":
        return _bits(compute(*(_float(value).double() for value in values)).float())
    half = HALVES[kind.removesuffix("x2")]
    low, high = (
        compute(*(_half(value >> shift, half).double() for value in values)).to(half)
        for shift in (0, 16)
    )
    return torch.stack((low, high), -1).view(torch.int32).squeeze(-1)


def _float(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


def _half(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The number in the low 16 bits."""
    return bits.to(torch.int16).view(dtype)


def _of_half(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF


def _permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Four bytes of the eight of a and b."""
    result = torch.zeros_like(a)
    for place in range(4):
        byte = int(selector) >> 4 * place & 0xF
        result |= ((b if byte >= 4 else a) >> 8 * (byte % 4) & 0xFF) << 8 * place
    return result


ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "sub": torch.sub,
    "neg": torch.neg,
    "fma": lambda a, b, c: a * b + c,
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "rcp": torch.reciprocal,
    "min": torch.minimum,
    "max": torch.maximum,
}
BITWISE: dict[str, Callable[..., Tensor]] = {
    "and": torch.bitwise_and,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "mov": lambda a: a,
    "setp": lambda a, b: (a != b).to(torch.int32),  # .ne, the only comparison in use
    "selp": lambda a, b, predicate: torch.where(predicate != 0, a, b),
}
