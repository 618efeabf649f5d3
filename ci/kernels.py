"""Compile every op of every package for a GPU backend; no GPU is needed, and nothing is run.

python ci/kernels.py cuda|hip ARCHITECTURE... [-- OP...]

For one CUDA architecture, `evidence` in ci/matrix.toml, it also shows what the kernels take:
registers, shared memory, spills, and whether the engines move 16 bytes at a time. Figures of every
kernel go to .nox/kernels/cuda/kernels.json. A spill or a narrow kernel fails the run unless
ci/accepted_kernels.toml names it.

With APEX_CI_SAMPLE, every op is compiled for CUDA's `evidence`, and the ops of ci/cover.py's sample
for one of the other architectures, drawn by lot at each commit: the emulated GPU runs all kernels,
and most faults show on any architecture. Of all but two ops, drawn too, only the kernels are
compiled, without the host's half, which takes as long and which g++ compiles for the wheels.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import toolchain  # noqa: E402
from native.build import Op, build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import costs, cover, dirty, ptxas, sass  # noqa: E402
from ci.workspace import MATRIX, leading_ops, tomllib  # noqa: E402
from ci.workspace import ops as workspace_ops  # noqa: E402

# Torch's and the toolkits' own headers are compiled with -isystem, so what is left is ours.
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
# Of these, no one can do anything in a kernel's source.
NOISE = re.compile(r"\d+ warnings? generated|argument unused during compilation")

GPU_HEADER = ROOT / "shared_csrc" / "include" / "apex" / "core" / "gpu.h"
OUTPUT = ROOT / ".nox" / "kernels"
MACHINE_CODE = OUTPUT / "cuda" / "costs.json"  # what ci/costs.py writes to its table
EVIDENCE_ARCH = MATRIX["cuda"]["evidence"]
# A package, architectures, and whether kernels are compiled without the host's half.
Group = tuple[str, tuple[str, ...], bool]
WITH_HOST = 2  # ops that nvcc compiles whole where CI samples


def main(backend: str, *words: str) -> None:
    end = words.index("--") if "--" in words else len(words)
    archs, wanted = words[:end], leading_ops(words[end + 1 :])[0]
    shows_evidence = backend == "cuda" and EVIDENCE_ARCH in archs
    if shows_evidence:
        os.environ.update(ptxas.VERBOSE)
    ops = grouped(backend, archs, wanted)

    def folder_of(package: str, some: tuple[str, ...], halved: bool) -> Path:
        parts = [package, *(() if some == archs else some), *(["device"] if halved else [])]
        return OUTPUT / backend / "-".join(parts)

    def compile_together(group: Group) -> list[str]:
        package, some, halved = group
        start = time.monotonic()
        compile_group = compile_device_code if halved else compile_ops
        try:
            target = Target(backend, archs=some)
            failures = compile_group(ops[group], target, folder_of(*group), package)
        except BuildError as error:
            return [str(error)]
        names, took = ", ".join(op.name for op in ops[group]), time.monotonic() - start
        print(f"{package} for {', '.join(some)}: {names} in {took:.0f} s", flush=True)
        return [f"{package}: {line}" for line in failures]

    # Two at a time: a package of one op would leave the other cores idle.
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    largest_first = sorted(ops, key=lambda group: -len(units_of(ops[group])))
    with ThreadPoolExecutor(2) as pool:
        failures = [line for lines in pool.map(compile_together, largest_first) for line in lines]
    if shows_evidence and not failures:
        found = {}
        for group, compiled in ops.items():
            found |= evidence(compiled, folder_of(*group), group[0])
        failures += check_costs(found)
        failures += judge(found, wanted)
    if failures:
        sys.exit("\n".join(["", *failures]))


def grouped(backend: str, archs: tuple[str, ...], wanted: list[str]) -> dict[Group, list[Op]]:
    """Return the ops by package, by what they are compiled for, and whether for that alone."""
    ops, sampled = {}, sample(wanted)
    halved = without_host(sampled) if backend == "cuda" else set()
    for package in sorted((ROOT / "packages").iterdir()):
        for op in chosen(find_ops(package / "src"), wanted):
            group = package.name, archs_of(op, archs, sampled), op.name in halved
            ops.setdefault(group, []).append(op)
    return ops


def sample(wanted: list[str]) -> set[str] | None:
    """Return which ops are compiled for an architecture beside CUDA's evidence; None: for all."""
    if not os.environ.get("APEX_CI_SAMPLE"):
        return None
    return set(wanted or cover.sampled_ops())


def without_host(sampled: set[str] | None, seed: str | None = None) -> set[str]:
    """Return the ops of which kernels alone are compiled: where CI samples, all but some."""
    if sampled is None:
        return set()
    lot = random.Random(f"host {seed or dirty.seed()}")
    return set(workspace_ops()) - set(lot.sample(sorted(sampled), min(WITH_HOST, len(sampled))))


def archs_of(
    op: Op, archs: tuple[str, ...], sampled: set[str] | None, seed: str | None = None
) -> tuple[str, ...]:
    """Return what an op is compiled for: all, or where CI samples, evidence and perhaps another."""
    if sampled is None:
        return archs
    others = [arch for arch in archs if arch != EVIDENCE_ARCH]
    drawn = random.Random(f"{seed or dirty.seed()} {op.name}").choice(others or archs)
    kept = {EVIDENCE_ARCH, drawn} if op.name in sampled else {EVIDENCE_ARCH}
    return tuple(arch for arch in archs if arch in kept)


def chosen(ops: list[Op], wanted: list[str]) -> list[Op]:
    """Return the wanted ones; all where none is named."""
    return [op for op in ops if not wanted or op.name in wanted]


def compile_ops(ops: list[Op], target: Target, folder: Path, package: str) -> list[str]:
    """Build a package's ops; return the compiler's warnings."""
    record = folder / "resources.json"
    known = json.loads(record.read_text()) if record.is_file() else {}
    shows_evidence = os.environ.get("NVCC_APPEND_FLAGS") == ptxas.VERBOSE["NVCC_APPEND_FLAGS"]
    for _, unit in units_of(ops):
        if target.backend == "cuda" and shows_evidence and not known.get(unit):
            # An object of an earlier run that kept no figures would not be compiled again.
            (folder / f"{unit}.{target.name}.o").unlink(missing_ok=True)
    log = folder / "build.log"
    try:
        build(ops, [target], folder, package=package)
    finally:
        text = log.read_text() if log.is_file() else ""
        known |= ptxas.of_ops(text, EVIDENCE_ARCH)
        record.write_text(json.dumps(known, indent=1))
    return worth_reading(text)


def compile_device_code(ops: list[Op], target: Target, folder: Path, package: str) -> list[str]:
    """Compile the kernels of a package's ops without their host code; return warnings."""
    folder.mkdir(parents=True, exist_ok=True)

    def said(unit: tuple[Op, str, Path]) -> str:
        op, name, source = unit
        flags = toolchain.compile_flags(target, toolchain.newest_ptx(source))
        flags += [*toolchain.include_flags(target), f"-I{op.folder}"]
        flags += ["-fatbin", "--no-compress"]
        command = [*toolchain.compiler_for("cuda"), *flags, str(source)]
        command += ["-o", str(folder / f"{name}.fatbin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{package}: compiling {name} (cuda) failed.\n{done.stderr[:3000]}")
        return done.stdout + done.stderr

    units = [(op, op.unit_name(source), source) for op in ops for source in op.sources]
    with ThreadPoolExecutor(int(os.environ["MAX_JOBS"])) as pool:
        logs = list(pool.map(said, units))
    known = {
        unit[1]: [vars(found) for found in ptxas.parse(log.splitlines(), EVIDENCE_ARCH)]
        for unit, log in zip(units, logs, strict=True)
    }
    (folder / "resources.json").write_text(json.dumps(known, indent=1))
    return worth_reading("\n".join(logs))


def has_kernels(compiled: Path) -> bool:
    """Tell whether what nvcc wrote has kernels; ops that call a BLAS library have none."""
    mark = b".text._Z" if compiled.suffix == ".fatbin" else b"__cudaRegisterFunction"
    return mark in compiled.read_bytes()


def compiled_unit(folder: Path, unit: str) -> Path:
    """Return a unit's object, or what there is where its kernels alone were compiled."""
    whole = folder / f"{unit}.cuda.o"
    return whole if whole.is_file() else folder / f"{unit}.fatbin"


def units_of(ops: list[Op]) -> list[tuple[Op, str]]:
    """Return what is compiled on its own, and the op that it is a part of."""
    return [(op, op.unit_name(source)) for op in ops for source in op.sources]


def evidence(ops: list[Op], folder: Path, package: str) -> dict[str, dict]:
    """Return, by unit of compilation, the resources and memory accesses of its kernels."""
    known = json.loads((folder / "resources.json").read_text())
    launched = costs.Table().launched()
    return {
        f"{package}/{unit}": {
            "op": op.name,
            "resources": known[unit],
            **machine_code(op.name, known[unit], compiled, launched),
        }
        for op, unit in units_of(ops)
        if has_kernels(compiled := compiled_unit(folder, unit))
    }


def machine_code(op: str, resources: list[dict], compiled: Path, launched: dict) -> dict[str, list]:
    """Return the accesses of all kernels, and the costs of those that calls are known to launch."""
    text = sass.disassemble(compiled, EVIDENCE_ARCH)
    accesses = [vars(accesses) for accesses in sass.parse(text)]
    return {"accesses": accesses, "costs": costs.machine_code(op, resources, text, launched)}


def check_costs(found: dict[str, dict]) -> list[str]:
    """Leave the figures for ci/costs.py; return what differs from its table, unless it asks."""
    figures = [kernel for unit in found.values() for kernel in unit.pop("costs")]
    MACHINE_CODE.write_text(json.dumps(figures, indent=1))
    ops = sorted({unit["op"] for unit in found.values()})
    is_written = os.environ.get(costs.WRITES)
    if is_written:
        return []
    return costs.with_advice(costs.check_kernels(figures, ops, costs.nvcc_version()))


def judge(found: dict[str, dict], wanted: list[str] = ()) -> list[str]:
    """Print the table, write all figures, and return what is wrong with them."""
    (OUTPUT / "cuda" / "kernels.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    accepted = tomllib.loads((ROOT / "ci" / "accepted_kernels.toml").read_text())
    spills, narrow = accepted.get("spill", []), accepted.get("narrow", [])
    complaints = []
    for op in found.values():
        complaints += ptxas.large_shared_variables(op["op"], op["resources"], variable_bytes())
        complaints += ptxas.unaccepted_spills(op["op"], op["resources"], spills)
        complaints += sass.narrow_kernels(op["op"], op["accesses"], narrow)
    present = [(op["op"], kernel["kernel"]) for op in found.values() for kernel in op["resources"]]
    for entry in [*spills, *narrow]:
        if wanted and entry.get("op") not in wanted:
            continue  # not compiled
        if not entry.get("reason"):
            complaints.append(f"ci/accepted_kernels.toml: {entry['kernel']} has no reason")
        if not any(ptxas.names(entry, *kernel) for kernel in present):
            complaints.append(f"ci/accepted_kernels.toml: there is no kernel {entry['kernel']}")
    return complaints


def variable_bytes() -> int:
    """Return how many bytes of shared variables the engines plan for."""
    return int(re.search(r"kSharedVariableBytes = (\d+);", GPU_HEADER.read_text())[1])


def table(found: dict[str, dict]) -> str:
    """Return a row per unit with its worst figures."""
    title = f"op, {EVIDENCE_ARCH}"
    heads = ("kernels", "registers", "shared B", "spilled B", "16-byte loads", "and stores")
    lines = [f"{title:<44}" + "".join(f"{head:>15}" for head in heads)]
    for name, op in found.items():
        kernels = op["resources"]
        figures = [
            len(kernels),
            max(k["registers"] for k in kernels),
            max(k["shared_bytes"] for k in kernels),
            max(k["spill_store_bytes"] + k["spill_load_bytes"] for k in kernels),
            *(sum(a[f"wide_{what}"] > 0 for a in op["accesses"]) for what in ("loads", "stores")),
        ]
        lines.append(f"{name:<44}" + "".join(f"{figure:>15}" for figure in figures))
    lines.append("The last two columns count kernels that have such instructions.")
    return "\n".join(lines)


def worth_reading(log: str) -> list[str]:
    """Return the lines of compiler warnings, each once."""
    lines = [line for line in log.splitlines() if WARNING.search(line) and not NOISE.search(line)]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
