"""What workflows rely on, as far as it can be seen without GitHub and without containers."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci.workspace import MATRIX, REQUIREMENTS, ROOT, cibuildwheel, pinned

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"\w[\w./-]*@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_and_each_has_one_pin(file):
    used = re.findall(r"^\s*(?:- )?uses: (.+?)\s*$", file.read_text(), re.M)
    assert used
    everywhere = set(re.findall(r"uses: (.+)", "\n".join(f.read_text() for f in WORKFLOWS)))
    for action in used:
        assert PINNED.fullmatch(action.partition("  #")[0]), action
        name = action.partition("@")[0]
        assert len({a.partition("  #")[0] for a in everywhere if a.startswith(f"{name}@")}) <= 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cibuildwheel needs Python 3.11")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_one_wheel_is_built_per_kind_of_machine(machine):
    """cibuildwheel understands the settings; what its containers do is not seen."""
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"]
    command += ["--platform", "linux", "--archs", machine, str(ROOT / "packages" / "apex-amp")]
    done = subprocess.run(
        command, env=os.environ | cibuildwheel(), capture_output=True, text=True, check=False
    )
    python = MATRIX["release"]["python"].replace(".", "")
    assert done.stdout.split() == [f"cp{python}-manylinux_{machine}"], done.stderr


def test_wheels_are_built_against_the_torch_and_cuda_of_the_matrix():
    first, second = cibuildwheel()["CIBW_BEFORE_BUILD"].split(" && ")
    file = re.fullmatch(r"python -m pip install --require-hashes -r '/host(.+)'", first).group(1)
    assert f"cuda-toolkit=={MATRIX['cuda']['toolkit']} " in Path(file).read_text()
    assert second.endswith(f" torch=={MATRIX['torch']['build']}")


@pytest.mark.parametrize(("file", "wanted"), pinned().items(), ids=pinned())
def test_what_a_release_installs_is_pinned_as_the_matrix_says(file, wanted):
    """`nox -s pins` writes these files."""
    entries = re.split(r"\n(?=\S)", (REQUIREMENTS / file).read_text().strip())
    versions = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()
        versions[name] = version
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    for requirement in wanted:
        name, version = re.match(r"([\w-]+)(?:\[.*\])?(?:==(\S+))?", requirement).groups()
        assert versions[name] == (version or versions[name]), f"{requirement}: run nox -s pins"


@pytest.mark.parametrize("name", ["release", "smoke"])
def test_jobs_of_a_release_install_with_hashes_alone(name):
    """Whatever runs in these jobs could change what is published."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    commands = re.findall(r"pip install (.*)", text)
    assert commands
    assert set(commands) == {"--require-hashes -r ci/requirements/release.txt"}


@pytest.mark.parametrize("session", ["release", "manylinux"])
def test_sessions_of_a_release_install_with_hashes_alone(session):
    """All but torch, which comes from its own index."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (body,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == session)
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    named = [(getattr(c.func, "id", getattr(c.func, "attr", "")), c) for c in calls]
    assert any(called == "install_with_hashes" for called, _ in named)
    for called, call in named:
        if called == "install":
            assert [ast.unparse(a) for a in call.args] == ["session", "f'torch=={TORCH}'"]
