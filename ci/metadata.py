"""What package indexes show of the five packages: addresses, classifiers, READMEs.

`nox -s lint` runs this. `home` and `pythons` of ci/matrix.toml decide.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ci.workspace import MATRIX, PACKAGES, tomllib

LINK = re.compile(r"\]\(([^)\s]+)\)")
FREE = "Free Threading :: 1 - Unstable"  # experimental: see docs/supported.md
IN_REPOSITORY = re.compile(r"(?:blob|tree)/main/([^#]+)(?:#.*)?")
# Files of the repository, named as if the reader had them.
PATH_IN_TEXT = re.compile(r"`(?:docs|packages|shared_csrc|ci)/[\w./-]*`")


def complaints(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        file = root / "packages" / package / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        for complaint in project_complaints(project, package):
            yield f"{file.relative_to(root)}: {complaint}"
        readme = file.with_name("README.md")
        for complaint in readme_complaints(readme.read_text(), root):
            yield f"{readme.relative_to(root)}: {complaint}"


def project_complaints(project: dict, package: str) -> Iterator[str]:
    home, prefix = MATRIX["home"], "Programming Language :: Python :: "
    urls = {
        "Homepage": home,
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/packages/{package}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    if project.get("urls") != urls:
        yield f"expected [project.urls] {urls}"
    pythons = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    wanted = ["3 :: Only", *MATRIX["pythons"], *([FREE] if MATRIX["free_threaded"] else [])]
    if pythons != wanted:
        yield f"expected classifiers {prefix}3 :: Only, and the same of {wanted[1:]}"
    if project["requires-python"] != f">={MATRIX['pythons'][0]}":
        yield f"expected requires-python >={MATRIX['pythons'][0]}"
    if (project.get("license"), project.get("license-files")) != ("BSD-3-Clause", ["LICENSE"]):
        yield 'expected license = "BSD-3-Clause" and license-files = ["LICENSE"]'


def readme_complaints(text: str, root: Path) -> Iterator[str]:
    """Links and paths that lead nowhere from the page of an index."""
    home = MATRIX["home"]
    for link in LINK.findall(text):
        path = IN_REPOSITORY.fullmatch(link.removeprefix(f"{home}/"))
        if not link.startswith(("https://", "#")):
            yield f"links to {link}, which is not there on a package index; begin with {home}"
        elif link.startswith(home) and link != home and not (path and (root / path[1]).exists()):
            yield f"links to {link}, which the repository does not have"
    for path in PATH_IN_TEXT.findall(text):
        yield f"names {path}, which readers on a package index do not have; link to it"
