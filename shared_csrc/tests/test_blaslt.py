"""apex/torch/blaslt_library.h against NVIDIA's header and library, and against the fake of both.

The library has 540 MB, so it is not fetched: its test runs where one is installed. No GPU is needed
to describe products. What the products give is tested with the ops, by the emulated GPU.
"""

import ctypes.util
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from shared_csrc.native import targets, toolchain

HERE = Path(__file__).resolve().parent
OURS = HERE.parent / "include" / "apex" / "torch" / "blaslt_library.h"
PLACES = [Path(sysconfig.get_path("purelib"), "nvidia"), *Path("/usr/local").glob("cuda*")]

# Ours, and cublasLt.h's, cublas_api.h's or library_types.h's.
ATTRIBUTES = {
    "transposes_a": "CUBLASLT_MATMUL_DESC_TRANSA",
    "transposes_b": "CUBLASLT_MATMUL_DESC_TRANSB",
    "epilogue": "CUBLASLT_MATMUL_DESC_EPILOGUE",
    "bias_pointer": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
    "bias_type": "CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE",
    "aux_pointer": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER",
    "aux_stride": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD",
    "workspace": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    "reductions": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
    "alignment_a": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
    "kGeluAux": "CUBLASLT_EPILOGUE_GELU_AUX",
    "kGeluAuxBias": "CUBLASLT_EPILOGUE_GELU_AUX_BIAS",
    "kDGelu": "CUBLASLT_EPILOGUE_DGELU",
    "kDGeluBiasGrad": "CUBLASLT_EPILOGUE_DGELU_BGRAD",
    "kBiasGradB": "CUBLASLT_EPILOGUE_BGRADB",
    "kReducesInFloat": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
}


def find(pattern: str) -> Path | None:
    found = [path for place in PLACES for path in sorted(place.rglob(pattern))]
    return found[-1] if found else None


def enumerators(text: str) -> dict[str, int]:
    """Every ``NAME = value`` of a C header, whose values may name earlier ones."""
    known: dict[str, int] = {}
    pattern = r"\b(CUBLASLT_(?:MATMUL|EPILOGUE|REDUCTION)_\w+) = ([\w |()]+)[,\n]"
    for name, value in re.findall(pattern, text):
        terms = [term.strip(" ()") for term in value.split("|")]
        known[name] = 0
        for term in terms:
            known[name] |= known[term] if term in known else int(term, 0)
    return known


def test_numbers_are_those_of_the_header():
    header = find("include/cublasLt.h")
    if header is None:
        pytest.skip("cublasLt.h is not here: the package nvidia-cublas brings it")
    text, theirs = OURS.read_text(), enumerators(header.read_text())
    cublas = text[text.index("kCublas = {") : text.index("kHipblas = {")]
    for name, their_name in ATTRIBUTES.items():
        source = text if name.startswith("k") else cublas
        ours = re.search(rf"\.?\b{name} = (\d+)", source)
        assert int(ours[1]) == theirs[their_name], name


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program that describes products, compiled as kernels for a CPU are."""
    out = tmp_path_factory.mktemp("blaslt") / "blaslt"
    return compiled(out, "blaslt.cpp", "-ldl")


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    out = tmp_path_factory.mktemp("blaslt") / "libfake.so"
    return compiled(out, "blaslt_fake.cpp", "-shared")


def compiled(out: Path, source: str, *flags: str) -> Path:
    own = toolchain.compile_flags(targets.Target("cpu", "baseline"))
    own = [f for f in own if f != "-fvisibility=hidden"]
    command = [*toolchain.find_cxx(), *own, f"-I{toolchain.INCLUDE}", str(HERE / source)]
    subprocess.run([*command, *flags, "-o", str(out)], check=True, timeout=300)
    return out


def run(*command) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.mark.builds
@pytest.mark.parametrize("kind", ["cublas", "hipblas"])
def test_a_library_takes_our_descriptions(kind, program, fake):
    assert run(program, kind, fake) == "written, handle 0"


@pytest.mark.builds
def test_without_a_library(program, tmp_path):
    assert run(program, "cublas", tmp_path / "libnone.so") == "closed"
    (tmp_path / "libother.so").write_text("no library")
    assert run(program, "cublas", tmp_path / "libother.so") == "closed"
    another = ctypes.util.find_library("m")  # without the functions
    assert run(program, "cublas", another) == "closed"


def test_cublaslt_takes_our_descriptions(request):
    library = find("lib*/libcublasLt.so.*")
    if library is None:
        pytest.skip("libcublasLt is not here: the package nvidia-cublas brings it")
    text = run(request.getfixturevalue("program"), "cublas", library)
    assert text.startswith("read back, handle ")
