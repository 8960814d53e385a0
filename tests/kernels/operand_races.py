"""Finds registers of asynchronous matrix products (WGMMA, sm_90) that are overwritten before the product is waited for.

A WGMMA runs after its instruction was issued.  The PTX manual says of wgmma.mma_async that a write to the registers of
its operand A, before a wgmma.wait_group that covers it, has undefined behaviour.  The machine code has no scoreboard
for these registers, so that only the place of WARPGROUP.DEPBAR protects them.

Method: a data-flow analysis over single instructions, with every branch taken both ways.  The state is a map WGMMA ->
least number of groups that were committed after its own on any path; OPEN while its group is not committed.  `gsb0` as
last operand commits a group, and `WARPGROUP.DEPBAR.LE gsb0, N` completes all but the N newest ones.  A predicated wait
does not count, a predicated write does, and one under @!PT never executes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

A_REGISTERS = 4  # 64 rows of 32 bytes over 128 threads: 16 bytes, whatever the type
OPEN = -1  # the age of a product whose group is not yet committed
OLDEST = 15  # ages are not counted further

WGMMA = re.compile(r"[HQIB]GMMA\b")
NO_RESULT = re.compile(  # instructions without a result in general registers
    r"(ST[GSL]?|STSM|STAS|RED|REDG|REDS|REDAS|LDGSTS|LDGDEPBAR|ARRIVES|DEPBAR|MEMBAR|ERRBAR|FENCE|CCTL\w*|BAR|BRA|"
    r"BRX|JMP|JMX|CALL|RET|EXIT|KILL|BSSY|BSYNC|BREAK|BPT|NOP|YIELD|NANOSLEEP|WARPSYNC|WARPGROUP|WARPGROUPSET|U\w+|"
    r"R2UR|S2UR|P2UR|VOTEU|R2P|[IFDH]SETP2?|FCHK|PLOP3|ELECT|REDUX|ACQBULK|CGAERRBAR|PREEXIT|ENDCOLLECTIVE|PMTRIG|"
    r"SETLMEMBASE)$"
)
PREDICATE_THEN_RESULT = re.compile(r"(SHFL|LOP3|LOP|ATOM|ATOMG|ATOMS|MATCH|LD|LDG|IADD3|LEA|VOTE|QSPC|IMAD|F2I)$")
PREDICATE = re.compile(r"!?U?P[T\d]$")


@dataclass
class Instruction:
    at: int
    guard: str  # "P0", "!UP1", "" if always
    name: str  # with its suffixes
    operands: list[str]
    text: str = ""
    base: str = ""
    follows: list[int] = field(default_factory=list)  # indices of the instructions that may come next

    def __post_init__(self) -> None:
        self.base = self.name.split(".")[0]

    @property
    def never(self) -> bool:
        return self.guard in ("!PT", "!UPT")

    @property
    def always(self) -> bool:
        return self.guard in ("", "PT", "UPT")

    @property
    def wgmma(self) -> bool:
        return bool(WGMMA.match(self.name))

    @property
    def commits(self) -> bool:
        return self.wgmma and any(operand.startswith("gsb") for operand in self.operands)

    @property
    def wait(self) -> int | None:
        """N of WARPGROUP.DEPBAR.LE gsb0, N; None for other instructions."""
        if not self.name.startswith("WARPGROUP.DEPBAR") or not self.always:
            return None
        return int(self.operands[-1], 0)


def _register(operand: str) -> int | None:
    """The number of a general register; None for RZ, uniform registers and all else."""
    found = re.match(r"[-!~|]*R(\d+)\b", operand)
    return int(found[1]) if found else None


def _span(operand: str, width: int) -> set[int]:
    first = _register(operand)
    return set() if first is None else set(range(first, first + width))


def operand_a(instruction: Instruction) -> set[int]:
    """The registers of operand A, empty if it is in shared memory."""
    return _span(instruction.operands[1], A_REGISTERS)


def _memory_width(name: str) -> int:
    return 4 if ".128" in name else 2 if re.search(r"\.(64|U64|S64|F64)\b", name) else 1


def _matrix_width(name: str) -> int:
    found = re.search(r"\.M[T]?\d+(?:\.TRANS)?\.(\d)\b", name) or re.search(r"\.(2|4)\b", name)
    return int(found[1]) if found else 1


def _result_width(instruction: Instruction) -> int:
    name, base = instruction.name, instruction.base
    if base in ("LDSM", "MOVM"):
        return _matrix_width(name)
    if base.startswith(("LD", "ATOM")):
        return _memory_width(name)
    if base in ("HMMA", "QMMA"):
        return 2 if re.match(r"[HQ]MMA\.\d+\.F16", name) else 4
    if base in ("IMMA", "DMMA", "BMMA"):
        return 4
    if base == "CS2R":
        return 1 if ".32" in name else 2
    if base in ("DADD", "DMUL", "DFMA", "DMNMX", "LEPC", "FADD2", "FMUL2", "FFMA2"):
        return 2
    if ".WIDE" in name or name.startswith(("F2F.F64", "I2F.F64", "MOV.64")) or re.match(r"F2I\.(FTZ\.)?[US]64", name):
        return 2
    return 1


def written(instruction: Instruction) -> set[int]:
    """The general registers that an instruction other than a WGMMA may write."""
    if instruction.never or NO_RESULT.match(instruction.base) or not instruction.operands:
        return set()
    first = instruction.operands[0]
    if PREDICATE.match(first):
        if not PREDICATE_THEN_RESULT.match(instruction.base) or len(instruction.operands) < 2:
            return set()
        first = instruction.operands[1]
    return _span(first, _result_width(instruction))


LINE = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:\{\s*)?(?:@(!?U?P[T\d])\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
LABEL = re.compile(r"^\s*(\.L_x_\d+|\.L_\d+|[\w.$]*\.L_[\w.]+):\s*$")
FUNCTION = re.compile(r"^\s*(?:Function : (\S+)|\.text\.(\S+?):)\s*$")


def _split(operands: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[(]*[\])])", operands) if part.strip()]


def functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Name and linked instructions of every function in a disassembly."""
    name, code, labels = "", [], {}  # type: ignore[var-annotated]
    waiting: list[str] = []
    for line in text.splitlines():
        if found := FUNCTION.match(line):
            if code:
                yield name, _linked(code, labels)
            name, code, labels, waiting = found[1] or found[2], [], {}, []
        elif found := LABEL.match(line):
            waiting.append(found[1])
        elif found := LINE.match(line):
            at = int(found[1], 16)
            labels |= dict.fromkeys(waiting, at)
            waiting = []
            operands = re.sub(r"\(\*.*?\*\)", lambda kept: kept[0] if "BRANCH_TARGETS" in kept[0] else "", found[4])
            shown = f"{'@' + found[2] + ' ' if found[2] else ''}{found[3]} {found[4]}".strip()
            code.append(Instruction(at, found[2] or "", found[3], _split(operands), text=shown))
    if code:
        yield name, _linked(code, labels)


def _linked(code: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """Sets `follows` of every instruction."""
    index = {instruction.at: place for place, instruction in enumerate(code)}

    def target(text: str) -> int | None:
        for label in re.findall(r"`\(([^)]+)\)", text):
            if label in labels:
                return index.get(labels[label])
        found = re.search(r"(?:^|\s)0x([0-9a-f]+)\s*$", text.strip())
        return index.get(int(found[1], 16)) if found else None

    after_calls = [place + 1 for place, one in enumerate(code) if one.base == "CALL" and place + 1 < len(code)]
    ends = ("BRA", "JMP", "BRX", "JMX", "EXIT", "RET", "KILL")
    leaders = [0] + [p + 1 for p, one in enumerate(code) if one.base in ends and one.always and p + 1 < len(code)]
    for place, one in enumerate(code):
        following = [place + 1] if place + 1 < len(code) else []
        goes = not one.never
        last = one.operands[-1] if one.operands else ""
        if one.base in ("BRA", "JMP") and goes:
            to = target(last)
            conditional = not one.always or len(one.operands) > 1
            one.follows = ([] if to is None else [to]) + (following if conditional or to is None else [])
        elif one.base in ("BRX", "JMX") and goes:
            text = " ".join(one.operands)
            named = re.findall(r"\.L_x_\d+", text) or re.findall(r"0x[0-9a-f]+", text.partition("BRANCH_TARGETS")[2])
            places = [
                index.get(labels[n] if n in labels else int(n, 16), -1) for n in named if n in labels or n[:2] == "0x"
            ]
            one.follows = [p for p in places if p >= 0] or leaders
            one.follows += [] if one.always else following
        elif one.base == "CALL" and goes:
            to = target(last)
            one.follows = ([] if to is None else [to]) + following  # also as if the callee returned at once
        elif one.base == "RET" and goes:
            one.follows = after_calls + ([] if one.always else following)
        elif one.base in ("EXIT", "KILL") and goes:
            one.follows = (
                [] if one.always and not any(PREDICATE.match(o) and o != "PT" for o in one.operands) else following
            )
        else:
            one.follows = following
    return code


State = dict[int, int]  # index of a WGMMA -> least number of groups committed after its own


def _step(state: State, code: list[Instruction], place: int) -> State:
    """The state after an instruction."""
    one = code[place]
    if one.wgmma and not one.never:
        state = {**state, place: OPEN}
        if one.commits:
            state = {product: min(age + 1, OLDEST) for product, age in state.items()}
    elif one.wait is not None:
        wait = one.wait
        state = {product: age for product, age in state.items() if age < wait}
    return state


def in_flight(code: list[Instruction]) -> list[State | None]:
    """For each instruction, the products that may be in flight when it is issued; None if no path leads to it."""
    before: list[State | None] = [None] * len(code)
    if not code:
        return []
    before[0] = {}
    work, waiting = [0], {0}
    while work:
        place = heapq.heappop(work)  # in the order of the code: few instructions are then visited often
        waiting.discard(place)
        after = _step(before[place] or {}, code, place)
        for following in code[place].follows:
            known = before[following]
            merged = after if known is None else dict(known)
            for product, age in () if known is None else after.items():
                merged[product] = min(age, merged.get(product, age))
            if merged != known:
                before[following] = merged
                if following not in waiting:
                    waiting.add(following)
                    heapq.heappush(work, following)
    return before


def racy_writes(disassembly: str) -> list[str]:
    """The instructions that may overwrite a register of operand A of a product in flight, of all functions."""
    found = []
    for _, code in functions(disassembly):
        operands = {place: operand_a(one) for place, one in enumerate(code) if one.wgmma}
        if not any(operands.values()):  # none, or all of them in shared memory
            continue
        for one, state in zip(code, in_flight(code), strict=True):
            if state and not one.wgmma and any(written(one) & operands[product] for product in state):
                found.append(one.text)
    return found
