"""Ways to install: from the sdist, editable, into a folder, and where a cache answers."""

import pytest
from environments import copy_checkout
from places import AN_OP, NO_COMPILER, last_line, runs, succeeded

from ci.workspace import DIST, artifacts, wheel

NO_KERNELS = {"APEX_BUILD_CPP_OPS": "0", "APEX_BUILD_CUDA_OPS": "0"}
ON = {"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_CUDA_OPS": "0"}


def sdist():
    (found,) = artifacts("apex-amp", "*.tar.gz")
    return found


def brings_kernels(place) -> bool:
    return (place.site / "apex" / "amp" / "_kernels" / "manifest.json").is_file()


def test_from_the_sdist(place):
    """Isolated as pip does it, without torch and without a compiler: a wheel of sources."""
    place.install(sdist(), **NO_COMPILER)
    assert not brings_kernels(place)
    assert runs(place.execute(AN_OP))
    assert "multi_tensor cpu cached: " in " ".join(succeeded(place.doctor()).stdout.split())


def test_kernels_that_are_demanded_and_cannot_be_built(place):
    """pip fails and shows why, instead of installing less than was asked for."""
    done = place.pip("install", "--no-build-isolation", sdist(), **ON, **NO_COMPILER)
    assert done.returncode == 1
    assert "No C++ compiler was found (looked for CXX=/nowhere/g++)" in done.stdout + done.stderr
    assert not (place.site / "apex").exists()


def test_editable_over_a_wheel_and_back(place, tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    package = checkout / "packages" / "apex-amp"
    place.install(wheel("apex-amp"))
    place.install("--no-build-isolation", "--no-deps", "-e", package)
    assert (
        str(package) in succeeded(place.execute("import apex.amp as a; print(a.__file__)")).stdout
    )
    (package / "src" / "apex" / "amp" / "new_module.py").write_text("print('at once')\n")
    assert succeeded(place.execute("import apex.amp.new_module")).stdout == "at once\n"
    assert runs(place.execute(AN_OP))
    report = succeeded(place.doctor("amp", **ON)).stdout
    assert f"apex.amp in {package}/src/apex/amp" in report
    assert "had no effect" not in report

    place.install("--force-reinstall", "--no-deps", wheel("apex-amp"))
    assert (
        str(place.site)
        in succeeded(place.execute("import apex.amp as a; print(a.__file__)")).stdout
    )
    succeeded(place.pip("uninstall", "-y", "apex-amp"))
    assert last_line(place.execute("import apex.amp")).endswith("No module named 'apex'")
    assert (package / "src" / "apex" / "amp" / "new_module.py").is_file()


def test_into_a_folder(place, tmp_path):
    """pip merges nothing below --target: a second wheel is left out, or takes the first's place."""
    folder = tmp_path / "folder"
    where = {"PYTHONPATH": str(folder)}
    into = ("install", "--no-deps", "--target", folder)
    succeeded(place.pip(*into, wheel("apex-amp")))
    assert runs(place.execute(AN_OP, **where))
    second = succeeded(place.pip(*into, wheel("apex-contrib")))
    assert "apex already exists. Specify --upgrade to force replacement." in second.stderr
    text = last_line(place.execute("import apex.contrib", **where))
    assert text == (
        "ModuleNotFoundError: apex.contrib is missing, though apex-contrib 0.1.0 is installed. Run "
        "`pip install --force-reinstall --no-deps apex-contrib`; with --target, add --upgrade, and "
        "name all Apex wheels in one command."
    )
    succeeded(place.pip(*into, "--upgrade", wheel("apex-contrib")))
    succeeded(place.execute("import apex.contrib", **where))
    assert "apex.amp is missing, though apex-amp" in last_line(
        place.execute("import apex.amp", **where)
    )
    remedy = f"pip install --no-deps --upgrade --target '{folder}' apex-amp apex-contrib"
    place.follow(remedy)
    assert runs(place.execute("import apex.contrib; " + AN_OP, **where))


def test_into_a_folder_with_uv(place, tmp_path):
    """uv merges."""
    folder = tmp_path / "folder"
    for package in ("apex-amp", "apex-contrib"):
        command = ("uv", "pip", "install", "--no-deps", "--python", place.python)
        succeeded(place.run(*command, "--target", folder, wheel(package)))
    assert runs(place.execute("import apex.contrib; " + AN_OP, PYTHONPATH=str(folder)))


def test_wheels_in_two_places(place, tmp_path):
    """As where a user adds a wheel to what the system has."""
    place.install("--no-deps", wheel("apex-amp"))
    succeeded(
        place.pip("install", "--no-deps", "--target", tmp_path / "own", wheel("apex-contrib"))
    )
    where = {"PYTHONPATH": str(tmp_path / "own")}
    both = "import apex; apex.contrib, apex.amp; "
    assert runs(place.execute(both + AN_OP, **where))


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_cache_answers(place, tmp_path, tool):
    """Neither looks at variables: the doctor tells it, and what it names brings the kernels."""
    cache = {f"{tool.upper()}_CACHE_DIR": str(tmp_path / "cache")}
    command = {
        "pip": (place.python, "-m", "pip", "install", "--force-reinstall"),
        "uv": ("uv", "pip", "install", "--reinstall", "--python", place.python),
    }[tool]
    command = (*command, "--no-deps", "--no-build-isolation", f"apex-amp @ {sdist().as_uri()}")
    succeeded(place.run(*command, **NO_KERNELS, **cache))
    succeeded(place.run(*command, **ON, **cache))
    assert not brings_kernels(place)
    report = succeeded(place.doctor("amp", **ON)).stdout
    assert "APEX_BUILD_CPP_OPS had no effect, because pip took a wheel that was there" in report
    if tool == "uv":
        succeeded(place.run(*command, "--no-cache", **ON, **cache))
    else:
        remedy = report.partition("had no effect")[2].partition("-> Run: ")[2].partition(".\n")[0]
        place.follow(f"{remedy} --no-build-isolation", **ON, **cache)
    assert brings_kernels(place)
    assert "had no effect" not in succeeded(place.doctor("amp", **ON)).stdout


def test_the_index_answers_with_a_wheel(place):
    """Its kernels are those that it was built with, whatever is set."""
    index = ("--no-index", "--find-links", DIST)
    place.install(*index, "apex-amp", APEX_BUILD_CUDA_OPS="1")
    report = succeeded(place.doctor("amp", APEX_BUILD_CUDA_OPS="1")).stdout
    assert "prebuilt: cpu-" in report
    assert "APEX_BUILD_CUDA_OPS had no effect" in report
    assert "--no-cache-dir --no-binary apex-amp apex-amp" in report
