"""What NVRTC says of every kernel: registers, shared memory and spills, of `--ptxas-options=-v`."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_NAMESPACES = re.compile(r"\b(?:\w+::)+")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes; bytes of spills are code, executed by every thread."""

    kernel: str  # short name, such as foreach_kernel<Scale<float>, 4, ...>
    symbol: str
    registers: int
    shared_bytes: int  # static; what a launch adds is not known to the compiler
    spill_store_bytes: int
    spill_load_bytes: int


def parse(lines: Iterable[str], arch: str) -> list[Resources]:
    """Read ptxas's lines on the kernels of one architecture; all others are passed over."""
    facts: list[dict] = []
    wanted = False
    for line in lines:
        entry = _ENTRY.search(line)
        if entry:
            wanted = entry[2] == arch
            if wanted:
                facts.append({"symbol": entry[1]})
        elif wanted and (spills := _SPILLS.search(line)):
            facts[-1]["spill_store_bytes"], facts[-1]["spill_load_bytes"] = map(
                int, spills.groups()[1:]
            )
        elif wanted and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            facts[-1]["registers"] = int(used[1])
            facts[-1]["shared_bytes"] = int(shared[1]) if shared else 0
            wanted = False  # functions that are not entries may follow
    names = short_names([f["symbol"] for f in facts])
    return [Resources(kernel=names[f["symbol"]], **f) for f in facts]


def short_names(symbols: list[str]) -> dict[str, str]:
    """Return for each mangled symbol its kernel's name with template arguments, as written."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        raise FileNotFoundError("c++filt was not found; it is part of binutils")
    if not symbols:
        return {}
    done = subprocess.run([tool, *symbols], capture_output=True, text=True, check=True)
    return dict(zip(symbols, map(shorten, done.stdout.splitlines()), strict=True))


def shorten(demangled: str) -> str:
    """Drop namespaces, the return type and the parameters of a demangled kernel."""
    text = _NAMESPACES.sub("", demangled.replace("(anonymous namespace)::", ""))
    text = text.replace("> >", ">>").replace("> >", ">>").removeprefix("void ")
    depth = 0
    for position, character in enumerate(text):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return text[:position]
    return text


def unaccepted_spills(op: str, kernels: list[dict], accepted: list[dict]) -> list[str]:
    """Return a complaint for each kernel that spills more than was accepted by name."""
    complaints = []
    for kernel in kernels:
        spilled = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
        allowed = max((a["bytes"] for a in accepted if names(a, op, kernel["kernel"])), default=0)
        if spilled > allowed:
            complaints.append(
                f"{op}: {kernel['kernel']} spills {spilled} bytes (accepted: {allowed}). Give it "
                "fewer live values, or accept it by name with a reason in ci/accepted_kernels.toml"
            )
    return complaints


def names(acceptance: dict, op: str, kernel: str) -> bool:
    """Whether an entry of ci/accepted_kernels.toml is for this kernel of this op; * matches all."""
    return acceptance["op"] == op and fnmatchcase(kernel, acceptance["kernel"])
