"""Compile every kernel that the wheels launch by the oldest and the newest NVRTC; no GPU is needed.

python ci/nvrtc.py [--lot] [--wheels] [--amd=GFX,...] [OP...]

The names are those that the built libraries list themselves: those of the wheels in dist/, or built
here. A kernel that cannot be named outside of its source, that needs a header which NVRTC lacks, or
whose parameters take other bytes there would fail on a user's GPU alone. Each NVRTC compiles for
all architectures that it knows of those that wheels are for, and of one before. From the newest
one's machine code for `evidence` of ci/matrix.toml, ci/evidence.py reads what the kernels take.

With --lot, which CI passes, it is the evidence for all kernels of the named ops. Of all others, it
is the evidence for those of ci/gpu_costs.toml and for a lot of each engine; and each NVRTC compiles
a smaller lot for another architecture, drawn at each commit as all lots are.

With --amd the compiler is the HIPRTC that the loader finds, for these architectures. With a lot, it
is for one of them, and of a quarter of the sources besides those of the named ops.
"""

import ctypes
import os
import random
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch  # noqa: F401  # the libraries need it

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import hiprtc, nvrtc, rtc, toolchain  # noqa: E402
from native.build import build, find_ops  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci import costs, dirty, evidence, ptxas, sass  # noqa: E402
from ci.cover import LOT, SMALL_LOT  # noqa: E402
from ci.kernels import worth_reading  # noqa: E402
from ci.workspace import MATRIX, leading_ops, ops, wheel  # noqa: E402

HIPRTC = ("libhiprtc", "libamdhip64")
OUTPUT = ROOT / ".nox" / "kernels" / toolchain.RTC


@dataclass(frozen=True)
class Unit:
    """The kernels that a source of an op launches."""

    package: str
    name: str  # the op's, and its source's where it has several
    kernels: list[rtc.Kernel]
    folders: dict[str, Path]  # of each op of the package

    @property
    def op(self) -> str:
        return self.name.partition(".")[0]


def main(*words: str) -> None:
    has_lot, has_wheels = "--lot" in words, "--wheels" in words
    wanted = leading_ops([word for word in words if not word.startswith("--")])[0]
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    built = [] if has_lot else wanted
    units = [unit for p in packages() for unit in units_of(p, built, has_wheels)]
    amd = [word.removeprefix("--amd=").split(",") for word in words if word.startswith("--amd=")]
    if amd:
        sys.exit("\n".join(compile_for_amd(amd[0], units, has_lot, wanted)) or None)
    compilers = [nvrtc.Nvrtc(path) for path in nvrtc.libraries()]
    versions = {str(compiler) for compiler in compilers}
    if len(versions) < 2 or not units:
        sys.exit(f"expected two versions of NVRTC and some kernels, got {versions} and {units}")
    table = costs.Table()
    taken = [drawn(unit, LOT, table, wanted) for unit in units] if has_lot else units
    failures = show_evidence(compilers[-1], taken, units, [] if has_lot else wanted)
    for compiler in compilers if not os.environ.get(costs.WRITES) else ():
        for arch in architectures(compiler, has_lot, compiler is compilers[-1]):
            taken = [drawn(unit, SMALL_LOT) for unit in units] if has_lot else units
            failures += compile_all(compiler, arch, taken)
    if failures:
        sys.exit("\n".join(["", *failures]))


def compile_for_amd(
    archs: list[str], units: list[Unit], has_lot: bool, whole: list[str]
) -> list[str]:
    """Compile by HIPRTC, all or a lot; return what is wrong."""
    stems = [f"{stem}.so{end}" for end in ("", ".7", ".6", ".5") for stem in HIPRTC]
    compiler, problems = hiprtc.find(stems)
    if compiler is None:
        return ["no HIPRTC was found:", *problems]
    if has_lot:
        seed = random.Random(f"HIPRTC {dirty.seed()}")
        archs = [seed.choice(archs)]
        some = {unit.name for unit in seed.sample(units, (len(units) + 3) // 4)}
        units = [unit for unit in units if unit.op in whole or unit.name in some]
        units = [drawn(unit, LOT if unit.op in whole else SMALL_LOT) for unit in units]
    return [line for arch in archs for line in compile_all(compiler, arch, units)]


def packages() -> list[Path]:
    return sorted((ROOT / "packages").iterdir())


def units_of(package: Path, wanted: list[str], has_wheels: bool) -> Iterator[Unit]:
    """Take or build the host's half of a package's ops; give the kernels that it lists."""
    found = [op for op in find_ops(package / "src") if not wanted or op.name in wanted]
    if not found:
        return
    folder, target = OUTPUT / package.name, Target(toolchain.RTC)
    compiled = [] if has_wheels else found
    library = build(compiled, [target], folder, package=package.name, portable=True)[target]
    if has_wheels:
        library = unpacked(wheel(package.name), f"{toolchain.RTC}.so", folder / "wheel")
    listed = rtc.listed(ctypes.CDLL(str(library)))
    size = library.stat().st_size
    print(f"{package.name}: {len(found)} ops, {len(listed)} kernels, {size:,} bytes", flush=True)
    kernels = defaultdict(list)
    for kernel in listed:
        kernels[kernel.unit.decode()].append(kernel)
    folders = {op.name: op.folder for op in found}
    for name in kernels:
        yield Unit(package.name, name, kernels[name], folders)


def unpacked(archive: Path, name: str, folder: Path) -> Path:
    """Take a file of this name out of an archive."""
    with zipfile.ZipFile(archive) as opened:
        (member,) = (each for each in opened.namelist() if Path(each).name == name)
        return Path(opened.extract(member, folder))


def short_name(kernel: rtc.Kernel) -> str:
    """Return the name that tables have; of a kernel that cannot be named, the mangled one."""
    try:
        return ptxas.shorten(rtc.expression(kernel.name.decode()))
    except BuildError:
        return kernel.name.decode()


def drawn(unit: Unit, lot: int, table: costs.Table | None = None, whole: list[str] = ()) -> Unit:
    """Return the unit with the kernels that CI takes: the table's, and a lot of each engine.

    Args:
        unit: with all of its kernels.
        lot: how many of each engine, drawn at each commit.
        table: of costs; which of the package's ops launches a kernel does not matter.
        whole: ops of which all kernels are taken.
    """
    if unit.op in whole:
        return unit
    launched = {kernel for op, kernel in (table.kernels if table else ()) if op in unit.folders}
    taken, engines = [], defaultdict(list)
    for kernel in unit.kernels:
        name = short_name(kernel)
        group = taken if name in launched else engines[name.partition("<")[0]]
        group.append(kernel)
    seed = random.Random(f"{lot} kernels of {unit.name} {dirty.seed()}")
    for engine in sorted(engines):
        taken += seed.sample(engines[engine], min(lot, len(engines[engine])))
    return replace(unit, kernels=taken)


def architectures(compiler: nvrtc.Nvrtc, has_lot: bool, shows_evidence: bool) -> list[str]:
    """Return what a compiler is tried for: all that it knows of ours, or by lot one of them.

    That of the evidence is not among them where the compiler shows it.
    """
    ours = ["sm_75", *MATRIX["cuda"]["archs"]]
    known = [arch for arch in ours if int(arch.removeprefix("sm_")) in compiler.architectures]
    known = [arch for arch in known if not (shows_evidence and arch == evidence.ARCH)]
    return [random.Random(f"NVRTC {compiler} {dirty.seed()}").choice(known)] if has_lot else known


def show_evidence(compiler, taken: list[Unit], units: list[Unit], wanted: list[str]) -> list[str]:
    """Compile for the evidence; return what failed, else what is wrong with the machine code."""
    compiled: dict[int, tuple[str, bytes, str]] = {}
    failures = compile_all(compiler, evidence.ARCH, taken, compiled)
    if failures:
        return failures

    launched = costs.Table().launched()

    def found(unit: Unit) -> dict:
        kernels = [compiled[id(kernel)] for kernel in unit.kernels]
        return evidence.of_unit(unit.op, kernels, [*unit.folders], launched)

    with ThreadPoolExecutor(int(os.environ["MAX_JOBS"])) as pool:
        facts = dict(
            zip((f"{u.package}/{u.name}" for u in taken), pool.map(found, taken), strict=True)
        )
    listed = {(unit.op, short_name(kernel)) for unit in units for kernel in unit.kernels}
    return evidence.judge(facts, wanted or sorted(ops()), listed, str(compiler))


def compile_all(compiler, arch: str, units: list[Unit], compiled: dict | None = None) -> list[str]:
    """Compile the kernels for an architecture, into `compiled` too; return the complaints."""
    start = time.monotonic()
    who = f"{compiler.title} {compiler}"
    is_nvidia = compiler.title == "NVRTC"
    verbose = [evidence.VERBOSE] if is_nvidia else []

    def complaints(listed: tuple[Unit, rtc.Kernel]) -> list[str]:
        unit, kernel = listed
        try:
            name, program, options = rtc.program(kernel, unit.folders, arch, compiler)
            symbol, image, said = compiler.compile(program, name, [*options, *verbose])
        except BuildError as error:
            return [f"{who} for {arch}, {unit.name}: {error}"]
        if not symbol or not image.startswith(b"\x7fELF"):
            return [f"{name}: gave no machine code"]
        # Of AMD's machine code nothing here reads them: the program's static_assert compares.
        counted = sass.parameter_bytes(image, symbol) if is_nvidia else None
        if is_nvidia and counted != kernel.parameter_bytes:
            given = f"{kernel.parameter_bytes} bytes of parameters"
            return [f"{name}: the driver copies {counted} bytes, and the host gives {given}"]
        if compiled is not None:
            compiled[id(kernel)] = symbol, image, said
        return [f"{who}, {unit.name}: {line}" for line in worth_reading(said)]

    kernels = [(unit, kernel) for unit in units for kernel in unit.kernels]
    with ThreadPoolExecutor(int(os.environ["MAX_JOBS"])) as pool:
        failures = [line for lines in pool.map(complaints, kernels) for line in lines]
    print(
        f"{who} for {arch}: {len(kernels)} kernels, {len(failures)} failed, in "
        f"{time.monotonic() - start:.0f} s",
        flush=True,
    )
    return failures


if __name__ == "__main__":
    main(*sys.argv[1:])
