"""Everything that is done with this repository: `nox -l` lists it, `nox -s tests` does it."""

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ci import cover, samples, stages, workspace
from ci.hosts import network
from ci.workspace import DIST, MATRIX, PACKAGES, ROOT

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = False  # `matrix` takes the Pythons that are there
workspace.find_pyenv_interpreters()

TORCH = MATRIX["torch"]["build"]
TOOLS = [f"{tool}=={version}" for tool, version in MATRIX["tools"].items()]
TOOLS.append("tomli; python_version < '3.11'")  # reads ci/matrix.toml
DOCS_TOOLS = [f"{tool}=={version}" for tool, version in MATRIX["docs"]["tools"].items()]
RELEASE_TOOLS = [f"{tool}=={version}" for tool, version in MATRIX["release"]["tools"].items()]
CIBUILDWHEEL = f"cibuildwheel=={MATRIX['release']['cibuildwheel']}"
TEST_ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",  # a waiting thread would take the core of another test
    "CI": "1",  # torch's compiler is stricter where CI is set
}
# Where there is ccache, kernels that were compiled before, in any checkout or folder, are taken
# from it: paths count relative to the folder that the compiler runs in.
CACHED = {"CCACHE_BASEDIR": "/", "CCACHE_NOHASHDIR": "1", "APEX_COMPILER_LAUNCHER": "ccache"}
COMPILING = CACHED if shutil.which("ccache") else {}
SAMPLES = bool(os.environ.get("APEX_CI_SAMPLE"))
# Wheels have kernels for every ISA level if they or all of CI are asked for; tests run on the best.
ALL_LEVELS = {"build", "ci"} & {*sys.argv} or "APEX_CPU_LEVELS" in os.environ
LEVELS = {} if ALL_LEVELS else {"APEX_CPU_LEVELS": workspace.best_level()}
# Of wheels; "0" keeps a toolkit that happens to be there from making them other ones.
BUILDING = {"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_CUDA_OPS": "0", **os.environ, **LEVELS}
# A process of pytest-xdist per core, and the same with one thread each.
PARALLEL = ["-n", str(len(os.sched_getaffinity(0)))]
ONE_THREAD = [*PARALLEL, "-o", "apex_threads=1"]

# `nox -l` shows a line per family of sessions; all else, `nox -l --json` too, has each of them.
LISTS_FAMILIES = {"-l", "--list", "--list-sessions"} & {*sys.argv} and "--json" not in sys.argv


def family(names, values, ids):
    """Make a session of each value: `function(id)`."""
    if not LISTS_FAMILIES:
        return nox.parametrize(names, values, ids=ids)

    def one_line(function):
        function.__doc__ = f"{function.__doc__.rstrip('.')} ({', '.join(ids)})."
        return function

    return one_line


def install(session, *requirements, local_links=True):
    """Install with uv, which is also shown the local wheels that pip is shown."""
    session.install(*requirements, env=workspace.local_wheels() if local_links else {})


def install_with_hashes(session, file):
    """Install exactly what a file of ci/requirements lists: what a release is made with."""
    session.install("--require-hashes", "-r", f"ci/requirements/{file}")


@nox.session(venv_backend="none")
def pins(session):
    """Write ci/requirements from ci/matrix.toml: all that a release installs, with hashes."""
    for file, requirements in workspace.pinned().items():
        wanted = Path(session.create_tmp(), file)
        wanted.write_text("\n".join(requirements) + "\n")
        options = ["--universal", "--python-version", MATRIX["pythons"][0], "--generate-hashes"]
        options += ["--no-header", "--no-annotate", "--upgrade", "-o", f"ci/requirements/{file}"]
        session.run("uv", "pip", "compile", "--quiet", *options, str(wanted), external=True)


def install_wheels(session, packages, *others, torch=TORCH, local_links=True):
    """Install wheels from dist/ with their test requirements, on one version of torch."""
    wheels = [f"{p}[test] @ {workspace.wheel(p).as_uri()}" for p in packages]
    if SAMPLES and (torch != TORCH or not local_links):
        session.env["UV_NO_CACHE"] = "1"  # see `discard`
    install(session, f"torch=={torch}", *wheels, *others, local_links=local_links)
    check = ROOT / "ci" / "check_installed.py"
    # From a folder without apex/, so that it cannot be the checkout that is found.
    with session.chdir(session.create_tmp()):
        session.run("python", str(check), *packages, env=TEST_ENVIRONMENT | LEVELS, silent=True)


# What docs/examples import beside torch. Local wheels are not shown where torchvision is wanted: a
# torch among them is of another build than the index's torchvision.
EXAMPLE_REQUIREMENTS = [f"torchvision=={MATRIX['torch']['torchvision']}"]
EXAMPLE_REQUIREMENTS += ["scikit-learn", "tqdm", "matplotlib"]


def pytest(session, *paths, builds=False):
    """Run pytest; kernels come from the wheel, only tests marked `builds` may compile."""
    caches = {
        name: str(Path(session.create_tmp(), name.lower()).resolve())  # processes change folders
        for name in ("APEX_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    environment = TEST_ENVIRONMENT | caches | ({} if builds else {"APEX_JIT": "0"})
    marker = "builds" if builds else "not builds"
    own = [a for a in session.posargs if a not in PACKAGES]
    codes = [0, 5] if own else [0]  # 5: no test was selected
    command = ["python", "-m", "pytest", "-q", "-m", marker, "--timeout", "600", *paths, *own]
    session.run(*command, env=environment, success_codes=codes)


@nox.session(tags=["ci"])
@stages.timed
def lint(session):
    """Check style, formatting and the house rules; change nothing (-- --fix to repair)."""
    install(session, *TOOLS, f"import-linter=={MATRIX['contracts']['import-linter']}")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    sources = [str(f) for f in workspace.files("*.h", "*.cpp")]
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources)
    if fix:
        session.run("python", "ci/supported.py")
    session.run("zizmor", "--offline", "--quiet", "--min-severity", "medium", ".github")
    session.run("python", "ci/lint.py")
    with tempfile.TemporaryDirectory() as folder:
        merged = workspace.merge_sources(Path(folder, "merged"))
        contracts = ["--config", "ci/import_contracts.toml", "--no-cache", "--no-logo"]
        session.run("lint-imports", *contracts, env={"PYTHONPATH": str(merged)})


@nox.session
@stages.timed
def build(session):
    """Build sdists, and from them wheels with CPU kernels, into dist/ (-- PACKAGE for one)."""
    for level in LEVELS.values():
        stages.note(f"{level} alone: this machine's best ISA level")
    wanted = [a for a in session.posargs if a in PACKAGES] or PACKAGES
    stale = workspace.stale_packages(wanted, BUILDING)
    if not stale:
        session.log("dist/ is up to date")
        return
    install(session, f"torch=={TORCH}", "hatchling", "ninja", *RELEASE_TOOLS)

    def make(package):
        for old in workspace.artifacts(package, "*"):
            old.unlink()
        command = ["python", "-m", "build", "--no-isolation", "--outdir", str(DIST)]
        session.run(*command, f"packages/{package}", env=BUILDING | COMPILING)
        made = map(str, workspace.artifacts(package, "*.whl"))
        session.run("python", "ci/check_wheel.py", "--local", *made)
        return package

    # Two at a time: while one packs, checks or waits for its last file, the other compiles.
    with ThreadPoolExecutor(2) as pool:
        for package in pool.map(make, stale):
            workspace.record_built(package, BUILDING)


@nox.session
def release(session):
    """Check, build, try out and tag a package (-- PACKAGE VERSION; --dry-run leaves no tag)."""
    install_with_hashes(session, "release.txt")
    install(session, f"torch=={TORCH}")
    environment = TEST_ENVIRONMENT | COMPILING | workspace.local_wheels()
    session.run("python", "ci/release.py", *session.posargs, env=environment)


@nox.session
def manylinux(session):
    """Build and check a wheel in manylinux_2_28, from an sdist (-- SDIST FOLDER); needs docker."""
    sdist, folder = session.posargs
    install_with_hashes(session, "release.txt")
    session.run("cibuildwheel", sdist, "--output-dir", folder, env=workspace.cibuildwheel())
    oldest = Path(session.create_tmp(), "torch").resolve()
    torch = ["--no-deps", "--target", str(oldest), f"torch=={MATRIX['torch']['versions'][0]}"]
    session.run("uv", "pip", "install", *torch)
    made = map(str, Path(folder).glob("*.whl"))
    session.run("python", "ci/check_wheel.py", *made, "--torch", str(oldest / "torch" / "lib"))


def discard(session):
    """Where .ci/run asks for it, remove an environment with a torch of its own: it has 7 GB."""
    if SAMPLES:
        shutil.rmtree(session.virtualenv.location)


TESTED = [*PACKAGES, "together"]


@nox.session(requires=["build"], tags=["ci"])
@family("package", TESTED, TESTED)
@stages.timed
def tests(session, package):
    """Install one wheel and run its tests (by itself all, else some cases); the rest with all."""
    if package == "together":
        run_together(session, *samples.of("together"))
        return
    install_wheels(session, [package], "pytest-xdist")
    pytest(session, f"packages/{package}/tests", *samples.of(package), *PARALLEL)


def run_together(session, *sample, builds=False):
    """Install all five wheels, and run the tests of ci/ and shared_csrc/, or those that compile."""
    tools = ["pytest-xdist", "nox", "uv", "pip", "hatchling", *TOOLS, *RELEASE_TOOLS]
    tools += [*DOCS_TOOLS, f"{CIBUILDWHEEL}; python_version >= '3.11'"]
    install_wheels(session, PACKAGES, *tools)
    paths = ["ci", "--ignore=ci/clients", "--ignore=ci/install", "shared_csrc"]
    pytest(session, *paths, *sample, *PARALLEL, builds=builds)


@nox.session(requires=["build"], tags=["ci"])
@stages.timed
def compiling(session):
    """Run the tests that compile: engines at every ISA level, planted faults, a new op."""
    run_together(session, *samples.of("compiling"), builds=True)


@nox.session(requires=["build"], tags=["ci"])
@stages.timed
def examples(session):
    """Run the examples' tests, with torchvision beside all five wheels."""
    install_wheels(session, PACKAGES, "pytest-xdist", *EXAMPLE_REQUIREMENTS, local_links=False)
    pytest(session, "docs/examples", *samples.of("examples"), *ONE_THREAD)
    discard(session)


@nox.session(name="install", requires=["build"])
def installation(session):
    """Install in every way that people do, where something is missing or in the way (minutes)."""
    tools = ("hatchling", "ninja", "filelock", "numpy", "pytest-timeout", "pytest-xdist")
    install(session, f"torch=={TORCH}", "pip", "uv", *tools)
    command = ["python", "-m", "pytest", "-q", "--timeout", "600", "ci/install"]
    session.run(*command, *PARALLEL, *session.posargs, env=TEST_ENVIRONMENT | COMPILING)


MATRIX_RUNS = workspace.matrix_runs(workspace.THIS_PYTHON, workspace.has_python)


@nox.session(requires=["build"], tags=["ci"])
@family("python,torch", MATRIX_RUNS, ["-".join(r[::-1]) for r in MATRIX_RUNS])
@stages.timed
def matrix(session, torch):
    """Install the same wheels on another torch or Python, and run all packages' tests."""
    run = (session.python, torch), workspace.runs_between(MATRIX_RUNS, workspace.THIS_PYTHON)
    if samples.leaves_out(*run):
        return
    # setuptools: torch 2.10's compiler imports it, but torch requires it only from Python 3.12.
    install_wheels(session, PACKAGES, "pytest-xdist", "setuptools", torch=torch)
    sample = samples.of_run(*run)
    pytest(session, *sample, *ONE_THREAD, *(f"packages/{p}/tests" for p in PACKAGES))
    discard(session)


@nox.session(requires=["build"])
def nightly(session):
    """Run a sample of all packages' tests on torch's nightly build (-- ADDRESS of its index)."""
    if not session.posargs or not session.posargs[0]:
        session.error("expected the address of an index with torch's nightly builds")
    wheels = [f"{p}[test] @ {workspace.wheel(p).as_uri()}" for p in PACKAGES]
    index = ["--prerelease", "allow", "--index", session.posargs.pop(0)]
    install(session, *index, "torch", *wheels, "pytest-xdist", "setuptools")
    tests = [f"packages/{p}/tests" for p in PACKAGES]
    pytest(session, "-p", "ci.sampling", "--cases-per-test", "2", *ONE_THREAD, *tests)


@nox.session(requires=["build"])
@family("python,client", workspace.client_runs(workspace.THIS_PYTHON), list(MATRIX["clients"]))
def clients(session, client):
    """Install another project that uses Apex, and run its code with all five wheels."""
    facts = MATRIX["clients"][client]
    # A torch among local wheels is of another build than the index's torchvision.
    local_links = not any(r.startswith("torchvision") for r in facts["requires"])
    install_wheels(session, PACKAGES, *facts["requires"], local_links=local_links)
    if "alone" in facts:
        # flash-attn: without its kernels, and without looking for a wheel on the network.
        python_only = {f"FLASH_ATTENTION_{v}": "TRUE" for v in ("SKIP_CUDA_BUILD", "FORCE_BUILD")}
        options = ["--no-deps", "--no-build-isolation"]
        session.install(*options, *facts["alone"], env=workspace.local_wheels() | python_only)
    for file in facts["tests"]:  # each in a process of its own: clients keep global state
        pytest(session, f"ci/clients/{file}")


def install_nvcc(session):
    """Take nvcc from the package index where PATH has none."""
    if not shutil.which("nvcc"):
        toolkit = MATRIX["cuda"]["toolkit"]
        install(session, f"cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={toolkit}")


@nox.session
def gpu_wheels(session):
    """Build wheels and test tools (-- FOLDER), or variants (-- --campaign), to carry to a GPU."""
    install(session, f"torch=={TORCH}", "build", "hatchling", "ninja", "pip")
    if session.posargs[:1] == ["--campaign"]:
        session.run("python", "ci/campaign.py", *session.posargs[1:], env=COMPILING)
        return
    install_nvcc(session)
    folder = Path(session.posargs[0] if session.posargs else DIST / "gpu").resolve()
    environment = {f"APEX_BUILD_{group}_OPS": "1" for group in ("CPP", "CUDA")}
    environment["TORCH_CUDA_ARCH_LIST"] = MATRIX["gpu_wheels"]["cuda_arch_list"]
    tools = MATRIX["gpu_wheels"]["carried"]
    for name in [*PACKAGES, *tools]:  # pip refuses two versions of one
        for old in folder.glob(f"{name.replace('-', '_')}-*.whl"):
            old.unlink()
    for package in PACKAGES:
        command = ["python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
        session.run(*command, f"packages/{package}", env=environment | COMPILING)
    # Of Python alone, so that they suit whatever Python is there.
    pure = ["--platform", "any", "--implementation", "py", "--abi", "none", "--no-deps"]
    pure += ["--python-version", MATRIX["gpu_wheels"]["python"], "--only-binary", ":all:"]
    session.run("python", "-m", "pip", "download", "--quiet", *pure, "-d", str(folder), *tools)
    session.log(f"on the machine with the GPU: python ci/gpu.py --wheels {folder}")


def run_on_checkout(session, script, *first, tools=()):
    """Run a script of ci/ that compiles, with the packages as they are in this checkout."""
    editable = [word for p in PACKAGES for word in ("-e", f"packages/{p}[test]")]
    install(session, f"torch=={TORCH}", "ninja", "filelock", "pytest-xdist", *editable)
    if tools:
        install(session, *tools)  # by itself: torch asks for another NVRTC
    command = ["python", f"ci/{script}.py", *first, *session.posargs]
    session.run(*command, env=TEST_ENVIRONMENT | COMPILING)


def ops_first(session):
    """Return the ops that the arguments begin with, and the rest; an unknown op is an error."""
    try:
        return workspace.leading_ops(session.posargs)
    except ValueError as error:
        session.error(str(error))


def compile_with(session, cxx, ops, *, alone):
    """Compile CPU ops with another C++ compiler; unless ``alone``, test one built with it."""
    if not shutil.which(cxx):
        package = cxx.replace("clang++", "clang")
        session.error(f"{cxx} was not found. On Debian and Ubuntu: apt-get install {package}")
    session.run("python", "ci/compilers.py", cxx, *ops)
    if alone:
        return
    install(session, "filelock", "-e", "packages/apex-optimizers[test]")
    cache = Path(session.create_tmp(), "cache").resolve()
    environment = TEST_ENVIRONMENT | {"CXX": cxx, "APEX_CACHE_DIR": str(cache), "APEX_JIT": "1"}
    test = "packages/apex-optimizers/tests/test_multi_tensor_scale.py"
    session.run("python", "-m", "pytest", "-q", "--timeout", "600", test, env=environment)


QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]


def compile_for_arm64(session, ops, *, alone):
    """Compile CPU ops for arm64; unless ``alone``, run tests that need no torch by qemu."""
    for tool, package in (
        ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"),
        (QEMU[0], "qemu-user"),
    ):
        if not shutil.which(tool):
            session.error(f"{tool} was not found. On Debian and Ubuntu: apt-get install {package}")
    install(session, f"pyelftools=={MATRIX['release']['tools']['pyelftools']}")
    session.run("python", "ci/aarch64.py", *ops, env=COMPILING)
    if alone:
        return
    install(session, "hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist")
    environment = TEST_ENVIRONMENT | {
        "CXX": "aarch64-linux-gnu-g++",
        "APEX_CPU_LEVEL": "baseline",
        "APEX_TEST_RUNNER": " ".join(QEMU),
    }
    names = ("engines", "exp", "fold", "halves", "pairs", "segment_sum")
    tests = [f"shared_csrc/tests/test_{name}.py" for name in cover.some(names, 2)]
    own = "not sanitized and not emulated and not compilers"  # not for this machine
    session.run("python", "-m", "pytest", "-q", *PARALLEL, "-k", own, *tests, env=environment)


COMPILED = ["cuda", "hip", "cpu", *MATRIX["cpu"]["compilers"], "aarch64", "nvrtc"]


@nox.session(tags=["ci"])
@family("compiler", COMPILED, COMPILED)
@stages.timed
def kernels(session, compiler):
    """Compile every op (-- OP... for some) for all GPUs, CPUs, and by old compilers; check it."""
    ops, rest = ops_first(session)
    if rest:
        session.error(f"expected ops alone, got {' '.join(rest)}")
    alone = bool(ops)
    if SAMPLES and not ops:
        ops = cover.sampled_ops(compiler)
    install(session, f"torch=={TORCH}", "filelock", "ninja", "tomli; python_version < '3.11'")
    if compiler in MATRIX["cpu"]["compilers"]:
        compile_with(session, compiler, ops, alone=alone)
    elif compiler == "aarch64":
        compile_for_arm64(session, ops, alone=alone)
    elif compiler == "cpu":
        session.run("python", "ci/vectors.py", *ops)
    elif compiler == "nvrtc":
        install(session, *MATRIX["cuda"]["nvrtc"])  # after torch, which has another
        compile_at_run_time(session, ops, alone=alone)
    else:
        archs = MATRIX[compiler]["archs"]
        if compiler == "hip":
            archs = cover.known_to_hipcc(archs)
        else:
            install_nvcc(session)
        session.run("python", "ci/kernels.py", compiler, *archs, "--", *ops, env=COMPILING)
        if compiler == "hip":
            compile_at_run_time(session, ops, f"--amd={','.join(archs)}", alone=alone)


def compile_at_run_time(session, ops, *options, alone):
    """Compile kernels as at their first calls: by NVRTC, or by HIPRTC where an option says so."""
    options += tuple(cover.lot_of_kernels(*options) if SAMPLES and not alone else ())
    wheels = [] if alone or workspace.stale_packages(PACKAGES, BUILDING) else ["--wheels"]
    session.run("python", "ci/nvrtc.py", *options, *wheels, *ops, env=COMPILING)


@nox.session(tags=["ci"])
@stages.timed
def emulate(session):
    """Run GPU kernels on an emulated GPU, which finds their faults (-- OP... for some)."""
    ops_first(session)
    sample = cover.sampled_ops() if SAMPLES and not session.posargs else []
    run_on_checkout(session, "emulate", *sample)


@nox.session
def costs(session):
    """Count what calls cost on a GPU, without one, into ci/gpu_costs.toml (-- OP... for some)."""
    ops_first(session)
    run_on_checkout(session, "costs", tools=MATRIX["cuda"]["nvrtc"])


@nox.session
def sanitize(session):
    """Call all operators at random under AddressSanitizer and UBSan (-- CALLS; by hand, 20 min)."""
    run_on_checkout(session, "sanitize")


@nox.session
def plants(session):
    """Plant faults into GPU engines; does `emulate` find them? (-- NAME..., -- every: hours)."""
    run_on_checkout(session, "plants")


@nox.session
def demo(session):
    """Train on real images at O0 and O5: a table, a plot (-- --full: all levels; minutes more)."""
    # From their folders: no kernel is compiled but those that the training calls.
    packages = [f"./packages/{p}" for p in ("apex-amp", "apex-optimizers", "apex-parallel")]
    install(session, f"torch=={TORCH}", *EXAMPLE_REQUIREMENTS, *packages, local_links=False)
    session.run("python", "docs/examples/imagenet/demo.py", *session.posargs)


@nox.session
def hosts(session):
    """Train on three hosts that die and rejoin, and compare bits (needs root: namespaces)."""
    if missing := network.what_is_missing():
        session.skip(missing)
    install(session, f"torch=={TORCH}", "numpy", "-e", "packages/apex-parallel")
    session.run("python", "ci/hosts/rehearsal.py", env=TEST_ENVIRONMENT)


@nox.session(requires=["build"])
def bench(session):
    """Time kernels against their peers (-- NAME... for some); figures go to docs/benchmarks."""
    install_wheels(session, PACKAGES, *MATRIX["bench"]["beside"], local_links=False)
    session.run("python", "ci/benchmarks.py", *session.posargs)


@nox.session(tags=["ci"])
@stages.timed
def docs(session):
    """Build the documentation site, strictly, into dist/site (-- serve to look at it)."""
    install(session, f"torch=={TORCH}", *TOOLS, *DOCS_TOOLS)
    site, quiet = DIST / "site", {"NO_MKDOCS_2_WARNING": "1"}
    session.run("python", "ci/docs.py", session.create_tmp(), str(site), env=quiet)
    if "serve" in session.posargs:
        session.run("python", "-m", "http.server", "--bind", "127.0.0.1", "-d", str(site))


@nox.session
def new_op(session):
    """Scaffold an op (-- apex-contrib my_op); asks for the names when they are not given."""
    install(session, *TOOLS)
    session.run("python", "ci/new_op.py", *session.posargs)


@nox.session(venv_backend="none")
def ci(session):
    """Run what CI runs, and all of what CI takes samples of."""
    for name in ("lint", "docs", "tests", "compiling", "examples", "matrix", "emulate", "kernels"):
        session.notify(name)
