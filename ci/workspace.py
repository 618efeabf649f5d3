"""Facts about the checkout that sessions and checks share: packages, matrix, files, digests."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MATRIX = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())
# What reaches a wheel. Its tests and benchmarks do not.
_SHARED_SOURCES = tuple(
    f"shared_csrc/{name}" for name in ("include", "native", "namespace", "__init__.py")
)
_NOT_PACKED = ("tests", "benchmarks", "changes")
# auditwheel leaves them where they are: the user's torch brings them.
TORCH_LIBRARIES = ("libtorch*.so*", "libc10*.so*")
_BUILD_VARIABLES = (
    *("BUILD_VERSION", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "APEX_CPU_LEVELS", "CXX"),
)


def files(*folders: str) -> list[Path]:
    """Return the files that git tracks, or would: new ones too, ignored ones not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {ROOT / name for name in listing.split("\0") if name}
    return sorted(p for p in paths if p.is_file())


def merge_sources(folder: Path, kernels: bool = False) -> Path:
    """Copy the sources of all packages into a folder, as their wheels install them.

    Args:
        folder: is made, or has none of these files.
        kernels: copy those of kernels, too, not Python's alone.
    """
    skipped = shutil.ignore_patterns(
        "_shared", "_kernels", "__pycache__", *([] if kernels else ["*.h", "*.cpp"])
    )
    for package in PACKAGES:
        source = ROOT / "packages" / package / "src"
        shutil.copytree(source, folder, ignore=skipped, dirs_exist_ok=True)
        (main,) = (path.parent for path in source.glob("apex/*/_ops.py"))
        shared = folder / main.relative_to(source) / "_shared"
        for name in ("native", "include") if kernels else ("native",):
            shutil.copytree(ROOT / "shared_csrc" / name, shared / name, ignore=skipped)
        shutil.copy(ROOT / "shared_csrc" / "__init__.py", shared)
    shutil.copy(ROOT / "shared_csrc" / "namespace" / "__init__.py", folder / "apex")
    return folder


def sources_digest(package: str, environment: dict[str, str]) -> str:
    """Return a digest of all that can change the package's sdist and wheel."""
    state = hashlib.sha256(MATRIX["torch"]["build"].encode())
    for name in sorted(environment):
        if name.startswith("APEX_BUILD_") or name in _BUILD_VARIABLES:
            state.update(f"{name}={environment[name]}\n".encode())
    # An sdist lists the ops and legacy modules of all packages.
    named = files(":(glob)packages/*/src/*.py", "packages/*.cpp")
    state.update("\n".join(path.stem for path in named).encode())
    folder = ROOT / "packages" / package
    for path in files(str(folder), *_SHARED_SOURCES):
        if path.is_relative_to(folder) and path.relative_to(folder).parts[0] in _NOT_PACKED:
            continue
        state.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        state.update(path.read_bytes())
    return state.hexdigest()


def stale_packages(packages: list[str], environment: dict[str, str]) -> list[str]:
    """Return the packages whose wheel in dist/ is missing, or of other sources.

    A wheel with the kernels of all ISA levels does where some are asked for.
    """
    record, whole = _read_record(), environment.copy()
    whole.pop("APEX_CPU_LEVELS", None)
    return [
        p
        for p in packages
        if record.get(p) not in {sources_digest(p, e) for e in (environment, whole)}
        or not artifacts(p, "*.whl")
    ]


def record_built(package: str, environment: dict[str, str]) -> None:
    """Note which sources the package's files in dist/ come from."""
    record = _read_record() | {package: sources_digest(package, environment)}
    _record_file().write_text(json.dumps(record, indent=1))


def artifacts(package: str, pattern: str) -> list[Path]:
    """Return the package's files in dist/, such as its ``*.whl``."""
    return sorted(DIST.glob(f"{package.replace('-', '_')}-{pattern}"))


REQUIREMENTS = ROOT / "ci" / "requirements"


def pinned() -> dict[str, list[str]]:
    """Return what each file of ci/requirements is made of: all that a release installs but torch.

    torch comes from its own index, whose builds differ from machine to machine.
    """
    facts = MATRIX["release"]
    tables = {
        name: [f"{tool}=={v}" for tool, v in facts[name].items()]
        for name in ("start", "build", "tools")
    }
    nvcc = f"cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={MATRIX['cuda']['toolkit']}"
    wheel = [f"cibuildwheel=={facts['cibuildwheel']} ; python_version >= '3.11'", "packaging"]
    wheel.append("tomli ; python_version < '3.11'")
    return {
        "build.txt": [f"uv=={facts['start']['uv']}", *tables["build"], nvcc],
        "release.txt": [*tables["start"], *tables["build"], *tables["tools"], *wheel],
    }


def cibuildwheel() -> dict[str, str]:
    """Return the variables that make cibuildwheel build a release's wheel.

    As in ci/release.py, the build takes torch, and nvcc for the GPU kernels, from its own
    environment, and auditwheel leaves torch's libraries where they are.
    """
    install = (
        # cibuildwheel shows the container the whole file system as /host.
        f"python -m pip install --require-hashes -r '/host{REQUIREMENTS / 'build.txt'}'",
        f"uv pip install --system --torch-backend cpu torch=={MATRIX['torch']['build']}",
    )
    python = "cp" + MATRIX["release"]["python"].replace(".", "")
    repair = "auditwheel repair --only-plat --plat manylinux_2_28_$(uname -m) -w {dest_dir} "
    repair += " ".join(f"--exclude '{library}'" for library in TORCH_LIBRARIES)
    return {
        "CIBW_BUILD": f"{python}-manylinux_*",
        "CIBW_ARCHS": "native",
        "CIBW_MANYLINUX_X86_64_IMAGE": "manylinux_2_28",
        "CIBW_MANYLINUX_AARCH64_IMAGE": "manylinux_2_28",
        "CIBW_BEFORE_BUILD": " && ".join(install),
        "CIBW_BUILD_FRONTEND": "build; args: --no-isolation",
        "CIBW_ENVIRONMENT": "APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1",
        "CIBW_REPAIR_WHEEL_COMMAND_LINUX": f"{repair} {{wheel}}",
    }


def wheel(package: str) -> Path:
    """Return the package's one wheel in dist/."""
    found = artifacts(package, "*.whl")
    if len(found) != 1:
        raise FileNotFoundError(
            f"dist/ holds {len(found)} wheels of {package}; run `nox -s build` to make one"
        )
    return found[0]


def ops() -> dict[str, str]:
    """Return every op's package: an op is a folder with a .cpp file of its own name."""
    sources = [p.relative_to(ROOT) for p in files("packages/*.cpp")]
    return {s.stem: s.parts[1] for s in sources if s.parts[2] == "src" and s.stem == s.parent.name}


def leading_ops(words: list[str]) -> tuple[list[str], list[str]]:
    """Split into the ops that the words begin with, and the rest: paths, or from an option on.

    Raises:
        ValueError: a word before the rest is no op; the text lists the ops.
    """
    known, named = ops(), []
    for word in words:
        if word.startswith("-") or "/" in word:
            break
        if word not in known:
            raise ValueError(f"there is no op {word}; expected some of {', '.join(sorted(known))}")
        named.append(word)
    return named, list(words[len(named) :])


def op_tests(op: str) -> list[str]:
    """Return the test files of an op: of its name, or else those that mention it."""
    folder = f"packages/{ops()[op]}/tests"
    tests = [p for p in files(folder) if p.name.startswith("test_") and p.suffix == ".py"]
    own = [p for p in tests if p.stem == f"test_{op}" or p.stem.startswith(f"test_{op}_")]
    own = own or [p for p in tests if re.search(rf"\b{op}\b", p.read_text())]
    return [p.relative_to(ROOT).as_posix() for p in own] or [folder]


def find_pyenv_interpreters() -> None:
    """Let pyenv's shims run every version that it has, the current one first.

    Without this, ``python3.12`` is a shim that refuses to run while another version is selected, as
    one is in every process that a shim has started.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    if not (root / "versions").is_dir():
        return
    current = ".".join(map(str, sys.version_info[:3]))
    names = sorted(p.name for p in (root / "versions").iterdir() if p.name[:2] == "3.")
    names.sort(key=lambda name: name != current)
    os.environ["PYENV_VERSION"] = ":".join(names)


def has_python(python: str) -> bool:
    return shutil.which(f"python{python}") is not None


def matrix_runs(this: str, is_found: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Return (Python, torch): every torch on this Python, every other Python on its last torch.

    A torch that is the last of another Python that is found, and not of this one, is left to that.
    """
    others = (*MATRIX["pythons"], *MATRIX["free_threaded"])
    last = {p: torches_of(p)[-1] for p in others if p != this}
    own = torches_of(this)
    elsewhere = {last[p] for p in last if is_found(p)} - {own[-1]}
    return [(this, t) for t in own if t not in elsewhere] + list(last.items())


def torches_of(python: str) -> list[str]:
    """Return the supported versions of torch that have wheels for a Python."""
    table = MATRIX["torch"]
    first, last = (table[f"{end}_for_python"].get(python) for end in ("first", "last"))
    versions = table["versions"]
    end = versions.index(last) + 1 if last else None
    return versions[versions.index(first) if first else 0 : end]


def runs_between(runs: list[tuple[str, str]], this: str) -> list[tuple[str, str]]:
    """Return the runs but those of the oldest and the newest torch on this Python."""
    oldest, *_, newest = MATRIX["torch"]["versions"]
    return [run for run in runs if run not in ((this, oldest), (this, newest))]


def drawn_run(between: list[tuple[str, str]], seed: str) -> tuple[str, str]:
    """Return one of the runs by lot: the same one for the same seed."""
    return random.Random(seed).choice(between)


def share(run: tuple[str, str], between: list[tuple[str, str]], seed: str) -> str:
    """Return which half of the test functions a run of the matrix has, as ci/sampling.py takes it.

    The oldest and the newest torch, which are not between others, have different halves.
    """
    if run in between:
        return f"{between.index(run) % 2 + 1}/2"
    is_newest = run[1] == MATRIX["torch"]["versions"][-1]
    return f"{(random.Random(seed).randrange(2) + is_newest) % 2 + 1}/2"


def local_wheels() -> dict[str, str]:
    """Return what shows uv the local wheels that pip is shown."""
    links = ",".join(os.environ.get("PIP_FIND_LINKS", "").split())
    return {"UV_FIND_LINKS": links} if links else {}


def known_to_hipcc(archs: list[str]) -> list[str]:
    """Return the architectures that the hipcc on PATH compiles for.

    Raises:
        FileNotFoundError: there is no hipcc.
        RuntimeError: it does not compile for one, and APEX_HIPCC_KNOWS_ALL is set.
    """
    hipcc = shutil.which("hipcc")
    if not hipcc:
        raise FileNotFoundError("hipcc was not found. On Debian and Ubuntu: apt-get install hipcc")

    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder, "nothing.hip")).touch()

        def compiles(arch: str) -> bool:
            command = [hipcc, f"--offload-arch={arch}", "-c", str(source), "-o", f"{source}.o"]
            environment = os.environ | {"HIP_PLATFORM": "amd"}
            options = {"env": environment, "capture_output": True, "timeout": 300}
            done = subprocess.run(command, text=True, **options)
            if done.returncode and os.environ.get("APEX_HIPCC_KNOWS_ALL"):
                raise RuntimeError(f"hipcc does not compile for {arch}: {done.stderr}")
            return done.returncode == 0

        return [arch for arch in archs if compiles(arch)]


def client_runs(this: str) -> list[tuple[str, str]]:
    """Return, for every client of ci/matrix.toml, the Python that it runs on, and its name."""
    return [(c.get("python", this), name) for name, c in MATRIX["clients"].items()]


def best_level() -> str:
    """Return the best ISA level that this machine can run."""
    sys.path.insert(0, str(ROOT / "shared_csrc"))
    from native import targets

    return targets.supported_cpu_levels()[0]


def _record_file() -> Path:
    return DIST / "built.json"


def _read_record() -> dict[str, str]:
    file = _record_file()
    return json.loads(file.read_text()) if file.is_file() else {}
