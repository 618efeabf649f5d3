"""The environment of ci/gpu.py: Apex from carried wheels, or built from the checkout, set apart."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared_csrc"))

TEST_TOOLS = ("pytest", "pytest_timeout", "xdist", "numpy", "filelock", "hypothesis")


class InstallError(RuntimeError):
    """What is missing, and what to do."""


def environment(scratch: Path, wheels: Path | None, device: str) -> dict[str, str]:
    """Install into ``scratch`` and return the environment variables of a process that finds it.

    Args:
        scratch: an empty folder, the caller's to remove.
        wheels: a folder of wheels; None: build the packages of this checkout.
        device: "cuda", or "cpu" for a rehearsal.

    Raises:
        InstallError: there is no such device, a tool is missing, or installing failed.
    """
    check_device(device)
    folders = [install(scratch, wheels)] if wheels else build(scratch, device)
    check_tools(folders)
    path = os.pathsep.join(map(str, [*folders, ROOT, ROOT / "ci" / "testkit"]))
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if wheels:
        # Kernels are there, all of them; one that is not is an error, not a reason to compile.
        own["APEX_JIT"] = "0"
    return os.environ | own


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InstallError(
            f"torch {torch.__version__} finds no GPU. Install a torch that is built for it, or "
            "rehearse without one: --device cpu"
        )


def is_rocm() -> bool:
    import torch

    return torch.version.hip is not None


def install(scratch: Path, wheels: Path) -> Path:
    """Install every wheel of a folder into a folder of its own, from these files alone."""
    site = scratch / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--disable-pip-version-check", "--target", str(site)]
    files = sorted(map(str, wheels.glob("*.whl")))
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"pip could not install the wheels of {wheels}:\n{done.stderr.strip()}")
    return site


def build(scratch: Path, device: str) -> list[Path]:
    """Copy each package's sources and compile its GPU kernels beside them, as a wheel has them.

    Kernels for the CPU, of which GPU tests need few, are compiled on first use.
    """
    from native import prebuilt
    from native.errors import BuildError

    switches = gpu_switches() if device == "cuda" else {"APEX_BUILD_CUDA_OPS": "0"}
    switches["APEX_BUILD_CPP_OPS"] = "0"
    folders = []
    for package in sorted((ROOT / "packages").iterdir()):
        folder = scratch / package.name
        ignored = shutil.ignore_patterns("_shared", "_kernels", "__pycache__")
        shutil.copytree(package / "src", folder, ignore=ignored)
        main_package = folder / "apex" / package.name.removeprefix("apex-")
        shared = ROOT / "shared_csrc"
        for name in ("native", "include"):
            shutil.copytree(shared / name, main_package / "_shared" / name)
        shutil.copy(shared / "__init__.py", main_package / "_shared")
        shutil.copy(shared / "namespace" / "__init__.py", folder / "apex")
        print(f"building {package.name}", flush=True)
        try:
            prebuilt.build_prebuilt(main_package, main_package / "_kernels", switches)
        except BuildError as error:
            raise InstallError(str(error)) from error
        folders.append(folder)
    return folders


def gpu_switches() -> dict[str, str]:
    """Demand GPU kernels, for the architecture of the card at hand alone."""
    import torch

    if is_rocm():
        arch = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        return {"APEX_BUILD_CUDA_OPS": "1", "PYTORCH_ROCM_ARCH": arch}
    major, minor = torch.cuda.get_device_capability()
    return {"APEX_BUILD_CUDA_OPS": "1", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}


def check_tools(folders: list[Path]) -> None:
    """Raise unless what the tests import is there, in a wheel or in this environment."""
    carried = {path.stem for folder in folders for path in folder.iterdir()}
    missing = [
        tool
        for tool in TEST_TOOLS
        if tool not in carried and importlib.util.find_spec(tool) is None
    ]
    if missing:
        names = " ".join(re.sub("_", "-", tool) for tool in missing)
        raise InstallError(
            f"the tests need {names}. Install them, or carry their wheels: `nox -s gpu_wheels` "
            "puts them beside Apex's"
        )
