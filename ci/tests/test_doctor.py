"""``python -m apex.<package>``: what it finds, what it advises, and its exit codes."""

import json
import os
import subprocess
import sys

import pytest
from environments import PACKAGES, main_package, run

from ci.workspace import best_level, ops


def doctor(python, package, *options, cwd, **environ):
    """Run it; return its exit status and what it printed."""
    command = [python, "-m", f"apex.{main_package(package)}", *options]
    done = run(*command, cwd=cwd, env=environ, check=False)
    assert not done.stderr.count("Traceback"), done.stderr
    return done.returncode, done.stdout


def found(python, package, *options, cwd, **environ):
    status, text = doctor(python, package, "--json", *options, cwd=cwd, **environ)
    return status, json.loads(text)


@pytest.fixture
def sources(environment, source_wheels):
    """An environment with a wheel of sources, whose kernels are compiled at their first use."""
    environment.install(source_wheels["apex-amp"])
    return environment


NO_COMPILER = {"PATH": "/nowhere", "CXX": "/nowhere/g++"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_op_is_in_the_table_and_one_runs(package, tmp_path):
    status, facts = found(sys.executable, package, "--check", cwd=tmp_path)
    assert status == 0, facts["troubles"]
    assert facts["checks"]["cpu"] == "ok"
    assert set(facts["kernels"]) == {op for op, of in ops().items() if of == package}
    assert all(kernel["cpu"]["state"] != "missing" for kernel in facts["kernels"].values())
    assert package in facts["versions"]
    assert not [trouble for trouble in facts["troubles"] if trouble["is_fatal"]]


def test_people_read_the_same(tmp_path):
    # The level of every machine is not in each wheel that CI builds; this machine's best one is.
    level = best_level()
    status, text = doctor(sys.executable, "apex-optimizers", cwd=tmp_path, APEX_CPU_LEVEL=level)
    assert status == 0
    for words in ("torch   ", "nvcc  ", "fused_adam  ", "cache  ", f"APEX_CPU_LEVEL={level}"):
        assert words in text
    assert "an op on cpu" not in text


def test_a_missing_compiler(sources, tmp_path):
    """It is no trouble of the doctor's own: without --check the status is 0."""
    status, facts = found(
        sources.python, "apex-amp", "--check", cwd=tmp_path, APEX_JIT="1", **NO_COMPILER
    )
    assert status == 1
    assert "BuildError" in facts["checks"]["cpu"]
    assert facts["compilers"]["C++"] is None
    assert facts["kernels"]["multi_tensor"]["cpu"]["state"] == "missing"
    status, text = doctor(sources.python, "apex-amp", cwd=tmp_path, APEX_JIT="1", **NO_COMPILER)
    assert status == 0
    assert "1 of 1 kernels cannot run here; multi_tensor for cpu: " in text
    assert text.endswith("pip install apex-amp), or what the reason names.\n")


def test_errors_end_with_its_name(sources, tmp_path):
    code = (
        "import torch, apex.amp.multi_tensor as m; m.scale_([torch.ones(1)], torch.zeros(1), 1.0)"
    )
    done = run(*(sources.python, "-c", code), cwd=tmp_path, env={"APEX_JIT": "0"}, check=False)
    assert done.stderr.rstrip().endswith("`python -m apex.amp` shows what this installation finds.")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder.write_text(""), "is not a folder"),
        (lambda folder: folder.mkdir(mode=0o777) or folder.chmod(0o777), "write"),
    ],
)
def test_a_cache_that_cannot_be_used(sources, tmp_path, make, said):
    cache = tmp_path / "cache"
    make(cache)
    where = {"APEX_JIT": "1", "APEX_CACHE_DIR": str(cache)}
    status, facts = found(sources.python, "apex-amp", "--check", cwd=tmp_path, **where)
    assert status == 1
    assert said in facts["cache"]["problem"]
    (trouble,) = (t for t in facts["troubles"] if "cannot be kept" in t["what"])
    assert "APEX_CACHE_DIR" in trouble["remedy"]


def test_another_apex_in_the_way(sources, tmp_path):
    other = sources.site / "apex-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    (other / "RECORD").write_text("apex/__init__.py,,\n")
    _, facts = found(sources.python, "apex-amp", cwd=tmp_path, APEX_JIT="1")
    assert facts["other_apex"] == "apex 0.1"
    trouble = facts["troubles"][0]
    assert trouble["is_fatal"]  # so the status is 1 where a check is asked for
    assert "pip uninstall -y apex && pip install --force-reinstall" in trouble["remedy"]


@pytest.mark.builds
def test_building_for_an_image(sources, tmp_path):
    where = {"APEX_JIT": "1", "APEX_CACHE_DIR": str(tmp_path / "cache")}
    status, facts = found(sources.python, "apex-amp", "--build", cwd=tmp_path, **where)
    assert status == 0, facts["troubles"]
    assert facts["kernels"]["multi_tensor"]["cpu"]["state"] == "cached"
    assert facts["troubles"] == []
    # The image needs no compiler any more.
    status, facts = found(sources.python, "apex-amp", "--check", cwd=tmp_path, **where)
    assert (status, facts["checks"]) == (0, {"cpu": "ok"})


@pytest.mark.builds
def test_building_fails_with_what_the_compiler_says(sources, tmp_path):
    where = {"APEX_JIT": "1", "APEX_CACHE_DIR": str(tmp_path / "cache"), "CXX": "/bin/false"}
    status, facts = found(sources.python, "apex-amp", "--build", cwd=tmp_path, **where)
    assert status == 1
    assert facts["troubles"][0]["what"].startswith("multi_tensor for cpu")


def test_help_names_the_options(tmp_path):
    status, text = doctor(sys.executable, "apex-contrib", "--help", cwd=tmp_path)
    assert status == 0
    assert all(option in text for option in ("--json", "--check", "--build"))


def test_an_unknown_option_is_refused(tmp_path):
    command = [sys.executable, "-m", "apex.contrib", "--chekc"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=tmp_path)
    assert done.returncode == 2
    assert "--chekc" in done.stderr
