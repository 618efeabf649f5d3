"""ci/nvrtc.py with compilers that are not there: what it compiles, and what it complains of."""

import zipfile
from collections import Counter
from types import SimpleNamespace

import pytest

from ci import costs, nvrtc

GOOD, BAD, EMPTY = "apex::gpu::good", "apex::gpu::bad", "apex::gpu::empty"
PARAMETER_BYTES = 56


class FakeNvrtc:
    title = "NVRTC"

    def __init__(self, version, *architectures):
        self.version, self.architectures, self.seen = version, architectures, []
        self.said = ""

    def __str__(self):
        return self.version

    def compile(self, program, name, options):
        self.seen.append((name, options))
        if name == BAD:
            raise nvrtc.BuildError(f"NVRTC {self} did not compile {name}: no header optional")
        return "symbol", b"" if name == EMPTY else b"\x7fELF code", self.said


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Kernels are their names, and what NVRTC is given is no matter here."""
    monkeypatch.setenv("MAX_JOBS", "2")
    program = nvrtc.rtc.program
    monkeypatch.setattr(
        nvrtc.rtc, "program", lambda kernel, folders, arch, _: (kernel.name, "program", [arch])
    )
    monkeypatch.setattr(nvrtc, "short_name", lambda kernel: kernel.name)
    monkeypatch.setattr(nvrtc.sass, "parameter_bytes", lambda image, symbol: PARAMETER_BYTES)
    return program


def unit(*names, op="my_op"):
    facts = {"unit": op.encode(), "parameter_bytes": PARAMETER_BYTES}
    kernels = [SimpleNamespace(name=name, **facts) for name in names]
    return nvrtc.Unit("apex-contrib", op, kernels, {"my_op": None, "other": None})


def test_each_kernel_is_compiled_and_those_that_fail_are_named(capsys):
    compiler = FakeNvrtc("12.6", 80, 90)
    complaints = nvrtc.compile_all(compiler, "sm_90", [unit(GOOD, GOOD), unit(GOOD, BAD)])
    assert complaints == [
        f"NVRTC 12.6 for sm_90, my_op: NVRTC 12.6 did not compile {BAD}: no header optional"
    ]
    options = ["sm_90", "--ptxas-options=-v"]
    assert sorted(compiler.seen) == sorted((name, options) for name in (GOOD, GOOD, GOOD, BAD))
    assert "NVRTC 12.6 for sm_90: 4 kernels, 1 failed" in capsys.readouterr().out


def test_no_code_and_warnings_are_complaints():
    (complaint,) = nvrtc.compile_all(FakeNvrtc("12.6"), "sm_90", [unit(EMPTY)])
    assert complaint == f"{EMPTY}: gave no machine code"
    compiler = FakeNvrtc("12.6")
    compiler.said = "op.h(9): warning #177-D: never referenced\nptxas info    : 0 bytes gmem"
    (complaint,) = nvrtc.compile_all(compiler, "sm_90", [unit(GOOD)])
    assert complaint == f"NVRTC 12.6, my_op: {compiler.said.splitlines()[0]}"


def test_parameters_of_another_size_are_a_complaint(monkeypatch):
    monkeypatch.setattr(nvrtc.sass, "parameter_bytes", lambda image, symbol: 60)
    (complaint,) = nvrtc.compile_all(FakeNvrtc("12.6"), "sm_90", [unit(GOOD)])
    assert complaint.endswith("copies 60 bytes, and the host gives 56 bytes of parameters")


def test_a_kernel_without_a_name_is_a_complaint(monkeypatch, named):
    monkeypatch.setattr(nvrtc.rtc, "program", named)
    hidden = unit(b"PN4apex8KernelOfIXadL_ZN12_GLOBAL__N_14drawEPfEEEE", op="x")
    (complaint,) = nvrtc.compile_all(FakeNvrtc("13.2", 90), "sm_90", [hidden])
    assert "cannot be named outside of its source" in complaint


@pytest.fixture
def table(tmp_path):
    """Return one in which another op of the package launches the first kernel."""
    table = costs.Table(tmp_path / "gpu_costs.toml")
    table.kernels = {("other", "rows<0>"): {}, ("elsewhere", "rows<1>"): {}}
    return table


def test_a_lot_has_some_of_each_engine_and_those_of_the_table(table, monkeypatch):
    whole = unit(*(f"rows<{i}>" for i in range(9)), "columns<float>")
    drawn = set()
    for commit in range(30):
        monkeypatch.setattr(nvrtc.dirty, "seed", lambda commit=commit: f"commit {commit}")
        names = [kernel.name for kernel in nvrtc.drawn(whole, 2, table).kernels]
        assert len(names) == len(set(names)) == 4
        assert {"rows<0>", "columns<float>"} < set(names)
        drawn |= set(names)
        few = [kernel.name for kernel in nvrtc.drawn(whole, 1).kernels]
        assert len(few) == 2
    assert drawn == {kernel.name for kernel in whole.kernels}
    assert nvrtc.drawn(whole, 2, table, ["my_op"]) is whole


def test_architectures_are_those_that_a_compiler_knows(monkeypatch):
    old, new = FakeNvrtc("12.6", 60, 75, 80, 90), FakeNvrtc("13.2", 75, 80, 90, 100, 120)
    assert nvrtc.architectures(old, False, False) == ["sm_75", "sm_80", "sm_90"]
    # The evidence is of sm_90.
    assert nvrtc.architectures(new, False, True) == ["sm_75", "sm_80", "sm_100", "sm_120"]
    drawn = set()
    for commit in range(30):
        monkeypatch.setattr(nvrtc.dirty, "seed", lambda commit=commit: f"commit {commit}")
        (arch,) = nvrtc.architectures(old, True, False)
        drawn.add(arch)
    assert drawn == {"sm_75", "sm_80", "sm_90"}


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs all; it gives what was compiled for what, and what was judged."""
    compilers = {"12.6": FakeNvrtc("12.6", 75, 80), "13.2": FakeNvrtc("13.2", 80, 90)}
    judged = []
    monkeypatch.setattr(nvrtc.nvrtc, "libraries", lambda: list(compilers))
    monkeypatch.setattr(nvrtc.nvrtc, "Nvrtc", compilers.get)
    monkeypatch.setattr(nvrtc, "packages", lambda: ["package"])
    rows = [f"rows<{i}>" for i in range(10)]
    built = [unit(*rows, op="syncbn"), unit(*rows[1:], GOOD, op="xentropy")]
    monkeypatch.setattr(nvrtc, "units_of", lambda package, wanted, has_wheels: built)
    monkeypatch.setattr(nvrtc.evidence, "of_unit", lambda op, *rest: {"op": op})
    monkeypatch.setattr(nvrtc.evidence, "judge", lambda *words: judged.append(words) or [])

    def run(*words):
        nvrtc.main(*words)
        seen = Counter(
            (version, options[0])
            for version, compiler in compilers.items()
            for _, options in compiler.seen
        )
        return seen, judged[0]

    return run


def test_the_evidence_is_of_the_newest_and_the_rest_for_all_others(run, monkeypatch):
    monkeypatch.delenv(costs.WRITES, raising=False)
    seen, (found, ops, listed, version) = run("syncbn", "xentropy")
    archs = [("12.6", "sm_75"), ("12.6", "sm_80"), ("13.2", "sm_80"), ("13.2", "sm_90")]
    assert seen == dict.fromkeys(archs, 20)
    assert list(found) == ["apex-contrib/syncbn", "apex-contrib/xentropy"]
    assert (ops, version) == (["syncbn", "xentropy"], "13.2")
    assert {("syncbn", "rows<0>"), ("xentropy", GOOD)} < listed


def test_the_table_is_written_from_the_evidence_alone(run, monkeypatch):
    monkeypatch.setenv(costs.WRITES, "1")
    assert run("syncbn")[0] == {("13.2", "sm_90"): 20}


def test_where_ci_samples_all_kernels_of_the_named_ops_and_a_lot_of_others(run, monkeypatch):
    monkeypatch.delenv(costs.WRITES, raising=False)
    seen, (_, ops, listed, _) = run("--lot", "xentropy")
    assert seen["13.2", "sm_90"] == 10 + nvrtc.LOT
    # Of syncbn one engine, of xentropy two, the second of which has one kernel.
    assert seen["13.2", "sm_80"] == 2 * nvrtc.SMALL_LOT + 1
    assert seen["12.6", "sm_75"] + seen["12.6", "sm_80"] == 2 * nvrtc.SMALL_LOT + 1
    assert len(listed) == 20
    assert ops == sorted(nvrtc.ops())


@pytest.fixture
def hiprtc(run, monkeypatch):
    """A HIPRTC beside the compilers of NVIDIA; its machine code has no parameters to be read."""
    compiler = FakeNvrtc("6.4.1")
    compiler.title = "HIPRTC"
    monkeypatch.setattr(nvrtc.hiprtc, "find", lambda names: (compiler, []))
    monkeypatch.setattr(nvrtc.sass, "parameter_bytes", lambda image, symbol: 0)
    return compiler


def test_amd_gpus_by_hiprtc_alone(run, hiprtc):
    with pytest.raises(SystemExit) as ended:
        run("--amd=gfx90a,gfx1100", "syncbn", "xentropy")
    assert ended.value.code is None
    assert Counter(arch for _, (arch,) in hiprtc.seen) == {"gfx90a": 20, "gfx1100": 20}


def test_where_ci_samples_one_amd_gpu_and_a_quarter_of_the_sources(run, hiprtc):
    with pytest.raises(SystemExit) as ended:
        run("--amd=gfx90a,gfx1100", "--lot", "xentropy")
    assert ended.value.code is None
    assert len({arch for _, (arch,) in hiprtc.seen}) == 1
    # Of xentropy, which is named: a lot of one engine, and the one kernel of another.
    assert len(hiprtc.seen) - (nvrtc.LOT + 1) in (0, nvrtc.SMALL_LOT)


def test_a_kernel_that_hiprtc_refuses_and_no_hiprtc(run, hiprtc, monkeypatch):
    built = [unit(GOOD, BAD), unit(GOOD)]
    monkeypatch.setattr(nvrtc, "units_of", lambda package, wanted, has_wheels: built)
    with pytest.raises(SystemExit, match=r"^HIPRTC 6\.4\.1 for gfx90a, my_op: .* no header"):
        run("--amd=gfx90a")
    monkeypatch.setattr(nvrtc.hiprtc, "find", lambda names: (None, ["a.so: nothing."]))
    with pytest.raises(SystemExit, match=r"no HIPRTC was found:\na\.so: nothing"):
        run("--amd=gfx90a")


def test_the_library_of_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("apex/amp/_kernels/gpu-rtc.so", "library")
        wheel.writestr("apex/amp/_kernels/cpu.so", "another")
    library = nvrtc.unpacked(tmp_path / "a.whl", "gpu-rtc.so", tmp_path / "new")
    assert library.read_text() == "library"


@pytest.mark.parametrize(("count", "listed"), [(1, [unit(GOOD)]), (2, [])])
def test_one_compiler_or_no_kernel_proves_nothing(monkeypatch, count, listed):
    monkeypatch.setattr(nvrtc.nvrtc, "libraries", lambda: [f"13.{i}" for i in range(count)])
    monkeypatch.setattr(nvrtc.nvrtc, "Nvrtc", lambda path: FakeNvrtc(path, 90))
    monkeypatch.setattr(nvrtc, "packages", lambda: ["package"])
    monkeypatch.setattr(nvrtc, "units_of", lambda package, wanted, has_wheels: listed)
    with pytest.raises(SystemExit, match="expected two versions of NVRTC and some kernels"):
        nvrtc.main()
