"""Asks the package index for releases of torch, and brings ci/matrix.toml up to date.

python ci/new_torch.py

`[torch] versions` gets the newest patch release of each of the six newest minor ones; where torch
has no wheels for a Python yet, or no more, `first_for_python` and `last_for_python` say so. The
file is changed in place, with what is generated from it, and what changed is printed.
.github/workflows/torch.yml runs this each week.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci.workspace import MATRIX, ROOT

KEPT = 6
ENDS = {"first_for_python": 0, "last_for_python": -1}  # of the versions that a Python has
RELEASE = re.compile(r"\d+\.\d+\.\d+")  # no release candidates


def main() -> None:
    file = ROOT / "ci" / "matrix.toml"
    pythons = [*MATRIX["pythons"], *MATRIX["free_threaded"]]
    text, changes = updated(file.read_text(), MATRIX["torch"], pythons, index_versions)
    file.write_text(text)
    if changes:
        subprocess.run([sys.executable, str(ROOT / "ci" / "supported.py")], check=True)
    print("\n".join(f"- {change}" for change in changes) or "torch has no release that is new here")


def index_versions(python: str) -> list[str]:
    """Return the versions of torch that have wheels for a Python, as pip sees them."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    command += ["--python-version", python.removesuffix("t"), "--only-binary", ":all:"]
    if python.endswith("t"):  # built without a GIL
        command += ["--abi", f"cp{python.replace('.', '')}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listed = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    if listed is None:
        raise ValueError(f"pip index versions torch: expected `Available versions:`, got {said!r}")
    return listed[1].split(", ")


def updated(
    text: str, torch: dict, pythons: list[str], available: Callable[[str], list[str]]
) -> tuple[str, list[str]]:
    """Return the new text of ci/matrix.toml, and a line for each change.

    Args:
        text: the file as it is.
        torch: its table ``torch``.
        pythons: its list ``pythons``.
        available: gives the versions of torch that are there for a Python.

    Raises:
        ValueError: the index lacks what the matrix has, or the file has not the expected lines.
    """
    listed = {python: newest_minors(available(python)) for python in pythons}
    every = newest_minors([v for versions in listed.values() for v in versions])
    versions = every[-KEPT:]
    old = torch["versions"]
    if not versions or key(versions[-1]) < key(old[-1]):
        raise ValueError(
            f"the index ends with torch {versions[-1:]}, and the matrix with {old[-1]}"
        )
    text = replaced(text, "versions", "[" + ", ".join(f'"{v}"' for v in versions) + "]")
    changes = told(old, versions, torch["build"])
    for name, end in ENDS.items():
        ends = {
            python: usable[end]
            for python, found in listed.items()
            if (usable := [v for v in found if v in versions]) and usable[end] != versions[end]
        }
        inner = ", ".join(f'"{python}" = "{version}"' for python, version in ends.items())
        text = replaced(text, name, f"{{ {inner} }}" if inner else "{}")
        changes += told_of_pythons(name, torch[name], ends, versions[end])
    return text, changes + [
        f"Python {p} has none of these torches any more: remove it from the list by hand"
        for p, found in listed.items()
        if not {*found} & {*versions}
    ]


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def minor(version: str) -> tuple[int, ...]:
    return key(version)[:2]


def newest_minors(versions: list[str]) -> list[str]:
    """Return the newest patch release of each minor one, in order; no candidates."""
    releases = sorted((v for v in versions if RELEASE.fullmatch(v)), key=key)
    return list({minor(v): v for v in releases}.values())


def told(old: list[str], new: list[str], build: str) -> list[str]:
    before, after = ({minor(v): v for v in versions} for versions in (old, new))
    changes = [f"torch {after[m]} is new" for m in after if m not in before]
    changes += [
        f"torch {after[m]} comes for {before[m]}"
        for m in after
        if m in before and after[m] != before[m]
    ]
    for m in before.keys() - after.keys():
        changes.append(
            f"torch {before[m]} leaves the six newest: if a package still promises it "
            "(`torch>=` in its pyproject.toml), put it back until a minor release announced that"
        )
        if m == minor(build):
            changes.append(f"wheels are compiled against {build}: choose another `build` by hand")
    return changes


def told_of_pythons(
    name: str, before: dict[str, str], after: dict[str, str], end: str
) -> list[str]:
    verb = "begins" if name.startswith("first") else "ends"
    changed = [p for p in {**before, **after} if before.get(p) != after.get(p)]
    return [f"Python {p} {verb} with torch {after.get(p, end)}" for p in changed]


def replaced(text: str, name: str, value: str) -> str:
    """Replace the value of a line ``name = ...``; a comment behind it stays."""
    result, count = re.subn(
        rf"^({name} = )(?:\[[^\]]*\]|\{{[^}}]*\}})", rf"\g<1>{value}", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError(f"ci/matrix.toml: expected one line `{name} = `, found {count}")
    return result


if __name__ == "__main__":
    main()
