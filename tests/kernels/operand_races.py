"""Finds registers of asynchronous matrix products (WGMMA, sm_90) that are overwritten before the
product is waited for.

A WGMMA runs after its instruction was issued.  The PTX manual says of wgmma.mma_async that a write
to the registers of its operand A, before a wgmma.wait_group that covers it, has undefined
behaviour.  The machine code has no scoreboard for these registers, so that only the place of
WARPGROUP.DEPBAR protects them.

Method: a data-flow analysis over single instructions, with every branch taken both ways.  The state
is a map WGMMA -> least number of groups that were committed after its own on any path; OPEN while
its group is not committed.  `gsb0` as last operand commits a group, and `WARPGROUP.DEPBAR.LE gsb0,
N` completes all but the N newest ones.  A predicated wait does not count, a predicated write does,
and one under @!PT never executes.
"""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

A_REGISTERS = 4  # 64 rows of 32 bytes over 128 threads: 16 bytes, whatever the type
OPEN = -1  # the age of a product whose group is not yet committed
OLDEST = 15  # ages are not counted further

NO_RESULT = re.compile(  # instructions without a result in general registers
    r"(ST[GSL]?|STSM|STAS|RED|REDG|REDS|REDAS|LDGSTS|LDGDEPBAR|ARRIVES|DEPBAR|MEMBAR|ERRBAR|"
    r"FENCE|CCTL\w*|BAR|BRA|"
    r"BRX|JMP|JMX|CALL|RET|EXIT|KILL|BSSY|BSYNC|BREAK|BPT|NOP|YIELD|NANOSLEEP|WARPSYNC|WARPGROUP|"
    r"WARPGROUPSET|U\w+|"
    r"R2UR|S2UR|P2UR|VOTEU|R2P|[IFDH]SETP2?|FCHK|PLOP3|ELECT|REDUX|ACQBULK|CGAERRBAR|PREEXIT|"
    r"ENDCOLLECTIVE|PMTRIG|"
    r"SETLMEMBASE)$"
)
PREDICATE_THEN_RESULT = re.compile(
    r"(SHFL|LOP3|LOP|ATOM|ATOMG|ATOMS|MATCH|LD|LDG|IADD3|LEA|VOTE|QSPC|IMAD|F2I)$"
)
PREDICATE = re.compile(r"!?U?P[T\d]$")
# Registers of a result, by the first pattern that the name matches; otherwise one.
WIDTHS = [
    (re.compile(r"(LDSM|MOVM).*\.4\b"), 4), (re.compile(r"(LDSM|MOVM).*\.2\b"), 2),
    (re.compile(r"LDSM|MOVM"), 1), (re.compile(r"(LD|ATOM).*\.128"), 4),
    (re.compile(r"(LD|ATOM).*\.([US]?64|F64)\b"), 2), (re.compile(r"LD|ATOM"), 1),
    (re.compile(r"[HQ]MMA\.\d+\.F16"), 2), (re.compile(r"[HQIDB]MMA\b"), 4),
    (re.compile(r"CS2R(?!.*\.32)|D(ADD|MUL|FMA|MNMX)\b|LEPC|F(ADD|MUL|FMA)2\b"), 2),
    (re.compile(r".*\.WIDE|[FI]2F\.F64|MOV\.64|F2I\.(FTZ\.)?[US]64"), 2),
]  # fmt: skip


@dataclass
class Instruction:
    at: int
    guard: str  # "P0", "!UP1", "" if always
    name: str  # with its suffixes
    operands: list[str]
    text: str = ""
    # indices of the instructions that may come next
    follows: list[int] = field(default_factory=list)

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def never(self) -> bool:
        return self.guard in ("!PT", "!UPT")

    @property
    def always(self) -> bool:
        return self.guard in ("", "PT", "UPT")

    @property
    def wgmma(self) -> bool:
        return self.base in ("HGMMA", "QGMMA", "IGMMA", "BGMMA")

    @property
    def wait(self) -> int | None:
        """N of WARPGROUP.DEPBAR.LE gsb0, N; None for other instructions."""
        if not self.name.startswith("WARPGROUP.DEPBAR") or not self.always:
            return None
        return int(self.operands[-1], 0)


def _span(operand: str, width: int) -> set[int]:
    """The numbers of general registers; none for RZ, uniform registers and all else."""
    found = re.match(r"[-!~|]*R(\d+)\b", operand)
    return set(range(int(found[1]), int(found[1]) + width)) if found else set()


def written(one: Instruction) -> set[int]:
    """The general registers that an instruction other than a WGMMA may write."""
    if one.never or NO_RESULT.match(one.base) or not one.operands:
        return set()
    first = one.operands[0]
    if PREDICATE.match(first):
        if not PREDICATE_THEN_RESULT.match(one.base) or len(one.operands) < 2:
            return set()
        first = one.operands[1]
    return _span(first, next((width for name, width in WIDTHS if name.match(one.name)), 1))


LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:\{\s*)?(?:@(!?U?P[T\d])\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;"
)
LABEL = re.compile(r"^\s*(\.L_x_\d+|\.L_\d+|[\w.$]*\.L_[\w.]+):\s*$")
FUNCTION = re.compile(r"^\s*(?:Function : (\S+)|\.text\.(\S+?):)\s*$")


def functions(text: str) -> Iterator[list[Instruction]]:
    """The linked instructions of every function in a disassembly."""
    code = []
    labels = {}
    for line in text.splitlines():
        if FUNCTION.match(line):
            yield _linked(code, labels)
            code = []
            labels = {}
        elif found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := LINE.match(line):
            operands = re.split(r",(?![^\[(]*[\])])", re.sub(r"\(\*.*?\*\)", "", found[4]))
            shown = f"{'@' + found[2] + ' ' if found[2] else ''}{found[3]} {found[4]}".strip()
            parts = [part.strip() for part in operands if part.strip()]
            code.append(Instruction(int(found[1], 16), found[2] or "", found[3], parts, text=shown))
    yield _linked(code, labels)


def _linked(code: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """Sets `follows` of every instruction.

    A call also continues as if the callee returned at once.  A computed jump goes wherever nothing
    falls through.
    """
    index = {one.at: place for place, one in enumerate(code)}
    ends = ("BRA", "JMP", "BRX", "JMX", "EXIT", "RET", "KILL")
    after_ends = [
        0,
        *(place + 1 for place, one in enumerate(code[:-1]) if one.base in ends and one.always),
    ]
    after_calls = [place + 1 for place, one in enumerate(code[:-1]) if one.base == "CALL"]

    def target(text: str) -> list[int]:
        named = [labels[label] for label in re.findall(r"`\(([^)]+)\)", text) if label in labels]
        address = re.search(r"(?:^|\s)0x([0-9a-f]+)\s*$", text)
        return named[:1] or (
            [index[int(address[1], 16)]] if address and int(address[1], 16) in index else []
        )

    for place, one in enumerate(code):
        one.follows = following = [place + 1] if place + 1 < len(code) else []
        if one.never:
            continue
        if one.base in ("BRA", "JMP", "CALL"):
            to = target(one.operands[-1])
            goes_on = one.base == "CALL" or not one.always or len(one.operands) > 1
            one.follows = to + (following if goes_on or not to else [])
        elif one.base == "RET":
            one.follows = after_calls + ([] if one.always else following)
        elif one.base in ("EXIT", "KILL") and one.always:
            one.follows = (
                following if any(PREDICATE.match(o) and o != "PT" for o in one.operands) else []
            )
        elif one.base in ("BRX", "JMX"):
            one.follows = after_ends + ([] if one.always else following)
    return code


State = dict[int, int]  # index of a WGMMA -> least number of groups committed after its own


def _step(state: State, place: int, one: Instruction) -> State:
    """The state after an instruction."""
    if one.wgmma and not one.never:
        state = {**state, place: OPEN}
        if any(operand.startswith("gsb") for operand in one.operands):
            state = {product: min(age + 1, OLDEST) for product, age in state.items()}
    elif (wait := one.wait) is not None:
        state = {product: age for product, age in state.items() if age < wait}
    return state


def in_flight(code: list[Instruction]) -> list[State | None]:
    """For each instruction, the products that may be in flight when it is issued; None if no path
    leads to it.
    """
    before: list[State | None] = [{}, *[None] * (len(code) - 1)]
    work = [0]
    waiting = {0}
    while work:
        # in the order of the code: few instructions are then visited often
        place = heapq.heappop(work)
        waiting.discard(place)
        after = _step(before[place] or {}, place, code[place])
        for following in code[place].follows:
            known = before[following]
            merged = after | {} if known is None else known | after
            for product in () if known is None else known.keys() & after.keys():
                merged[product] = min(known[product], after[product])
            if merged != known:
                before[following] = merged
                if following not in waiting:
                    waiting.add(following)
                    heapq.heappush(work, following)
    return before


def racy_writes(disassembly: str) -> list[str]:
    """The instructions that may overwrite a register of operand A of a product in flight, of all
    functions.
    """
    found = []
    for code in functions(disassembly):
        # no registers if operand A is in shared memory
        operands = {
            place: _span(one.operands[1], A_REGISTERS)
            for place, one in enumerate(code)
            if one.wgmma
        }
        if any(operands.values()):
            for one, state in zip(code, in_flight(code), strict=True):
                if (
                    state
                    and not one.wgmma
                    and any(written(one) & operands[product] for product in state)
                ):
                    found.append(one.text)
    return found
