"""Whether the assembler keeps the addresses of Hopper's matrix products; needs no GPU.

A wgmma finds its operands in shared memory by descriptors, 64-bit numbers that a few integer instructions
make from the base of shared memory. `lost` follows these numbers through the PTX that Triton wrote and
through the machine code that ptxas made of it, and reports every product whose descriptor is known in the one
and not the same in the other. ptxas 12.8 reads some from registers that hold something else.

Both are followed once from top to bottom, which is the first round of every loop. None stands for what isn't
known: all that comes from memory or from the thread's number, and what instructions missing below make of it.
"""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import triton

BASE = 0x400
"""Where shared memory of a kernel begins; the first KiB is the system's."""
WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
Descriptors = list[tuple[int | None, int | None]]


def lost(compiled) -> list[tuple[int, str, int, int | None]]:
    """(number of the product, operand A or B, descriptor by PTX, by machine code) where the two differ."""
    written, assembled = of_ptx(compiled.asm["ptx"]), of_sass(_sass(compiled.asm["cubin"]))
    assert len(written) == len(assembled), "another number of products"
    rows = []
    for number, pair in enumerate(zip(written, assembled, strict=True)):
        for operand, one, two in zip("AB", *pair, strict=True):
            if one is not None and one != two:
                rows.append((number, operand, one, two))
    return rows


def _sass(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def of_ptx(text: str) -> Descriptors:
    """Descriptors (A, B) of the products in order; A is None where it is in registers."""
    values: dict[str, int | None] = {"global_smem": BASE}
    found = []

    def value(operand: str) -> int | None:
        literal = re.fullmatch(r"(-?\d+|0x[\da-fA-F]+)U?", operand)
        return int(literal[1], 0) if literal else values.get(operand)

    for line in text.splitlines():
        name, *rest = line.split("//")[0].strip().rstrip(";").split(None, 1) or [""]
        operands = [x.strip() for x in re.sub(r"\{[^}]*\}", "{}", "".join(rest)).split(",")]
        if name.startswith("wgmma.mma_async"):
            found.append((value(operands[1]), value(operands[2])))
        elif operands[0].startswith("%"):
            goal, *given = operands
            result = _ptx(name, [value(x) for x in given])
            # A register that is written twice belongs to a loop.
            values[goal] = result if values.get(goal, result) == result else None
    return found


def _ptx(name: str, given: list[int | None]) -> int | None:
    kind, bits = name.partition(".")[0], LONG if "64" in name else WORD
    match kind, given:
        case _ if None in given:
            return None
        case (("mov" | "cvt"), [x]):
            return x & bits
        case "add", [x, y]:
            return x + y & bits
        case "or", [x, y]:
            return (x | y) & bits
        case "bfe", [x, start, count]:
            return x >> start & (1 << count) - 1
    return None


def of_sass(text: str) -> Descriptors:
    """The same of machine code."""
    machine, found = _Machine(), []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        guard, name, rest = re.fullmatch(r"\s*(@\S+)?\s*([A-Z][\w.]*)?(.*?)[\s;]*", line).groups()
        operands = [x.strip() for x in rest.split(",")]
        if (name or "").startswith("HGMMA"):
            place = re.search(r"gdesc\[(UR\d+)\]", rest)[1]
            first, second = machine.pair(place), machine.pair(_after(place, 2))
            found.append((None, first) if re.match(r"R\d", operands[1]) else (first, second))
            machine.forget(operands[0], int(name.split("x")[1]) // 2)
        elif name:
            machine.run(name, operands, guarded=guard is not None)
    return found


class _Machine:
    """Registers, uniform registers, predicates and spilled words, as far as they are known."""

    def __init__(self) -> None:
        self.values: dict[str, int | None] = {
            "RZ": 0,
            "URZ": 0,
            "SRZ": 0,
            "PT": 1,
            "UPT": 1,
            "SR_CgaCtaId": 0,
        }

    def value(self, operand: str) -> int | None:
        name = operand.removesuffix(".reuse").lstrip("-!")
        known = int(name, 0) if re.fullmatch(r"\d+|0x\w+", name) else self.values.get(name)
        if known is None:
            return None
        return 1 - known if operand[0] == "!" else (-known if operand[0] == "-" else known) & WORD

    def pair(self, name: str) -> int | None:
        """A register and the one after it; what isn't a numbered register stands for itself."""
        low = self.value(name)
        high = self.value(_after(name)) if re.fullmatch(r"U?R\d+", name) else 0
        return None if low is None or high is None else high << 32 | low

    def forget(self, register: str, count: int) -> None:
        for step in range(count):
            self.values[_after(register, step)] = None

    def spill(self, one: str, two: str, wide: int, *, back: bool, guarded: bool) -> None:
        """A register goes to the stack, or comes back."""
        place, register = (two, one) if back else (one, two)
        offset = int(place.strip("[]").partition("+")[2] or "0", 0)
        for step in range(wide):
            word, held = f"stack {offset + 4 * step}", _after(register, step) if step else register
            goal, source = (held, word) if back else (word, held)
            self.values[goal] = None if guarded else self.values.get(source)

    def run(self, name: str, operands: list[str], *, guarded: bool) -> None:
        """What is known after an instruction; a guarded one may have run or not."""
        wide = 4 if ".128" in name else 2 if re.search(r"\.64|WIDE|CS2R", name) else 1
        if name.startswith(("STL", "LDL")):
            self.spill(*operands, wide, back=name.startswith("LDL"), guarded=guarded)
            return
        goals = [operands.pop(0)]
        while operands and re.fullmatch(r"U?P[\dT]", operands[0]):
            goals.append(operands.pop(0))
        read = self.pair if name == "UIADD3.64" else self.value
        result = None if guarded else _sass_result(name, [read(x) for x in operands])
        for goal in goals:
            if re.fullmatch(r"U?P\d", goal):
                self.values[goal] = None if result is None else result >> 32 & 1
        if re.fullmatch(r"U?R\d+", goals[0]):
            self.forget(goals[0], wide)
            for step in range(wide if result is not None else 0):
                self.values[_after(goals[0], step)] = result >> 32 * step & WORD


def _after(register: str, step: int = 1) -> str:
    numbered = re.fullmatch(r"(\D+)(\d+)", register)
    # RZ has none after it.
    return f"{numbered[1]}{int(numbered[2]) + step}" if numbered else register


def _sass_result(name: str, given: list[int | None]) -> int | None:
    """What an instruction gives; with sums the carry is bit 32. None: not known, or not followed."""
    match name.removeprefix("U"), given:
        case (("MOV" | "R2UR" | "S2R" | "S2UR" | "CS2R"), [int(x), *_]):
            return x
        case (
            ("IMAD.MOV.U32" | "IMAD.U32" | "IMAD" | "IMAD.IADD" | "IMAD.SHL.U32"),
            [int(x), int(y), int(z)],
        ):
            return x * y + z & WORD
        case "IMAD.X", [int(x), int(y), int(z), int(carry)]:
            return x * y + z + carry & WORD
        case "VIADD", [int(x), int(y)]:
            return x + y & WORD
        case "IADD3", [int(x), int(y), int(z)]:
            return x + y + z
        case "IADD3.X", [int(x), int(y), int(z), int(carry), *_]:
            return x + y + z + carry
        case "IADD3.64", [int(x), int(y), int(z)]:
            return x + y + z & LONG
        case "SHF.R.U32.HI", [_, int(places), int(x)]:
            return x >> places
        case "SHF.L.U32", [int(x), int(places), _]:
            return x << places & WORD
        case "LEA", [int(x), int(y), int(places)]:
            return (x << places) + y & WORD
        case ("SGXT.U32", [int(x), int(count)]):
            return x & (1 << count) - 1
    return None
