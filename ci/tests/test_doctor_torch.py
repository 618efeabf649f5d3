"""``python -m apex.<package>`` where torch is missing, broken, old, new, or there twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import PACKAGES, main_package

from ci.workspace import merge_sources
from shared_csrc.native import doctor_torch

MAIN = [main_package(package) for package in PACKAGES]
MISSING_LIBRARY = "libtorch_cpu.so: cannot open shared object file"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder like one that the five wheels were installed in; no torch is there."""
    return merge_sources(tmp_path_factory.mktemp("sources") / "site")


@pytest.fixture
def python(sources, tmp_path):
    """Return a function that runs a Python which finds the packages, and no site-packages."""

    def run(*words, before=(), after=(), cwd=tmp_path, **variables):
        path = os.pathsep.join(map(str, (*before, sources, *after)))
        environ = {n: v for n, v in os.environ.items() if n != "LD_LIBRARY_PATH"}
        environ |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        command = [sys.executable, "-S", *map(str, words)]
        options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
        return subprocess.run(command, cwd=cwd, env=environ, **options)

    return run


@pytest.fixture
def doctor(python):
    """Return a function that runs a doctor which finds no usable torch; it gives the facts."""

    def ask(package="amp", **where):
        done = python("-m", f"apex.{package}", "--json", **where)
        assert (done.returncode, done.stderr) == (1, "")
        facts = json.loads(done.stdout)
        assert facts["torch_error"] is None or facts["torch"] is None
        assert facts["troubles"][0]["is_fatal"]
        return facts

    return ask


def torch_in(folder: Path, code: str | None, *records: str, version: str | None = None) -> Path:
    """Put a torch into a folder: what its ``__init__`` does, and what pip records of it."""
    folder.mkdir(exist_ok=True)
    if code is not None:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(code)
    if version:
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda = None\n")
    for record in records:
        info = folder / f"torch-{record}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {record}\n")
    return folder


def first(facts) -> tuple[str, str]:
    return facts["troubles"][0]["what"], facts["troubles"][0]["remedy"]


@pytest.mark.parametrize("package", MAIN)
def test_no_torch(package, python, sources):
    """The last two lines say what is missing and how to get it; paths show where it looked."""
    done = python("-m", f"apex.{package}", "--compile", "sm_90", "sm_100")
    assert (done.returncode, done.stderr) == (1, "")
    *report, what, remedy = done.stdout.rstrip().splitlines()
    assert what == f"torch is not installed for {sys.executable}."
    assert remedy.startswith("  -> Run: ")
    assert remedy.endswith(" install torch.") or f"--python {sys.executable} torch." in remedy
    assert report[0] == f"apex.{package} in {sources}/apex/{package}"
    assert f"              {sources}" in report
    assert any(line.startswith("  python ") and sys.executable in line for line in report)


def test_options_without_torch(python):
    assert python("-mapex.amp").stdout.endswith("torch.\n")
    assert "--build" in python("-m", "apex.amp", "--help").stdout
    refused = python("-m", "apex.amp", "--chekc")
    assert refused.returncode == 2
    assert "--chekc" in refused.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import apex.amp"],
        ["-c", "import apex.normalization"],
        ["-c", "import apex.parallel"],
        ["-c", "from apex.optimizers import FusedAdam"],
        ["-c", "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss"],
        ["-c", "import runpy; runpy.run_module('apex.amp', run_name='__main__')"],
        ["-m", "apex.parallel.multiproc", "apex.parallel"],
    ],
    ids=lambda words: words[1],
)
def test_other_imports_raise(words, python):
    """Only the doctor's own command is answered by a report."""
    done = python(*words)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named 'torch', which apex.")
    assert last.endswith("imports: pip install torch")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"raise ImportError('{MISSING_LIBRARY}')", f"ImportError: {MISSING_LIBRARY}"),
        (f"raise OSError('{MISSING_LIBRARY}')", f"OSError: {MISSING_LIBRARY}"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import torch.not_there", "ModuleNotFoundError: No module named 'torch.not_there'"),
        ("x = 1", "has no __version__, so it is not PyTorch"),
    ],
)
def test_a_torch_that_cannot_be_imported(code, said, doctor, tmp_path):
    site = torch_in(tmp_path / "site", code, "2.13.0", version="2.13.0+cpu")
    facts = doctor(after=[site])
    what, remedy = first(facts)
    assert what.startswith(f"{site}/torch (2.13.0+cpu, pip's record: 2.13.0) cannot be imported: ")
    assert said in what
    assert "--force-reinstall torch==2.13.0" in remedy


def test_libraries_that_come_first(doctor, tmp_path):
    site = torch_in(tmp_path / "site", f"raise OSError('{MISSING_LIBRARY}')", "2.13.0")
    assert len(doctor(after=[site])["troubles"]) == 1
    variable = doctor(after=[site], LD_LIBRARY_PATH="/elsewhere")["troubles"][1]
    assert "env -u LD_LIBRARY_PATH" in variable["remedy"]
    assert not variable["is_fatal"]


@pytest.mark.parametrize("has_folder", [False, True])
def test_files_that_are_gone(doctor, tmp_path, has_folder):
    """pip was interrupted, or somebody removed files: what is left may be an empty folder."""
    site = torch_in(tmp_path / "site", None, "2.13.0")
    if has_folder:
        (site / "torch").mkdir()
    what, remedy = first(doctor(after=[site]))
    assert what.startswith(f"pip has a record of torch 2.13.0 in {site}, but torch's files are not")
    assert (f"{site}/torch has no __init__.py" in what) == has_folder
    assert "--force-reinstall torch==2.13.0" in remedy


def test_a_script_named_torch(doctor, tmp_path):
    (tmp_path / "torch.py").write_text("print_me = 1\n")
    what, remedy = first(doctor())
    assert f"{tmp_path}/torch.py has no __version__, so it is not PyTorch" in what
    assert f"Rename {tmp_path}/torch.py, or start Python in another folder; then run: " in remedy


@pytest.mark.parametrize("place", ["variable", "here"])
def test_a_broken_torch_before_another(place, doctor, tmp_path):
    """The remedy is for the place that the first one comes from, and it mends it."""
    broken = tmp_path if place == "here" else tmp_path / "first"
    torch_in(broken, "raise ImportError('no')")
    second = torch_in(tmp_path / "second", "__version__ = '2.9.1'", "2.9.1", version="2.9.1")
    where = {"after": [second]} if place == "here" else {"before": [broken], "after": [second]}
    facts = doctor(**where)
    assert [t["path"] for t in facts["torches"]] == [f"{broken}/torch", f"{second}/torch"]
    what, remedy = first(facts)
    assert "ImportError: no. Python does not try the next one, " in what
    assert f"{second}/torch (2.9.1, pip's record: 2.9.1)" in what
    if place == "here":
        assert f"rename {broken}/torch, or start Python in another folder" in remedy
        (tmp_path / "elsewhere").mkdir()
        mended = doctor(**where, cwd=tmp_path / "elsewhere")
    else:
        assert f"take {broken} out of PYTHONPATH" in remedy
        mended = doctor(after=[second])
    assert first(mended)[0].startswith(f"torch 2.9.1 in {second}/torch is too old")


@pytest.mark.parametrize("package", MAIN)
def test_an_old_torch(package, doctor, tmp_path):
    """It is refused before the package's own imports fail with it."""
    site = torch_in(tmp_path / "site", "__version__ = '2.9.1+cu128'", "2.9.1")
    what, remedy = first(doctor(package, after=[site]))
    assert what.endswith(f"is too old: apex-{package} needs torch 2.10 or later.")
    assert remedy.endswith("--upgrade 'torch>=2.10'")


@pytest.mark.parametrize(
    ("version", "fatal"),
    [
        ("1.13.1", [True]),
        ("2.9.1", [True]),
        ("2.10.0a0+git1234.nv25.11", []),
        ("2.15.1", []),
        ("2.16.0.dev20261101+cpu", [False]),
        ("3.0", [False]),
    ],
)
def test_versions(version, fatal, monkeypatch):
    monkeypatch.setattr(doctor_torch, "TESTED", ("2.10", "2.15"))
    facts = {"torch": version, "torch_path": "there", "torches": [], "versions": {}}
    found = list(doctor_torch.torch_troubles("apex.amp", facts))
    assert [trouble.is_fatal for trouble in found] == fatal


def test_two_records_in_one_folder(doctor, tmp_path):
    site = torch_in(tmp_path / "site", "raise ImportError('no')", "2.12.1", "2.13.0")
    facts = doctor(after=[site])
    what = facts["troubles"][1]["what"]
    assert what.startswith(f"pip has 2 records of torch: 2.12.1 in {site}, 2.13.0 in {site}. ")
    for trouble in facts["troubles"]:
        assert trouble["remedy"].count(" uninstall") == 2


@pytest.mark.parametrize("changed", ["nothing", "version", "path"])
def test_a_usable_torch(changed, tmp_path):
    """A newer torch than tested, and a second one, are told of, and the status stays 0."""
    other = torch_in(tmp_path / "other", "", "2.12.1", version="2.12.1+cpu")
    code = {
        "nothing": "",
        "version": "import torch; torch.__version__ = type(torch.__version__)('9.9.0')",
        "path": f"import sys; sys.path.append({str(other)!r})",
    }
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(code[changed])
    done = subprocess.run(
        [sys.executable, "-m", "apex.amp", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "start")},
        cwd=tmp_path / "start",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert not any(trouble["is_fatal"] for trouble in facts["troubles"])
    said = " ".join(trouble["what"] for trouble in facts["troubles"])
    remedies = " ".join(trouble["remedy"] for trouble in facts["troubles"])
    assert ("torch 9.9.0 is newer than " in said) == (changed == "version")
    imported = [each for each in facts["torches"] if each["path"] == facts["torch_path"]]
    assert len(imported) == 1
    two = f"There are 2 torches on sys.path. Python imports {facts['torch_path']} ("
    assert (two in said) == (changed == "path")
    assert (f"and not {other}/torch (2.12.1+cpu, pip's record: 2.12.1)" in said) == (two in said)
    assert ("If another one is meant, run: " in remedies and " uninstall " in remedies) == (
        two in said
    )
