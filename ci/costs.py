"""What every public call costs on a GPU, seen without one: `nox -s costs` writes gpu_costs.toml.

python ci/costs.py [OP...]

Two parts of the table come from two places: calls (launches, bytes, Python) from the emulated GPU
(ci/cost_counts.py), machine code (registers, bytes under way) of the kernels that they launch from
what NVRTC compiles. `nox -s emulate` and `nox -s kernels` compare their part with the file; a
number that differs fails the run. docs/guides/gpu-costs.md says how to read it.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from ci import sass, workspace  # noqa: E402
from ci.workspace import tomllib  # noqa: E402

TABLE = ROOT / "ci" / "gpu_costs.toml"
# Of an H100: what a launch takes in a CUDA graph, and so its start; what a copy moves
# (docs/benchmarks), and with how many KiB under way in an SM (about 700 ns of latency).
LAUNCH_US, COPY_BYTES_PER_US, COPY_KIB = 2.6, 2825e3, 36
# What an SM has, compute capability 9.0.
SM_THREADS, SM_BLOCKS, SM_REGISTERS = 2048, 32, 65536
SM_SHARED_BYTES, BLOCK_SHARED_BYTES = 233472, 1024
# A process of tests loads every op's library. Each has a static thread-local variable; for those
# the C library keeps 512 bytes in all, unless it is told otherwise.
ONE_PROCESS = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=16384"}
EMULATED = {"APEX_EMULATE": "32"}
BY_DEVICE = {"dense_blaslt", "weight_gradient"}  # whose Python takes another way on a CPU
DERIVED = ("predicted_us", "torch_us")  # of other numbers, which are compared
TRAFFIC = ("accesses", "bytes", "sectors", "needed_sectors", "distinct_bytes")
HEAD = """\
# What public calls cost on a GPU, counted without one. How to read it: docs/guides/gpu-costs.md.
# Written by `nox -s costs`. CI compares every number; whoever changes one says why in the commit.
"""


class Table:
    """The file: tools that decide numbers, calls by name, kernels by op and name."""

    def __init__(self, file: Path = TABLE):
        self.file = file
        text = tomllib.loads(file.read_text()) if file.is_file() else {}
        self.tools: dict[str, str] = text.get("tools", {})
        self.uncounted: list[str] = text.get("uncounted", [])  # ops that are not in it yet
        self.calls = {call_key(facts): facts for facts in text.get("call", [])}
        self.kernels = {kernel_key(facts): facts for facts in text.get("kernel", [])}

    def predictions(self, facts: dict) -> dict[str, float]:
        """Return what the model says of a call and of torch's, on an H100."""
        found = {"predicted_us": predicted_us(launches_of(facts), self.time_bytes(facts))}
        if "torch_launches" in facts:
            found["torch_us"] = predicted_us(facts["torch_launches"], facts["torch_moved"])
        return found

    def time_bytes(self, facts: dict) -> float:
        """Return as many bytes as a copy moves in the time in which these kernels move theirs."""
        total = 0.0
        for kernel in facts["kernels"]:
            known = self.kernels.get(kernel_key(kernel), {})
            share = min(1, known.get("kib_under_way", COPY_KIB) / COPY_KIB)
            total += (kernel["loads"][-1] + kernel["stores"][-1]) / share
        return total

    def write(self) -> None:
        for facts in self.calls.values():
            facts |= self.predictions(facts)
        self.uncounted = sorted(set(workspace.ops()) - {op for op, _, _ in self.calls})
        lines = [HEAD, f"uncounted = {literal(self.uncounted)}", "", "[tools]"]
        lines += [f"{name} = {json.dumps(self.tools[name])}" for name in sorted(self.tools)]
        for facts in (self.calls[key] for key in sorted(self.calls)):
            lines += ["", "[[call]]"]
            lines += [f"{name} = {literal(value)}" for name, value in facts.items()]
        for facts in (self.kernels[key] for key in sorted(self.kernels)):
            lines += ["", "[[kernel]]"]
            lines += [f"{name} = {literal(value)}" for name, value in facts.items()]
        self.file.write_text("\n".join(lines) + "\n")

    def launched(self) -> dict[tuple[str, str], dict]:
        """Return the kernels that calls launch: op and name, largest block and shared memory."""
        found: dict[tuple[str, str], dict] = {}
        for call in self.calls.values():
            for kernel in call["kernels"]:
                sizes = found.setdefault(kernel_key(kernel), {"block": 0, "shared": 0})
                sizes |= {what: max(sizes[what], kernel[what]) for what in sizes}
        return found


def call_key(facts: dict) -> tuple[str, str, str]:
    return facts["op"], facts["call"], facts["part"]


def kernel_key(facts: dict) -> tuple[str, str]:
    return facts["op"], facts["kernel"]


def literal(value) -> str:
    """Return TOML: kernels of a call each on a line."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(k)} = {literal(v)}" for k, v in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + "".join(f"  {literal(each)},\n" for each in value) + "]"
    return json.dumps(value)


def compare(kind: str, key: tuple, recorded: dict | None, found: dict, skipped=()) -> list[str]:
    """Return a line for each number that differs from the file's, with both."""
    name = ": ".join(key)
    if recorded is None:
        return [f"{kind} {name} is not in {TABLE.name}"]
    skipped = (*skipped, *DERIVED)
    before, now = flat(recorded, skipped), flat(found, skipped)
    return [
        f"{name}: {what}: {before.get(what, 'none')} in {TABLE.name}, {now.get(what, 'none')} now"
        for what in sorted(before.keys() | now.keys())
        if before.get(what) != now.get(what)
    ]


def flat(facts: dict, skipped=(), prefix: str = "") -> dict[str, object]:
    """Name each number of nested facts."""
    found: dict[str, object] = {}
    for name, value in facts.items():
        if name in skipped:
            continue
        if name in ("loads", "stores"):
            value = dict(zip(TRAFFIC, value, strict=True))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {": ".join(kernel_key(each)): each for each in value}
        if isinstance(value, dict):
            found |= flat(value, skipped, f"{prefix}{name}: ")
        else:
            found[prefix + name] = value
    return found


# Calls, on the emulated GPU.


def count_calls(ops: list[str], **environment: str) -> list[dict]:
    """Run the cases of all ops that have some, a process a core; return the facts of each call."""
    from ci.cost_steps import CASES

    chosen = [op for op in ops if op in CASES]
    cores = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="costs-"))

    def run(share: int) -> list[dict]:
        output = folder / f"{share}.json"
        command = [sys.executable, str(ROOT / "ci" / "cost_counts.py"), str(output)]
        variables = os.environ | {"KINETO_LOG_LEVEL": "5"} | ONE_PROCESS | environment
        command += chosen[share::cores]
        done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True)
        # The profiler tells of itself at each use.
        told = [line for line in done.stderr.splitlines() if not line.startswith("USDT:")]
        print("\n".join(told), file=sys.stderr)
        if done.returncode:
            sys.exit(f"costs: {' '.join(command)} failed with exit status {done.returncode}")
        return json.loads(output.read_text())

    try:
        with ThreadPoolExecutor(cores) as pool:
            found = [call for calls in pool.map(run, range(cores)) for call in calls]
    finally:
        shutil.rmtree(folder)
    return found


def predicted_us(launches: int, moved: float) -> float:
    """Return the time of a graph of launches in a row, and of bytes at a copy's speed."""
    return round(LAUNCH_US * (1 + launches) + moved / COPY_BYTES_PER_US, 2)


def with_advice(wrong: list[str]) -> list[str]:
    """Add to complaints, where there are some, what to do about them."""
    advice = "Where that is meant: python3 -m nox -s costs -- OP..., and say in the commit why."
    more = f"{advice} docs/guides/gpu-costs.md tells what the numbers are."
    return [*wrong, more] if wrong else []


def launches_of(facts: dict) -> int:
    return facts["launches"] + facts["memsets"] + facts["copies"]


def check_calls(ops: list[str], table: Table | None = None) -> list[str]:
    """Count the calls of ops; return what differs from the file. For `nox -s emulate`."""
    table = table or Table()
    ops = [op for op in ops if op not in table.uncounted]
    found = {call_key(facts): facts for facts in count_calls(ops, **EMULATED)}
    skipped = unlike(table, host_tools())
    wrong = []
    for key, facts in found.items():
        wrong += compare("call", key, table.calls.get(key), facts, skipped)
    for key in table.calls.keys() - found.keys():
        if key[0] in ops:
            wrong.append(f"call {': '.join(key)} of {TABLE.name} is no case of ci/cost_*.py")
    return wrong


def check_python(table: Table | None = None) -> list[str]:
    """Compare the functions that calls of all ops enter, with the CPU's kernels: in seconds.

    What `check_calls` compares has to be compiled, so that CI does it for some ops alone.
    """
    table = table or Table()
    ops = sorted(workspace.ops().keys() - BY_DEVICE - {*table.uncounted})
    wrong = []
    for facts in count_calls(ops, APEX_EMULATE=""):
        recorded = table.calls.get(call_key(facts))
        same = recorded and {name: recorded.get(name) for name in facts}
        wrong += compare("call", call_key(facts), same, facts)
    return with_advice(wrong)


def host_tools() -> dict[str, str]:
    """Return the tools that decide the numbers of calls."""
    from native import toolchain

    command = [*toolchain.find_cxx(), "-dumpfullversion", "-dumpversion"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    import torch

    return {
        "compiler": version.partition(".")[0].strip(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__.partition("+")[0],
    }


def unlike(table: Table, tools: dict[str, str]) -> tuple[str, ...]:
    """Return which numbers are not compared, since other tools than the file's decide them."""
    other = {name for name, version in tools.items() if table.tools.get(name) != version}
    if other:
        print(f"costs: not all compared: {', '.join(sorted(other))} differ from {TABLE.name}'s")
    by_torch = ("python", "c", "torch_launches", "torch_moved")
    skipped = by_torch if other & {"python", "torch"} else ()
    return (*skipped, "loads", "stores") if "compiler" in other else skipped


# Machine code, of kernels that the calls of the file launch.


def machine_code(ops: list[str], resources: list[dict], kernels: list, wanted: dict) -> list[dict]:
    """Return the facts of the wanted kernels for each op that launches one, by ptxas and SASS."""
    by_name = {facts["kernel"]: facts for facts in resources}
    found = []
    for (name, code), op in itertools.product(kernels, ops):
        if (op, name) not in wanted:
            continue
        facts, loop = by_name[name], sass.hot_loop(name, code)
        spilled = facts["spill_store_bytes"] + facts["spill_load_bytes"]
        kernel = {"op": op, "kernel": name, "registers": facts["registers"], "spilled": spilled}
        sizes = wanted[op, name]
        shared = facts["shared_bytes"] + sizes["shared"]
        resident = resident_threads(facts["registers"], sizes["block"], shared)
        kernel |= {"block": sizes["block"], "resident_warps": resident // 32}
        if loop:
            under_way = loop.loaded_bytes / loop.rounds * resident / 1024
            kernel |= {"hot_instructions": loop.instructions, "hot_bytes": loop.loaded_bytes}
            kernel |= {"rounds": loop.rounds, "kib_under_way": round(under_way, 1)}
        found.append(kernel)
    return found


def resident_threads(registers: int, block: int, shared_bytes: int) -> int:
    """Return how many threads of whole blocks an SM holds."""
    by_warp = -(-registers * 32 // 256) * 256  # registers are given to warps, 256 at a time
    warps = -(-block // 32)
    blocks = min(
        SM_BLOCKS,
        SM_THREADS // (warps * 32),
        SM_REGISTERS // (by_warp * warps),
        SM_SHARED_BYTES // (shared_bytes + BLOCK_SHARED_BYTES),
    )
    return blocks * warps * 32


def check_kernels(found: list[dict], ops: list[str], nvrtc: str, table: Table | None = None):
    """Return what differs between machine code and the file. For `nox -s "kernels(nvrtc)"`."""
    table = table or Table()
    if table.tools.get("nvrtc") != nvrtc:
        print(f"costs: machine code is not compared: NVRTC {nvrtc} is not {TABLE.name}'s")
        return []
    now = {kernel_key(facts): facts for facts in found}
    wrong = []
    for key, facts in now.items():
        wrong += compare("kernel", key, table.kernels.get(key), facts)
    for key in table.kernels.keys() - now.keys():
        if key[0] in ops:
            wrong.append(f"kernel {': '.join(key)} of {TABLE.name} was not compiled")
    return wrong


# Set where ci/nvrtc.py is to leave figures, which are written to the table afterwards.
WRITES = "APEX_COSTS_WRITE"


def main(*ops: str) -> None:
    from native.nvrtc import Nvrtc, libraries

    from ci import emulate, evidence

    wanted = list(ops) or sorted(workspace.ops())
    emulate.build_ops(wanted)
    table = Table()
    table.calls = {key: facts for key, facts in table.calls.items() if key[0] not in wanted}
    table.calls |= {call_key(facts): facts for facts in count_calls(wanted, **EMULATED)}
    table.tools |= host_tools()
    launched = table.launched()
    table.kernels = {key: facts for key, facts in table.kernels.items() if key in launched}
    table.write()  # which kernels there are decides what is read of the machine code
    calls = [call for key, call in table.calls.items() if key[0] in wanted]
    launching = sorted({kernel["op"] for call in calls for kernel in call["kernels"]})
    command = [sys.executable, str(ROOT / "ci" / "nvrtc.py"), *launching]
    subprocess.run(command, env=os.environ | {WRITES: "1"}, check=True)
    found = json.loads(evidence.MACHINE_CODE.read_text())
    table.kernels |= {kernel_key(facts): facts for facts in found}
    table.tools["nvrtc"] = str(Nvrtc(libraries()[-1]))
    table.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
