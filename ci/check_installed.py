"""Check, in the environment of a test run, that the wheels are what will be tested, whole.

python check_installed.py PACKAGE...

APEX_CPU_LEVELS is what it was when the wheels were built.
"""

import importlib
import importlib.util
import json
import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared_csrc"))

from native.build import find_ops  # noqa: E402
from native.targets import cpu_levels  # noqa: E402
from native.toolchain import RTC  # noqa: E402


def main(packages: list[str]) -> None:
    installed = {d.name for d in metadata.distributions() if d.name.startswith("apex")}
    expect(installed == set(packages), f"installed are {installed}, expected {set(packages)}")
    for package in packages:
        main_package = package.removeprefix("apex-")
        spec = importlib.util.find_spec(f"apex.{main_package}")
        expect(spec is not None, f"{package} is installed, but apex.{main_package} is not found")
        folder = Path(spec.origin).parent
        expect(
            folder.is_relative_to(sys.prefix) and not (folder / "_shared").is_symlink(),
            f"apex.{main_package} comes from {folder}, not from this environment's wheel",
        )
        check_kernels(package, folder)
    check_gil(packages)


def check_kernels(package: str, folder: Path) -> None:
    """Every op of the checkout must be in a library of every ISA level that was asked for."""
    ops = {op.name for op in find_ops(ROOT / "packages" / package / "src")}
    if not ops:
        return
    manifest = folder / "_kernels" / "manifest.json"
    expect(manifest.is_file(), f"{package}: the wheel has no prebuilt kernels ({manifest})")
    libraries = json.loads(manifest.read_text())["libraries"]
    present = {entry["level"]: entry for entry in libraries if entry["backend"] == "cpu"}
    named = os.environ.get("APEX_CPU_LEVELS", "")
    for level in named.split(",") if named else cpu_levels():
        expect(level in present, f"{package}: no CPU kernels for {level}; found {list(present)}")
        missing = ops - set(present[level]["ops"])
        expect(not missing, f"{package}: no {level} kernels for {sorted(missing)}")
    for entry in libraries:
        file = manifest.parent / entry["file"]
        expect(file.is_file(), f"{package}: the manifest names {file.name}, which is missing")
    on_gpus = [entry for entry in libraries if entry["backend"] == RTC and ops == set(entry["ops"])]
    expect(len(on_gpus) == 1, f"{package}: no library with the host's half of all GPU code")


def check_gil(packages: list[str]) -> None:
    """A Python that is built without a GIL has none after all imports, either."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        for package in packages:
            importlib.import_module(f"apex.{package.removeprefix('apex-')}")
        expect(not sys._is_gil_enabled(), "an import has switched the GIL on")


def expect(condition: bool, failure: str) -> None:
    if not condition:
        sys.exit(f"check_installed: {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
