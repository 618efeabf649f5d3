"""What workflows rely on, as far as it can be seen without GitHub and without containers."""

import os
import re
import subprocess
import sys

import pytest

from ci.workspace import MATRIX, ROOT, cibuildwheel

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
    installed = cibuildwheel()["CIBW_BEFORE_BUILD"]
    assert f" torch=={MATRIX['torch']['build']} " in installed
    assert installed.endswith(f"=={MATRIX['cuda']['toolkit']}'")
