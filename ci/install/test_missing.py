"""What a user sees where torch or a compiler is missing."""

import re
import subprocess

from places import AN_OP, NO_COMPILER, Place, last_line, runs, said, succeeded

from ci.workspace import MATRIX, wheel

NO_TORCH = (
    r"ModuleNotFoundError: No module named 'torch', which (apex\.[\w.]+|amp_C) imports: "
    "pip install torch"
)


def test_without_torch(tmp_path):
    """Every import says what to install; the doctor answers; `import apex` works."""
    place = Place(tmp_path, is_empty=True)
    place.install("--no-deps", wheel("apex-optimizers"), wheel("apex-amp"))
    missing = place.pip("check")
    assert missing.returncode == 1
    assert "apex-amp 0.1.0 requires torch, which is not installed." in missing.stdout

    succeeded(place.execute("import apex, apex.optimizers"))
    for code in (
        "from apex.optimizers import FusedAdam",
        "import apex.amp",
        "import apex.fp16_utils",
        "import apex, amp_C",
    ):
        assert re.fullmatch(NO_TORCH, last_line(place.execute(code)))
    # Python's own text, where nobody could have added anything.
    plain = "ModuleNotFoundError: No module named 'torch'"
    assert last_line(place.execute("import amp_C")) == plain
    assert last_line(place.execute("import apex, torch")) == plain
    succeeded(
        place.execute("import apex, importlib.util as u; assert u.find_spec('torch') is None")
    )
    for package in ("amp", "optimizers"):
        asked = place.doctor(package)
        assert (asked.returncode, asked.stderr) == (1, "")
        assert f"torch is not installed for {place.python}." in asked.stdout


def test_kernels_in_the_wheel_need_no_compiler(place):
    place.install("--no-deps", wheel("apex-amp"))
    assert runs(place.execute(AN_OP, **NO_COMPILER))


def test_torch_for_cuda_brings_what_gpu_kernels_need(tmp_path):
    place = Place(tmp_path, is_empty=True)
    newest = MATRIX["torch"]["versions"][-1]
    wanted = ["--python", str(place.python), f"torch=={newest}", str(wheel("apex-amp"))]
    subprocess.run(["uv", "pip", "install", "-q", *wanted], check=True, timeout=900)
    assert runs(place.execute(AN_OP, **NO_COMPILER))
    report = succeeded(place.doctor("amp", "--compile", "sm_90", **NO_COMPILER)).stdout
    assert re.search(r"GPU +none that torch can use", report)
    assert re.search(r"NVRTC +/\S+/libnvrtc\.so\.\d+ \(\d+\.\d+, for sm_75, .*sm_90", report)
    assert re.search(
        r"NVIDIA GPU +gpu-rtc\.so for all; \d\d kernels of NVRTC in the cache; NVIDIA's driver "
        r"cannot be loaded: libcuda\.so\.1",
        report,
    )


def test_sources_without_a_compiler(place, sources):
    """A wheel of sources is installed without one; its kernels, and modules of kernels, say it."""
    place.install("--no-deps", sources["apex-optimizers"], sources["apex-amp"], **NO_COMPILER)
    text = said(place.execute(AN_OP, **NO_COMPILER))
    for words in (
        "BuildError: No C++ compiler was found (looked for CXX=/nowhere/g++). Install one with",
        "or install a wheel with prebuilt kernels.",
        "`python -m apex.amp` shows what this installation finds.",
    ):
        assert words in text
    module = place.execute("import amp_C", **NO_COMPILER)
    assert "ImportError: amp_C: the kernels of " in last_line(module)
    assert "because No C++ compiler was found" in last_line(module)
