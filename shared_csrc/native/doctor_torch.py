"""The doctor's look at Python and torch, which also answers where torch cannot be imported.

``python -m apex.amp`` imports ``apex.amp`` before its ``__main__``, and that needs torch. Therefore
each package's ``__init__`` first calls :func:`answer_without_torch` where Python was started with
``-m``. This file must not import torch at its top, nor a module that does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

WHEELS = ("apex-amp", "apex-contrib", "apex-normalization", "apex-optimizers", "apex-parallel")
VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CXX", "LD_LIBRARY_PATH", "LD_PRELOAD", "MAX_JOBS")
VARIABLES += ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONHOME", "PYTHONPATH")
VARIABLES += ("PYTORCH_ROCM_ARCH", "ROCM_HOME", "ROCM_PATH")
VARIABLES += ("TORCH_CUDA_ARCH_LIST", "XDG_CACHE_HOME")
# The oldest and the newest torch of ci/matrix.toml, from which `nox -s lint -- --fix` writes this.
TESTED = ("2.10", "2.15")


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What is wrong, and what helps.

    Args:
        what: a sentence.
        remedy: what to do, beginning with a verb.
        is_fatal: whether something that a user calls cannot run.
    """

    what: str
    remedy: str
    is_fatal: bool = True


def answer_without_torch(package: str) -> None:
    """Report and exit with 1 if ``python -m package`` was started and torch is not usable.

    Returns where torch is usable, and where Python was started to do something else.
    """
    # While Python looks for the module, its documentation says, sys.argv[0] is "-m". The word
    # before the arguments is the module's name, or ends with it (-mapex.amp).
    if sys.argv[:1] != ["-m"] or not sys.orig_argv[-len(sys.argv)].endswith(package):
        return
    facts = python_and_torch(package)
    troubles = list(torch_troubles(package, facts))
    if not any(trouble.is_fatal for trouble in troubles):
        return
    options = parser(package).parse_args()
    facts["sys_path"] = sys.path
    facts["troubles"] = [dataclasses.asdict(trouble) for trouble in troubles]
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        searched = [f"  {'sys.path' * (i == 0):<10}  {path}" for i, path in enumerate(sys.path)]
        lines = [*first_lines(facts), *searched, *variable_lines(facts), "", *last_lines(facts)]
        print("\n".join(lines))
    sys.exit(1)


def parser(package: str) -> argparse.ArgumentParser:
    """The doctor's options."""
    result = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=f"Show what {package} finds on this machine. Exits with 1 where torch is not "
        "usable, and where --check or --build finds trouble.",
    )
    result.add_argument("--json", action="store_true", help="print it for programs")
    result.add_argument(
        "--check", action="store_true", help="run an op on each device; exit with 1 on trouble"
    )
    result.add_argument(
        "--build",
        action="store_true",
        help="compile now what first uses would, as for an image; without a GPU, also for those "
        "that TORCH_CUDA_ARCH_LIST or PYTORCH_ROCM_ARCH names",
    )
    result.add_argument(
        "--compile",
        nargs="+",
        metavar="sm_90",
        help="compile now all kernels for these GPUs, of which none need be there",
    )
    return result


def python_and_torch(package: str) -> dict[str, Any]:
    """Which Python this is, which torch it imports, and each torch that is there."""
    version, path, error = _imported()
    return {
        "package": package,
        "versions": dict(_versions()),
        "folder": str(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": version,
        "torch_path": path,
        "torch_error": error,
        "torches": list(_torches()),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith("APEX_")
        },
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in WHEELS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _imported() -> tuple[str | None, str | None, str | None]:
    """Import torch; return its version and path, and what is wrong where it has no version."""
    try:
        import torch
    except Exception as error:  # whatever it is, the report shows it
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None, None, None
        return None, None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    if torch.__file__ is None:
        (path, *_) = torch.__path__
        return None, path, f"{path} has no __init__.py"
    path = torch.__file__.removesuffix(f"{os.sep}__init__.py")
    version = getattr(torch, "__version__", None)
    if version is None:
        return None, path, f"{path} has no __version__, so it is not PyTorch"
    return str(version), path, None


def _torches() -> Iterator[dict[str, Any]]:
    """What each folder of sys.path has: torch's path and version, and versions that pip records."""
    seen = set()
    for entry in sys.path:
        folder = Path(os.path.realpath(entry))
        if folder in seen or not folder.is_dir():
            continue
        seen.add(folder)
        module = folder / "torch.py"
        path = folder / "torch" if (folder / "torch" / "__init__.py").is_file() else module
        found = metadata.distributions(name="torch", path=[str(folder)])
        records = sorted({distribution.version for distribution in found})
        if path.exists() or records:
            yield {
                "entry": str(folder),
                "path": str(path) if path.exists() else None,
                "version": _version_in(path / "version.py"),
                "records": records,
            }


def _version_in(file: Path) -> str | None:
    try:
        found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def torch_troubles(package: str, facts: dict[str, Any]) -> Iterator[Trouble]:
    """What is wrong with torch: missing, broken, too old, too new, or there twice."""
    wheel, version, torches = package.replace(".", "-"), facts["torch"], facts["torches"]
    if version is None:
        yield from _unusable(facts)
    elif _minor(version) < _minor(TESTED[0]):
        yield Trouble(
            f"torch {version} in {facts['torch_path']} is too old: {wheel} needs torch "
            f"{TESTED[0]} or later.",
            f"Run: {_pip('install', '--upgrade', f'torch>={TESTED[0]}')}",
        )
    elif _minor(version) > _minor(TESTED[1]):
        own = " ".join([wheel, *filter(None, [facts["versions"].get(wheel)])])
        yield Trouble(
            f"torch {version} is newer than {TESTED[1]}, the newest that {own} was tested with.",
            f"If something fails, run: {_pip('install', '--upgrade', wheel)}",
            is_fatal=False,
        )
    paths = [each for each in torches if each["path"]]
    if len(paths) > 1 and version is not None:
        first, *others = (_shown(each) for each in paths)
        yield Trouble(
            f"There are {len(paths)} torches on sys.path. Python imports {first} and not "
            f"{', nor '.join(others)}.",
            f"If another one is meant, {_putting_away(paths[0])}",
            is_fatal=False,
        )
    records = [f"{v} in {each['entry']}" for each in torches for v in each["records"]]
    if paths and len(records) > len(paths):
        yield Trouble(
            f"pip has {len(records)} records of torch: {', '.join(records)}. An upgrade that was "
            "interrupted leaves that behind.",
            f"Run: {_reinstall(torches)}",
            is_fatal=False,
        )


def _unusable(facts: dict[str, Any]) -> Iterator[Trouble]:
    """What is wrong where torch cannot be imported."""
    python, error, torches = facts["executable"], facts["torch_error"], facts["torches"]
    paths = [each for each in torches if each["path"]]
    records = [f"{v} in {each['entry']}" for each in torches for v in each["records"]]
    if paths:
        what = f"{_shown(paths[0])} cannot be imported: {error or 'it was not found'}."
        remedy = f"Run: {_reinstall(torches)}"
        if len(paths) > 1:
            what += f" Python does not try the next one, {_shown(paths[1])}."
            remedy = f"To use the next one, {_putting_away(paths[0])}"
        elif not paths[0]["records"]:
            away = _putting_away(paths[0])
            remedy = f"{away[0].upper()}{away[1:]}; then run: {_pip('install', 'torch')}"
        yield Trouble(what, remedy)
    elif records:
        what = f"pip has a record of torch {', '.join(records)}, but torch's files are not there"
        yield Trouble(f"{what}{f': {error}' if error else ''}.", f"Run: {_reinstall(torches)}")
    else:
        what = f"torch is not installed for {python}{f': {error}' if error else ''}."
        yield Trouble(what, f"Run: {_pip('install', 'torch')}")
    if error and ".so" in error and os.environ.get("LD_LIBRARY_PATH"):
        yield Trouble(
            "LD_LIBRARY_PATH is set: libraries from there come before those that torch brings.",
            f"Try without: env -u LD_LIBRARY_PATH {shlex.quote(python)} -m {facts['package']}",
            is_fatal=False,
        )


def _shown(torch: dict[str, Any]) -> str:
    """A torch's path and versions, as `/site/torch (2.13.0+cpu, pip's record: 2.13.0)`."""
    records = " and ".join(torch["records"])
    record = f"pip's record: {records}" if records else "no record of pip's"
    return f"{torch['path']} ({torch['version'] or 'no version.py'}, {record})"


def _putting_away(torch: dict[str, Any]) -> str:
    """How Python is kept from importing this torch."""
    entry = torch["entry"]
    from_variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entry == os.path.realpath("."):
        return f"rename {torch['path']}, or start Python in another folder"
    if entry in {os.path.realpath(each) for each in from_variable if each}:
        return f"take {entry} out of PYTHONPATH"
    if torch["records"]:
        return f"run: {_pip('uninstall', '-y', 'torch')}"
    return f"remove {torch['path']}"


def _reinstall(torches: list[dict[str, Any]]) -> str:
    """The command that installs torch again, of the same version where pip knows it."""
    records = [version for each in torches for version in each["records"]]
    if len(records) > 1:  # each uninstall removes one
        away = [_pip("uninstall", "-y", "torch")] * len(records)
        return " && ".join([*away, _pip("install", "torch")])
    wanted = [f"torch=={version.partition('+')[0]}" for version in records] or ["torch"]
    return _pip("install", "--force-reinstall", *wanted)


def _pip(*words: str) -> str:
    """A command of this Python's pip, or of uv where there is no pip."""
    python, arguments = shlex.quote(sys.executable), shlex.join(words)
    if util.find_spec("pip") is None and shutil.which("uv"):
        verb, *rest = words
        return f"uv pip {verb} --python {python} {shlex.join(w for w in rest if w != '-y')}"
    return f"{python} -m pip {arguments}"


def _minor(version: str) -> tuple[int, ...]:
    """2.10.0a0+git as (2, 10)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def first_lines(facts: dict[str, Any]) -> list[str]:
    """What was found of the package, of Python and of torch."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    kind = f", for {facts['torch_for']}" if "torch_for" in facts else ""
    torch = f"{facts['torch']}{kind}, in {facts['torch_path']}"
    if facts["torch"] is None:
        torch = f"cannot be imported: {facts['torch_error'] or 'there is none'}"
    is_shown = facts["torch"] is None or len(facts["torches"]) > 1
    return [
        f"{facts['package']} in {facts['folder']}",
        f"  installed   {versions or 'no wheel: this is a folder of sources'}",
        f"  python      {facts['python']}, {facts['machine']}, {facts['executable']}",
        f"  torch       {torch}",
        *(f"  found       {_shown(each)}" for each in facts["torches"] if is_shown),
    ]


def variable_lines(facts: dict[str, Any]) -> list[str]:
    return [f"  set         {name}={value}" for name, value in facts["variables"].items()]


def last_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What is wrong, and what to do."""
    for trouble in facts["troubles"]:
        yield from (trouble["what"], f"  -> {trouble['remedy'].rstrip('.')}.")
