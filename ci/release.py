"""Makes a release of one package: `nox -s release -- PACKAGE VERSION [--dry-run | --tagged]`.

Everything happens in a clone: version and CHANGELOG are written, sdist and wheel are built twice
and compared, checked, and installed alone on the oldest and the newest torch, where the doctor and
a part of the tests run. Only then commit and tag come into this checkout; until then nothing is
changed. With ``--dry-run`` they do not come at all. ``--tagged``, for the workflow that a pushed
tag starts, builds what the tag has. Files are in dist/release/TAG, with the text of the release.
"""

import argparse
import dataclasses
import filecmp
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci import workspace
from ci.workspace import MATRIX, PACKAGES, ROOT

SHARED_CHANGES = "shared_csrc/changes"
NAMESPACE = "shared_csrc/namespace/__init__.py"  # apex/__init__.py of every package
VERSION_LINE = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
TEST_SHARE = "1/3"  # of the test functions, one case each: all of them ran in CI
KERNELS = {"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_CUDA_OPS": "0"}


class ReleaseError(Exception):
    """Why there can be no release: one reason a line."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a release consists of.

    Args:
        package: such as ``apex-amp``.
        version: canonical, such as ``1.4.0``.
        previous: the package's last tag; None for its first release.
        shared: fragments of the shared kernels that the package's users have not read yet.
        obsolete: those of all shared fragments that every package has told after this release.
        siblings: packages that should be released too, because the file that all five share, and of
            which the one installed last counts, has changed.
    """

    package: str
    version: str
    previous: str | None
    shared: tuple[str, ...]
    obsolete: tuple[str, ...]
    siblings: tuple[str, ...]

    @property
    def tag(self) -> str:
        return f"{self.package}-v{self.version}"


def main() -> int:
    options = parser().parse_args()
    try:
        release(options)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    result.add_argument("package", choices=PACKAGES)
    result.add_argument("version")
    how = result.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="do all, but leave no commit and tag")
    how.add_argument("--tagged", action="store_true", help="build the tag that is checked out")
    return result


def release(options: argparse.Namespace) -> None:
    """Do everything; what was made is in dist/release/TAG."""
    with tempfile.TemporaryDirectory(prefix="apex-release-") as scratch:
        is_thrown_away = options.dry_run or options.tagged
        clone = clone_of(ROOT, Path(scratch, "clone"), placeholder=is_thrown_away)
        if options.tagged:
            tag = check_tag(clone, options.package, options.version)
        else:
            made = plan(clone, options.package, options.version)
            write(clone, made)
            tag = commit(clone, made)
        notes = section(clone, options.package, options.version)
        folder = workspace.DIST / "release" / tag
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        step("build, twice")
        built = build_twice(clone, options.package, folder, os.environ | KERNELS)
        step("check")
        verify(repaired(built, folder))
        step("install")
        try_out(clone, options.package, folder)
        (folder / "notes.md").write_text(notes)
        print(f"\n{notes}\n{folder}:", *sorted(f.name for f in folder.iterdir()), sep="\n  ")
        if not is_thrown_away:
            git(ROOT, "pull", "--quiet", "--ff-only", str(clone), "HEAD")
            git(ROOT, "fetch", "--quiet", str(clone), "tag", tag)
            print(f"tagged {tag}. To publish it: git push origin HEAD {tag}")


def step(name: str) -> None:
    print(f"--- {name}", flush=True)


def git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def clone_of(root: Path, folder: Path, *, placeholder: bool) -> Path:
    """Clone what is committed, tags too.

    Args:
        root: a checkout without uncommitted changes.
        folder: where the clone is to be.
        placeholder: whether nobody in particular may make the commit, since it is thrown away.
    """
    changed = git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"{root} has changes that are not committed:\n{changed}")
    git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(folder))
    for name, instead in (("user.name", "Nobody"), ("user.email", "nobody@localhost")):
        own = subprocess.run(
            ["git", "-C", root, "config", name], capture_output=True, text=True, check=False
        ).stdout.strip()
        if own or placeholder:
            git(folder, "config", name, own or instead)
        else:
            raise ReleaseError(f"git does not know your {name}: git config {name} ...")
    return folder


def plan(root: Path, package: str, version: str) -> Plan:
    """Decide what the release has.

    Raises:
        ReleaseError: the version is not canonical or not above the last one, or nothing changed.
    """
    reasons = []
    previous = last_tag(root, package)
    try:
        wanted = Version(version)
        if str(wanted) != version or wanted.local or wanted.is_devrelease:
            reasons.append(
                f"version {version!r}: expected a public one, such as {wanted.base_version}"
            )
        if previous and wanted <= version_of(previous):
            reasons.append(f"version {version} is not above that of {previous}")
    except InvalidVersion:
        reasons.append(f"version {version!r}: expected one like 1.4.0 or 1.4.0rc1")
    told = {p: fragments(root, last_tag(root, p)) for p in PACKAGES}
    here = fragments(root, "HEAD")
    shared = here - told[package]
    others = [told[p] for p in PACKAGES if p != package]
    if not shared and not own_fragments(root, package):
        reasons.append(
            f"nothing changed since {previous}: neither packages/{package}/changes nor "
            f"{SHARED_CHANGES} has a fragment that is newer"
        )
    if reasons:
        raise ReleaseError("\n".join(reasons))
    return Plan(
        package,
        version,
        previous,
        shared=tuple(sorted(path for _, path in shared)),
        obsolete=tuple(sorted(path for _, path in here.intersection(*others))),
        siblings=tuple(p for p in PACKAGES if p != package and is_namespace_changed(root, p)),
    )


def last_tag(root: Path, package: str) -> str | None:
    """Return the tag of the package's highest version."""
    tags = git(root, "tag", "--list", f"{package}-v*").split()
    return max(tags, key=version_of, default=None)


def version_of(tag: str) -> Version:
    return Version(tag.rpartition("-v")[2])


def fragments(root: Path, commit: str | None) -> set[tuple[str, str]]:
    """Return (content's hash, path) of the shared fragments that a commit has."""
    if commit is None:
        return set()
    lines = git(root, "ls-tree", commit, f"{SHARED_CHANGES}/").splitlines()
    entries = [line.split(maxsplit=3)[2:] for line in lines]
    return {(blob, path) for blob, path in entries if path.endswith(".md")}


def own_fragments(root: Path, package: str) -> list[Path]:
    return sorted((root / "packages" / package / "changes").glob("*.md"))


def is_namespace_changed(root: Path, package: str) -> bool:
    """Whether the released version of a package has another apex/__init__.py than this commit."""
    tag = last_tag(root, package)
    return tag is not None and bool(git(root, "diff", "--name-only", tag, "HEAD", "--", NAMESPACE))


def write(root: Path, made: Plan) -> None:
    """Write the version and the CHANGELOG's section, and remove the fragments that it took."""
    folder = root / "packages" / made.package
    pyproject = folder / "pyproject.toml"
    text, count = VERSION_LINE.subn(f'version = "{made.version}"', pyproject.read_text())
    if count != 1:
        raise ReleaseError(f"{pyproject.name} of {made.package} has {count} lines with a version")
    pyproject.write_text(text)
    for path in made.shared:  # towncrier reads the section's folder, and removes what it took
        copy = folder / "changes" / "shared" / Path(path).name
        copy.parent.mkdir(parents=True, exist_ok=True)  # git keeps no empty folder
        shutil.copy(root / path, copy)
    for fragment in (folder / "changes").rglob("*.md"):
        fragment.write_text(one_line_per_paragraph(fragment.read_text()))
    git(root, "add", "--all")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--config", "ci/towncrier.toml"]
    command += ["--dir", f"packages/{made.package}", "--name", made.package]
    subprocess.run([*command, "--version", made.version], cwd=root, check=True)
    for path in made.obsolete:
        (root / path).unlink()


def one_line_per_paragraph(text: str) -> str:
    """Join the lines of each paragraph: pages of releases show every end of a line."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n")) + "\n"


def commit(root: Path, made: Plan) -> str:
    """Commit, and tag with the text of the release."""
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", f"{made.package} {made.version}")
    notes = section(root, made.package, made.version)
    git(root, "tag", "--annotate", "--cleanup=verbatim", made.tag, "--message", notes)
    for sibling in made.siblings:
        print(
            f"release {sibling} too: apex/__init__.py changed since {last_tag(root, sibling)}, and "
            "where that is installed later, the old file is what counts"
        )
    return made.tag


def section(root: Path, package: str, version: str) -> str:
    """Return the CHANGELOG's section of a version."""
    text = (root / "packages" / package / "CHANGELOG.md").read_text()
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if part.startswith(f"## {package} {version} "):
            return part.strip()
    raise ReleaseError(f"packages/{package}/CHANGELOG.md has no section for {version}")


def check_tag(root: Path, package: str, version: str) -> str:
    """Check that the commit is that of the tag, and has its version; return the tag."""
    tag = f"{package}-v{version}"
    if git(root, "rev-parse", f"{tag}^{{commit}}") != git(root, "rev-parse", "HEAD"):
        raise ReleaseError(f"{tag} is another commit than the one that is checked out")
    found = VERSION_LINE.search((root / "packages" / package / "pyproject.toml").read_text())
    if found is None or found[1] != version:
        raise ReleaseError(f"packages/{package}/pyproject.toml does not have version {version}")
    return tag


def build_twice(
    root: Path, package: str, folder: Path, environment: Mapping[str, str]
) -> list[Path]:
    """Build sdist and wheel in two folders; return the files if they are equal.

    The second build is done without a cache of compiled objects.
    """
    first = build(root, package, folder, environment)
    with tempfile.TemporaryDirectory(prefix="apex-again-") as again:
        copy = Path(again, "checkout")
        git(root, "clone", "--quiet", str(root), str(copy))
        plain = {k: v for k, v in environment.items() if k != "APEX_COMPILER_LAUNCHER"}
        second = build(copy, package, Path(again, "dist"), plain)
        for one, other in zip(first, second, strict=True):
            if one.name != other.name or not filecmp.cmp(one, other, shallow=False):
                raise ReleaseError(f"{one.name}: a second build gives another {other.name}")
    return first


def build(root: Path, package: str, folder: Path, environment: Mapping[str, str]) -> list[Path]:
    """Build an sdist, and from it a wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, f"packages/{package}"], cwd=root, check=True, env=dict(environment))
    return sorted(folder.iterdir())


def repaired(built: list[Path], folder: Path) -> Path:
    """Let auditwheel check what the wheel needs of its system, and name the tag for that."""
    (wheel,) = (file for file in built if file.suffix == ".whl")
    command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", folder]
    command += ["--plat", f"manylinux_2_28_{platform.machine()}"]
    for library in workspace.TORCH_LIBRARIES:
        command += ["--exclude", library]
    subprocess.run([*command, wheel], check=True)
    wheel.unlink()
    (result,) = folder.glob("*.whl")
    return result


def verify(wheel: Path) -> None:
    """Check the wheel and the sdist beside it, also against the oldest torch's symbols."""
    oldest = MATRIX["torch"]["versions"][0]
    with tempfile.TemporaryDirectory(prefix="apex-torch-") as folder:
        torch = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*torch, f"torch=={oldest}"], check=True)
        check = [sys.executable, str(ROOT / "ci" / "check_wheel.py"), str(wheel)]
        subprocess.run([*check, "--torch", str(Path(folder, "torch", "lib"))], check=True)


def try_out(root: Path, package: str, folder: Path) -> None:
    """Install the wheel alone on the oldest and the newest torch; run doctor and some tests."""
    (wheel,) = folder.glob("*.whl")
    environment = os.environ | {"APEX_JIT": "0"}
    sampled = ["-p", "ci.sampling", "--cases-per-test", "1", "--share", TEST_SHARE]
    for torch in (MATRIX["torch"]["versions"][0], MATRIX["torch"]["versions"][-1]):
        step(f"torch {torch}")
        with tempfile.TemporaryDirectory(prefix="apex-install-") as place:
            python = install(Path(place, "venv"), wheel, package, torch)
            doctor = [python, "-m", f"apex.{package.removeprefix('apex-')}", "--check"]
            subprocess.run(doctor, cwd=place, env=environment, check=True)
            tests = [python, "-m", "pytest", "-q", "-n", str(len(os.sched_getaffinity(0)))]
            tests += ["-m", "not builds", "-o", "apex_threads=1", "--timeout", "600", *sampled]
            tests.append(f"packages/{package}/tests")
            subprocess.run(tests, cwd=root, env=environment, check=True)


def install(folder: Path, wheel: Path, package: str, torch: str) -> str:
    """Make an environment with a torch and one of our wheels; return its Python."""
    python = str(folder / "bin" / "python")
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    pip = ["uv", "pip", "install", "--quiet", "--python", python, f"torch=={torch}", "setuptools"]
    pip += ["pytest-xdist", "tomli; python_version < '3.11'"]
    subprocess.run([*pip, f"{package}[test] @ {wheel.as_uri()}"], check=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
