"""Checks that a wheel and its sdist are what users can install: `ci/check_wheel.py WHEEL...`.

A wheel with kernels must load wherever torch's own wheels do (manylinux_2_28), on every supported
torch. `nox -s build` runs this on what it has built. With ``--torch FOLDER``, the ``lib`` folder of
the oldest supported torch, every symbol that a library takes from torch is looked up there;
``--local`` allows the tag ``linux_*``, which package indexes refuse.
"""

import argparse
import email
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZE_BUDGET_MIB = 60
# What every machine with torch has: libraries of manylinux_2_28, and torch's own.
SYSTEM = ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0")
SYSTEM += ("libdl.so.2", "librt.so.1")  # of CUDA's runtime, where the C library is that old
SYSTEM_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
TORCH = ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so", "libtorch.so", "libc10.so")
DRIVERS = ("libcuda.so.1", "libamdhip64.so.6", "libamdhip64.so.7")
MAY_NEED = {*SYSTEM, *SYSTEM_LOADERS, *TORCH, *DRIVERS}
# The newest symbol versions of manylinux_2_28.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
VERSION = re.compile(r"^([A-Z]+)_(\d+(?:\.\d+)*)$")
TORCH_SYMBOL = re.compile(r"^(?:aoti_)?torch_|^_ZN?K?(?:2at|3c10|5torch)")
# Of a library whose kernels are compiled at run time, see apex/rtc/host.h.
CONNECTION = {"apex_rtc_connect", "apex_rtc_kernels"}
# Of torch's library for a GPU, which a torch for CPUs lacks.
GPU_SYMBOLS = {"aoti_torch_get_current_cuda_stream"}


def main() -> int:
    arguments = parser().parse_args()
    complaints = []
    for wheel in arguments.wheels:
        found = [*tools(wheel), *wheel_complaints(wheel, arguments)]
        complaints += [f"{wheel.name}: {each}" for each in found]
    print("\n".join([*complaints, f"check_wheel: {len(complaints)} complaints"]))
    return 1 if complaints else 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    result.add_argument("wheels", nargs="+", type=Path)
    result.add_argument("--local", action="store_true", help="allow the tag linux_*")
    result.add_argument("--torch", type=Path, help="lib folder of the oldest supported torch")
    return result


def tools(wheel: Path) -> Iterator[str]:
    """What ready-made checkers say of the wheel, and of the sdist beside it."""
    name, version, *_ = wheel.name.split("-")
    sdists = [*wheel.parent.glob(f"{name}-{version}.tar.gz")]
    # W004: libraries are called by their CPU level, which is no module's name. W009: there are
    # Apex's extension modules beside apex/.
    contents = [sys.executable, "-m", "check_wheel_contents", "--ignore", "W004,W009", str(wheel)]
    for command in ([sys.executable, "-m", "twine", "check", "--strict", wheel, *sdists], contents):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{command[2]}: {(done.stdout + done.stderr).strip()}"


def wheel_complaints(wheel: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Tag, size, metadata and libraries."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        root = Path(folder)
        libraries = sorted(root.rglob("*.so*"))
        yield from tag_complaints(wheel.name, bool(libraries), arguments.local)
        size = wheel.stat().st_size / 2**20
        if size > SIZE_BUDGET_MIB:
            yield f"has {size:.0f} MiB, more than {SIZE_BUDGET_MIB}"
        (metadata,) = root.glob("*.dist-info/METADATA")
        yield from metadata_complaints(metadata.read_text(), metadata.parent)
        torch = torch_symbols(arguments.torch) if arguments.torch else None
        for library in libraries:
            for complaint in library_complaints(library, torch):
                yield f"{library.relative_to(root)}: {complaint}"


def tag_complaints(name: str, has_libraries: bool, local: bool) -> Iterator[str]:
    """A wheel serves every Python; one without libraries serves every machine."""
    tag = name.removesuffix(".whl").split("-", 2)[2]
    platform = r"(?:manylinux_2_(?:17|2[0-8])|manylinux2014"
    platform += r"|linux)" if local else ")"
    expected = (
        rf"py3-none-(?:{platform}_(?:x86_64|aarch64)\.?)+" if has_libraries else r"py3-none-any"
    )
    if not re.fullmatch(expected, tag):
        hint = "; `auditwheel repair` gives it its tag" if "-linux" in tag else ""
        yield f"has tag {tag}, expected {expected}{hint}"


def metadata_complaints(text: str, folder: Path) -> Iterator[str]:
    """What a package index shows."""
    metadata = email.message_from_string(text)
    for field in ("Summary", "License-Expression", "License-File", "Requires-Python", "Classifier"):
        if not metadata.get_all(field):
            yield f"METADATA has no {field}"
    for file in metadata.get_all("License-File") or []:
        if not (folder / "licenses" / file).is_file():
            yield f"METADATA names {file}, which is not in the wheel"
    for link in re.findall(r"\]\(([^)]+)\)", metadata.get_payload()):
        if not link.startswith(("https://", "#")):
            yield f"README links to {link}, which is not there on the page of a package index"


def library_complaints(path: Path, torch: set[str] | None) -> Iterator[str]:
    """What keeps a library from loading where torch does."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        needed, paths = dynamic_facts(elf)
        for name in sorted(needed - MAY_NEED):
            yield f"needs {name}"
        if paths:
            yield f"looks for libraries in {', '.join(sorted(paths))}"
        for version in sorted(too_new(elf)):
            yield (
                f"needs {version}, which is newer than manylinux_2_28; define the symbol in "
                "shared_csrc/include/apex/old_libraries.cpp"
            )
        undefined, exported = dynamic_symbols(elf)
        exported -= CONNECTION
        if exported:
            yield f"exports {', '.join(sorted(exported)[:5])}"
        if elf.get_section_by_name(".symtab") or elf.get_section_by_name(".debug_info"):
            yield "is not stripped"
        taken = {name for name in undefined if TORCH_SYMBOL.match(name)} - GPU_SYMBOLS
        for name in sorted(taken - (torch or taken)):
            yield f"takes {name} from torch, and the oldest supported torch does not have it"


def dynamic_facts(elf: ELFFile) -> tuple[set[str], set[str]]:
    """Return the libraries that a library needs, and the folders in which it looks for them."""
    needed, paths = set(), set()
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.add(tag.needed)
                elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    paths.add(getattr(tag, tag.entry.d_tag.removeprefix("DT_").lower()))
    return needed, paths


def too_new(elf: ELFFile) -> set[str]:
    """Return the symbol versions that manylinux_2_28 does not have."""
    found = set()
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, versions in section.iter_versions():
            for version in versions:
                match = VERSION.match(version.name)
                newest = match and NEWEST.get(match[1])
                if newest and tuple(map(int, match[2].split("."))) > newest:
                    found.add(version.name)
    return found


def dynamic_symbols(elf: ELFFile) -> tuple[set[str], set[str]]:
    """Return the names that a library takes from others, and those that it offers."""
    table = elf.get_section_by_name(".dynsym")
    undefined, exported = set(), set()
    for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
        if symbol.name:
            is_undefined = symbol.entry.st_shndx == "SHN_UNDEF"
            (undefined if is_undefined else exported).add(symbol.name)
    return undefined, exported


def torch_symbols(folder: Path) -> set[str]:
    """Return every symbol that the libraries of a torch offer.

    A torch for CPUs has no libtorch_cuda.so; what GPU kernels take from that, it cannot show.
    """
    offered = set()
    for name in TORCH:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                offered |= dynamic_symbols(ELFFile(file))[1]
    if not offered:
        raise FileNotFoundError(f"--torch {folder}: expected torch's lib folder, with {TORCH[0]}")
    return offered


if __name__ == "__main__":
    sys.exit(main())
