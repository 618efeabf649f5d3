"""What nvcc and hipcc compile, and for which architectures."""

import re

import pytest

from ci import kernels, workspace

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture
def op(tmp_path):
    return kernels.Op("scale", tmp_path)


def test_all_architectures_unless_ci_samples(monkeypatch, op):
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    assert kernels.archs_of(op, ARCHS) == ARCHS


def test_a_sample_has_in_time_every_architecture(monkeypatch, op):
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    drawn = []
    for commit in range(40):
        monkeypatch.setattr(kernels.dirty, "seed", lambda commit=commit: f"commit {commit}")
        drawn.append(kernels.archs_of(op, ARCHS))
        assert kernels.archs_of(op, ARCHS) == drawn[-1]
    assert set(drawn) == {(arch,) for arch in ARCHS}


def test_architectures_that_a_compiler_knows(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hipcc = tmp_path / "hipcc"
    hipcc.write_text(
        '#!/bin/sh\n[ "$HIP_PLATFORM" = amd ] && [ "$1" = --offload-arch=gfx90a ] ||\n'
        "{ echo too old >&2; exit 1; }\n"
    )
    hipcc.chmod(0o755)
    assert workspace.known_to_hipcc(["gfx1201", "gfx90a"]) == ["gfx90a"]
    monkeypatch.setenv("APEX_HIPCC_KNOWS_ALL", "1")
    with pytest.raises(RuntimeError, match="hipcc does not compile for gfx1201: too old"):
        workspace.known_to_hipcc(["gfx90a", "gfx1201"])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="apt-get install hipcc"):
        workspace.known_to_hipcc(["gfx90a"])


@pytest.mark.parametrize("failure", ["warning", "error"])
def test_warnings_and_failures_end_the_run(monkeypatch, tmp_path, op, failure):
    monkeypatch.setattr(kernels, "OUTPUT", tmp_path)
    monkeypatch.setattr(kernels, "grouped", lambda archs, wanted: {("package", archs): [op]})

    def fake_build(ops, targets, folder, *, package):
        if failure == "error":
            raise kernels.BuildError("package: compiling scale (cuda) failed.")
        folder.mkdir(parents=True)
        text = "op.h(9): warning #177-D: never referenced\n2 warnings generated\n"
        text += "op.h:45:5: warning: loop not unrolled: the optimizer was unable to\n"
        (folder / "build.log").write_text(text)

    monkeypatch.setattr(kernels, "build", fake_build)
    (tmp_path / "scale.cpp").touch()
    with pytest.raises(SystemExit) as ended:
        kernels.main("cuda", "sm_80")
    told = {
        "warning": "package: op.h(9): warning #177-D: never referenced",
        "error": "scale (cuda)",
    }
    assert told[failure] in str(ended.value)
    assert not re.search("generated|unrolled", str(ended.value))
