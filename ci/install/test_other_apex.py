"""Another project's `apex` in the same environment, and one of two wheels uninstalled."""

import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest
from places import AN_OP, last_line, runs, said, succeeded

from ci.workspace import ROOT, wheel

OUR_FUSED_ADAM = (
    "from apex.optimizers import FusedAdam; assert not hasattr(FusedAdam, 'is_theirs'); "
    "from apex.optimizers.__main__ import example; example('cpu'); print('it runs')"
)
MODULE = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "amp_C"};
PyMODINIT_FUNC PyInit_amp_C(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A wheel with the files that NVIDIA's has: an `__init__` of its own, a compiled amp_C."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "amp_C.c").write_text(MODULE)
    compiled = folder / f"amp_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    command = ["cc", "-shared", "-fPIC", "-I", include, str(folder / "amp_C.c"), "-o", compiled]
    subprocess.run(command, check=True, timeout=60)
    info = "apex-0.1.dist-info"
    files = {
        "apex/__init__.py": "from . import optimizers\n",
        "apex/optimizers/__init__.py": "from .fused_adam import FusedAdam\n",
        "apex/optimizers/fused_adam.py": "class FusedAdam:\n    is_theirs = True\n",
        "apex/RNN/__init__.py": "",
        compiled.name: compiled.read_bytes(),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / "apex-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("ours_first", [False, True], ids=["over another", "under another"])
def test_another_apex(place, theirs, ours_first):
    """It warns, our optimizers work, their amp_C hides ours; the doctor's command mends it all."""
    ours = (wheel("apex-optimizers"), wheel("apex-amp"))
    for wheels in (ours, [theirs]) if ours_first else ([theirs], ours):
        place.install("--no-deps", *wheels)
    used = place.execute(OUR_FUSED_ADAM)
    assert runs(used)
    assert "another project's apex is installed" in used.stderr
    assert "RuntimeWarning" in used.stderr
    assert "Run `pip uninstall apex`, then install the Apex wheels again" in used.stderr
    which = "import amp_C; print(amp_C.__file__)"
    assert not succeeded(place.execute(which)).stdout.endswith("amp_C.py\n")

    checked = place.doctor("optimizers", "--check")
    assert checked.returncode == 1
    trouble, remedy = checked.stdout.rstrip().splitlines()[-2:]
    assert trouble.startswith("apex 0.1 is installed too")
    assert remedy.endswith("--force-reinstall --no-deps apex-amp apex-optimizers.")

    # The uninstall alone takes files of ours along, which the doctor's command knows.
    place.follow("pip uninstall -y apex")
    assert "ImportError: cannot import name 'FusedAdam'" in said(place.execute(OUR_FUSED_ADAM))
    assert runs(place.execute(AN_OP))
    place.install("--no-deps", "--force-reinstall", theirs)

    place.follow(remedy.partition("Run: ")[2].rstrip("."))
    mended = place.execute(f"import apex; apex.amp; {which}; {OUR_FUSED_ADAM}")
    assert runs(mended)
    assert mended.stderr == ""
    assert f"{place.site}/amp_C.py\n" in mended.stdout
    succeeded(place.doctor("optimizers", "--check"))


def test_uninstalling_one_of_two(place):
    """`from apex import amp` goes on working; the page and the doctor have the repair."""
    place.install("--no-deps", wheel("apex-amp"), wheel("apex-optimizers"))
    succeeded(place.pip("uninstall", "-y", "apex-optimizers"))
    assert runs(place.execute(f"from apex import amp; {AN_OP}"))
    by_attribute = "import apex; apex.amp"
    assert last_line(place.execute(by_attribute)).startswith("AttributeError: module 'apex' has no")

    report = succeeded(place.doctor("amp", "--check")).stdout
    trouble, remedy = report.rstrip().splitlines()[-2:]
    assert "`import apex; apex.amp` fails, and `from apex import amp` works." in trouble
    remedy = remedy.partition("Run: ")[2].rstrip(".")
    assert remedy in (ROOT / "docs" / "troubleshooting.md").read_text()
    place.follow(remedy)
    succeeded(place.execute(by_attribute))
    assert "apex/__init__.py" not in succeeded(place.doctor("amp", "--check")).stdout
