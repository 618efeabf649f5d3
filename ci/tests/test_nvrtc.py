"""ci/nvrtc.py with compilers that are not there: what it compiles, and what it complains of."""

from types import SimpleNamespace

import pytest

from ci import nvrtc

GOOD, BAD, EMPTY = "apex::cuda::good", "apex::cuda::bad", "apex::cuda::empty"


class FakeNvrtc:
    def __init__(self, version, *architectures):
        self.version, self.architectures, self.seen = version, architectures, []

    def __str__(self):
        return self.version

    def compile(self, program, name, options):
        self.seen.append((name, options))
        if name == BAD:
            raise nvrtc.BuildError(f"NVRTC {self} did not compile {name}: no header optional")
        return "symbol", b"" if name == EMPTY else b"\x7fELF code"


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Kernels are their names, and what NVRTC is given is no matter here."""
    monkeypatch.setenv("MAX_JOBS", "2")
    program = nvrtc.rtc.program
    monkeypatch.setattr(
        nvrtc.rtc, "program", lambda kernel, folders, arch: (kernel.name, "program", [arch])
    )
    return program


def kernels(*names):
    return [(SimpleNamespace(name=name, unit=b"my_op"), {}) for name in names]


def test_each_kernel_is_compiled_and_those_that_fail_are_named(capsys):
    compiler = FakeNvrtc("12.6", 80, 90)
    complaints = nvrtc.compile_all(compiler, "sm_90", kernels(GOOD, BAD, GOOD, EMPTY))
    assert complaints == [
        f"NVRTC 12.6, my_op: NVRTC 12.6 did not compile {BAD}: no header optional",
        f"{EMPTY}: gave no machine code",
    ]
    assert sorted(compiler.seen) == sorted((n, ["sm_90"]) for n in (GOOD, BAD, GOOD, EMPTY))
    assert "NVRTC 12.6 for sm_90: 4 kernels, 2 failed" in capsys.readouterr().out


def test_a_kernel_without_a_name_is_a_complaint(monkeypatch, named):
    monkeypatch.setattr(nvrtc.rtc, "program", named)
    hidden = SimpleNamespace(name=b"PN4apex8KernelOfIXadL_ZN12_GLOBAL__N_14drawEPfEEEE", unit=b"x")
    (complaint,) = nvrtc.compile_all(FakeNvrtc("13.2", 90), "sm_90", [(hidden, {})])
    assert "cannot be named outside of its source" in complaint


def test_architectures_are_those_that_a_compiler_knows(monkeypatch):
    old, new = FakeNvrtc("12.6", 60, 75, 80, 90), FakeNvrtc("13.2", 75, 80, 90, 100, 120)
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    assert nvrtc.architectures(old) == ["sm_75", "sm_80", "sm_90"]
    assert nvrtc.architectures(new) == ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    drawn = set()
    for commit in range(30):
        monkeypatch.setattr(nvrtc.dirty, "seed", lambda commit=commit: f"commit {commit}")
        (arch,) = nvrtc.architectures(old)
        drawn.add(arch)
    assert drawn == {"sm_75", "sm_80", "sm_90"}


@pytest.mark.parametrize(("count", "listed"), [(1, [GOOD]), (2, [])])
def test_one_compiler_or_no_kernel_proves_nothing(monkeypatch, count, listed):
    monkeypatch.setattr(nvrtc.nvrtc, "libraries", lambda: [f"13.{i}" for i in range(count)])
    monkeypatch.setattr(nvrtc.nvrtc, "Nvrtc", lambda path: FakeNvrtc(path, 90))
    monkeypatch.setattr(nvrtc, "packages", lambda: ["package"])
    monkeypatch.setattr(nvrtc, "kernels_of", lambda package, wanted: kernels(*listed))
    with pytest.raises(SystemExit, match="expected two versions of NVRTC and some kernels"):
        nvrtc.main()
