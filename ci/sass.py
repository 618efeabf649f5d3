"""What machine code shows: accesses of 128 bits, and how much is loaded between two waits."""

import bisect
import itertools
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci import ptxas

_PLACE = re.compile(r"\s*/\*([0-9a-f]+)\*/ ")
_INSTRUCTION_BYTES = 16
_CBANK_PARAM_SIZE, _SIZED = 0x19, 4  # an attribute of .nv.info, and the form that has more bytes
# Global memory only, but for LD and ST, which may also mean shared memory that was staged. Local
# (LDL, STL) and shared (LDS, STS) accesses do not count.
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?);", re.MULTILINE)
_LOAD = re.compile(r"\bLDG?(?=\.)\S* R(\d+),")
_WRITES_MEMORY = re.compile(r"\b(?:STG?|STS|ATOM\w*|RED)\b")
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_ACCESS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(LDG?|STG?)(\.[\w.]+)", re.MULTILINE)

# Engines that move data in packs of 16 bytes a thread wherever a tensor's address allows.
PACKED_KERNELS = {
    "foreach_kernel": ("loads", "stores"),
    "foreach_reduce_chunks": ("loads",),  # what it stores is one sum a block
    "rowwise_kernel": ("loads", "stores"),
    "rowwise_columns": ("loads", "stores"),
    "segment_heads": ("loads",),  # sums of float32, which lie as they come
    "segment_sums": ("loads", "stores"),
}


# Kernels whose threads load once, and rows that are kept: what they load on the way of whole packs
# counts.
STRAIGHT_KERNELS = re.compile(r"foreach_kernel<|rowwise_columns<|rowwise_kernel<.*, true>$")


@dataclass(frozen=True)
class Accesses:
    """How many instructions of a kernel move 16 bytes, and how many move less."""

    kernel: str
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int


@dataclass(frozen=True)
class HotLoop:
    """What a thread does in one turn of the loop that loads most, or of straight code that loads.

    A round is the loads that are issued before the code waits for one of them: bytes / rounds of
    each resident thread are under way at once. Branches count as not taken.
    """

    instructions: int
    loaded_bytes: int
    rounds: int


def code_of(image: bytes, symbol: str) -> bytes:
    """Return the instructions of a kernel."""
    return _section(image, f".text.{symbol}")


def parameter_bytes(image: bytes, symbol: str) -> int:
    """Return how many bytes of parameters a driver copies for a kernel of an ELF file."""
    info, at = _section(image, f".nv.info.{symbol}"), 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if attribute == _CBANK_PARAM_SIZE:
            return value
        at += 4 + (value if form == _SIZED else 0)
    raise ValueError(f"the machine code does not say what parameters {symbol} has")


def _section(image: bytes, wanted: str) -> bytes:
    """Return a section of an ELF file for 64 bits."""
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, of_names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, start + size * i) for i in range(count)]
    for name, *_, offset, length in sections:
        if image.startswith(f"{wanted}\0".encode(), sections[of_names][4] + name):
            return image[offset : offset + length]
    raise ValueError(f"the machine code has no {wanted}")


def disassemble(codes: list[bytes], arch: str) -> list[str]:
    """Return the instructions of kernels as text, with places that count on from one to the next.

    nvdisasm takes half a second to start, so that it is given many.
    """
    nvdisasm, ends = find_nvdisasm(), list(itertools.accumulate(map(len, codes)))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [nvdisasm, "-b", arch.upper().replace("_", ""), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines: list[list[str]] = [[] for _ in codes]
    for line in done.stdout.splitlines():
        if place := _PLACE.match(line):
            lines[bisect.bisect_right(ends, int(place[1], 16))].append(line)
    if done.returncode or [len(each) * _INSTRUCTION_BYTES for each in lines] != [*map(len, codes)]:
        raise RuntimeError(
            f"{' '.join(command)} did not show all instructions:\n{done.stderr[:2000]}"
        )
    return ["\n".join(each) for each in lines]


def find_nvdisasm() -> str:
    """Return nvdisasm: the one that CI installs, which knows what the newest NVRTC makes."""
    folders = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    found = shutil.which("nvdisasm", path=path)
    if found is None:
        raise FileNotFoundError(
            "nvdisasm was not found. It is part of the CUDA toolkit; without one: "
            "pip install nvidia-cuda-nvdisasm"
        )
    return found


def accesses(kernels: list[tuple[str, str]]) -> list[Accesses]:
    """Count the accesses of kernels, of which there are names and code."""
    return [Accesses(kernel, *_count(code)) for kernel, code in kernels]


def hot_loop(kernel: str, code: str) -> HotLoop | None:
    """Walk through a kernel's hot loop once; None if it loads nothing."""
    instructions = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(code)]
    # Straight code has narrow loads on the way of tails, which is not taken.
    least_bytes = 16 if STRAIGHT_KERNELS.match(kernel) else 1
    walked = [
        walk([text for place, text in instructions if first <= place <= last], least_bytes)
        for first, last in _hot_places(kernel, instructions)
    ]
    best = max(walked, key=lambda loop: loop.loaded_bytes, default=None)
    return best if best and best.loaded_bytes else None


def _hot_places(kernel: str, instructions: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """Return the innermost loops, or of straight code what goes from loads to a store."""
    wide = [i for i, (_, text) in enumerate(instructions) if _LOAD.search(text) and ".128" in text]
    if STRAIGHT_KERNELS.match(kernel) and wide:
        runs = [[wide[0]]]
        for i in wide[1:]:  # those further apart are of another way through the kernel
            runs[-1].append(i) if i - runs[-1][-1] < 60 else runs.append([i])
        run = max(runs, key=len)
        behind = range(run[-1], len(instructions))
        stop = next((i for i in behind if "STG" in instructions[i][1]), len(instructions) - 1)
        return [(instructions[run[0]][0], instructions[stop][0])]
    jumps = [
        (int(found[1], 16), place)
        for place, text in instructions
        if (found := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) and int(found[1], 16) < place
    ]
    inner = [
        loop
        for loop in jumps
        if not any(loop != o and loop[0] <= o[0] and o[1] <= loop[1] for o in jumps)
    ]
    loads = [p for p, text in instructions if _LOAD.search(text)]
    inner = [(first, last) for first, last in inner if any(first <= p <= last for p in loads)]
    return inner or ([(0, instructions[-1][0])] if instructions else [])


def walk(texts: list[str], least_bytes: int = 1) -> HotLoop:
    """Count loads, and how often some are issued after a wait for earlier ones."""
    pending: list[set[int]] = []  # the registers of loads that are under way
    loaded = rounds = 0
    has_waited = True
    for text in texts:
        load = _LOAD.search(text)
        right = text if _WRITES_MEMORY.search(text) else text.partition(",")[2]
        used = {int(number) for number in re.findall(r"\bR(\d+)", right)}
        if any(registers & used for registers in pending):
            has_waited = True
            pending = [registers for registers in pending if not registers & used]
        if load and _width(text) >= least_bytes:
            rounds, has_waited = rounds + has_waited, False
            width = _width(text)
            loaded += width
            first = int(load[1])
            pending.append(set(range(first, first + max(1, width // 4))))
    return HotLoop(len(texts), loaded, rounds)


def _width(load: str) -> int:
    suffixes = load.partition(" R")[0].split(".")
    return next((_BYTES[suffix] for suffix in suffixes if suffix in _BYTES), 4)


def _count(code: str) -> tuple[int, int, int, int]:
    """Return wide loads, narrow loads, wide stores, narrow stores."""
    counts = {(kind, wide): 0 for kind in ("LD", "ST") for wide in (True, False)}
    for name, suffixes in _ACCESS.findall(code):
        counts[name[:2], "128" in suffixes.split(".")] += 1
    return tuple(counts.values())


def narrow_kernels(op: str, kernels: list[dict], accepted: list[dict]) -> list[str]:
    """Return a complaint for each engine kernel without 16-byte accesses that was not accepted."""
    complaints = []
    for kernel in kernels:
        name = kernel["kernel"]
        allowed = {a["what"] for a in accepted if ptxas.names(a, op, name)}
        for what in PACKED_KERNELS.get(name.partition("<")[0], ()):
            missing = kernel[f"wide_{what}"] == 0 and kernel[f"narrow_{what}"] > 0
            if missing and what not in allowed:
                complaints.append(
                    f"{op}: {name} has no 128-bit {what}. Keep packs aligned and whole, or accept "
                    "it by name with a reason in ci/accepted_kernels.toml"
                )
    return complaints
