"""The namespace ``apex`` with real wheels: any subset, any order, editable, mixed, or missing."""

import pytest
from environments import PACKAGES, build_editable, copy_checkout, forms, main_package, run

import apex

TWO_ORDERS = [PACKAGES, PACKAGES[::-1]]


def all_forms(packages) -> list[str]:
    return [statement for package in packages for statement in forms(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_one_wheel_alone(environment, source_wheels, package):
    """What is there works in every form; what is not says which wheel has it, or that none has."""
    environment.install(source_wheels[package])
    others = [p for p in PACKAGES if p != package]
    present = all_forms([package])
    results = environment.results(*present, *all_forms(others))
    assert results[:3] == ["ok"] * 3
    for i, missing in enumerate(others, start=1):
        advice = f"apex.{main_package(missing)} is not installed. It is part of {missing}: "
        types = ["ModuleNotFoundError", "AttributeError", "ModuleNotFoundError"]
        answers = results[3 * i : 3 * i + 3]
        assert answers == [f"{t}: {advice}pip install {missing}" for t in types]

    names = {**apex._WHEELS, **apex._NOT_BUILT}
    foreign = [name for name, owner in names.items() if owner != package]
    results = environment.results(*(f"import apex, {name}" for name in foreign))
    for name, result in zip(foreign, results, strict=True):
        for parent in ("apex.contrib", "apex.transformer"):
            if name.startswith(f"{parent}."):
                name = parent  # which is imported first
        owner = names[name]
        answer = f"{name} is not installed. It is part of {owner}: pip install {owner}"
        if name in apex._NOT_BUILT:
            answer = f"{name} is not built yet: no known release of {owner} has it."
        assert result == f"ModuleNotFoundError: {answer}"


@pytest.mark.parametrize("order", TWO_ORDERS, ids=["a-z", "z-a"])
def test_all_wheels_in_any_order(environment, source_wheels, order):
    for package in order:
        environment.install(source_wheels[package])
    assert environment.results(*all_forms(PACKAGES)) == ["ok"] * 15


@pytest.mark.parametrize("order", TWO_ORDERS, ids=["a-z", "z-a"])
def test_uninstalling(environment, source_wheels, order):
    """A wheel takes the shared file with it: imports still work, and the next install heals all."""
    first, second, third, *_ = order
    environment.install(*(source_wheels[p] for p in order[:3]))
    environment.uninstall(first)
    imports = [s for s in all_forms([second, third]) if "; apex." not in s]
    assert environment.results(*imports) == ["ok"] * 4
    gone = environment.results(f"import apex.{main_package(first)}")
    assert gone[0].startswith("ModuleNotFoundError")

    environment.install(source_wheels[order[3]])
    assert environment.results(*all_forms(order[1:4])) == ["ok"] * 9


def test_missing_wheel_is_not_there(environment, source_wheels):
    """Code that asks before it imports gets an answer, not an exception."""
    environment.install(source_wheels["apex-amp"])
    assert environment.results(
        "import apex; assert not hasattr(apex, 'contrib')",
        "import apex; assert hasattr(apex, 'amp')",
        "from importlib.util import find_spec; assert find_spec('apex.contrib') is None",
        "from importlib.util import find_spec; assert find_spec('apex.amp') is not None",
        "import apex; assert 'amp' in dir(apex) and 'contrib' not in dir(apex)",
        "import apex.contrib.xentropy",
        "import apex; apex.no_such_name",
        "import apex.no_such_name",
    ) == [
        *["ok"] * 5,
        "ModuleNotFoundError: apex.contrib is not installed. It is part of apex-contrib: "
        "pip install apex-contrib",
        "AttributeError: module 'apex' has no attribute 'no_such_name'",
        "ModuleNotFoundError: No module named 'apex.no_such_name'",
    ]


def test_every_name_of_apex_with_all_wheels(environment, source_wheels, monkeypatch):
    """A name moves from _NOT_BUILT to _WHEELS when it is built; both lists are checked here."""
    monkeypatch.setenv("APEX_JIT", "0")
    environment.install(*source_wheels.values())
    for lists in (apex._WHEELS, apex._NOT_BUILT, apex._REPLACED):
        results = environment.results(*(f"import apex, {name}" for name in lists))
        for (name, wheel), result in zip(lists.items(), results, strict=True):
            if lists is apex._WHEELS:
                # Extension modules of Apex are there only with their kernels.
                no_kernels = f"ImportError: {name}: the kernels of "
                extension = not name.startswith("apex") and result.startswith(no_kernels)
                assert result == "ok" or extension, name
            elif lists is apex._REPLACED:
                expected = f"{name} is not part of the Apex wheels. Use {wheel} instead."
                assert result == f"ModuleNotFoundError: {expected}"
            else:
                expected = f"ModuleNotFoundError: {name} is not in {wheel} "
                assert result.startswith(expected)
                assert result.endswith(
                    "which is installed; a later release may have it: "
                    f"pip install --upgrade {wheel}"
                )
    existing = (f"import pkgutil; pkgutil.resolve_name({r!r})" for r in apex._REPLACED.values())
    assert set(environment.results(*existing)) == {"ok"}


def test_every_form_says_it(environment, source_wheels):
    environment.install(source_wheels["apex-parallel"], source_wheels["apex-contrib"])
    expected = ": apex.transformer.context_parallel is not in apex-parallel "
    for answer in environment.results(
        "import apex.transformer.context_parallel",
        "from apex.transformer import context_parallel",
        "from apex.transformer.context_parallel import ring",
        "import importlib; importlib.import_module('apex.transformer.context_parallel')",
    ):
        assert answer.startswith(f"ModuleNotFoundError{expected}")
    gone = "apex.pyprof is not part of the Apex wheels. Use torch.profiler instead."
    assert environment.results(
        "from apex import pyprof",
        "import apex; apex.pyprof",
        "from apex.contrib import no_such_name",
        "import apex; from importlib.util import find_spec; assert find_spec('amp_C') is None",
    ) == [
        f"ModuleNotFoundError: {gone}",
        f"AttributeError: {gone}",
        f"ImportError: cannot import name 'no_such_name' from 'apex.contrib' ({environment.site}"
        "/apex/contrib/__init__.py)",
        "ok",
    ]


@pytest.mark.parametrize("editable_first", [True, False])
def test_editable_and_wheel(environment, source_wheels, tmp_path, editable_first):
    checkout = copy_checkout(tmp_path / "checkout")
    editable = build_editable(checkout / "packages" / "apex-amp", tmp_path / "editable")
    link = checkout / "packages/apex-amp/src/apex/amp/_shared"
    assert link.is_symlink()
    assert link.resolve() == checkout / "shared_csrc"
    assert run("git", "status", "--porcelain", link, cwd=checkout).stdout == "", "not git-ignored"

    wheels = [editable, source_wheels["apex-normalization"]]
    for wheel in wheels if editable_first else wheels[::-1]:
        environment.install(wheel)
    both = ["apex-amp", "apex-normalization"]
    inside = f"import apex.amp; assert apex.amp.__file__.startswith({str(checkout)!r})"
    assert environment.results(*all_forms(both), inside) == ["ok"] * 7
    environment.uninstall("apex-normalization")
    assert environment.results(*all_forms(["apex-amp"])) == ["ok"] * 3
    missing = environment.results("from apex import normalization")
    assert "apex-normalization" in missing[0]


def test_all_editable(environment, tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    for package in PACKAGES:
        folder = checkout / "packages" / package
        environment.install(build_editable(folder, tmp_path / "editable"))
    assert environment.results(*all_forms(PACKAGES)) == ["ok"] * 15


@pytest.mark.parametrize(
    "trace", ["apex-0.1.dist-info", "apex-0.1-py3.11.egg-info", "apex.egg-link"]
)
def test_another_apex_in_the_same_place(environment, source_wheels, trace):
    """NVIDIA's and ROCm's container images have an apex, whose files would mix with ours."""
    environment.install(source_wheels["apex-amp"])
    (environment.site / trace).mkdir()
    (answer,) = environment.results("import apex")
    assert answer.startswith(f"RuntimeWarning: {environment.site / trace}: another project's apex")
    assert "pip uninstall apex" in answer


def test_importing_loads_nothing_else(environment, source_wheels):
    """Not torch, nor what reads metadata: the names are answered when somebody asks."""
    environment.install(*source_wheels.values())
    code = (
        "import importlib.util, os, pkgutil, sys\n"
        "before = set(sys.modules)\n"
        "import apex\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = run(environment.python, "-c", code, cwd=environment.folder)
    assert done.stdout.strip() == "['apex']"
