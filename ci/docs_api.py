"""The API on the site: a page per public module, and an index of them with versions.

Every object links to its source at the commit that the site is made of.
"""

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import griffe

from ci import dirty, docs_menu, docs_methods
from ci.docs_text import markdown
from ci.workspace import MATRIX, PACKAGES, ROOT, tomllib


def load(sources: Path) -> griffe.ModulesCollection:
    extensions = griffe.load_extensions(docs_methods.TakenMethods())
    loader = griffe.GriffeLoader(
        search_paths=[sources], allow_inspection=False, extensions=extensions
    )
    for name in sorted({path.stem for path in sources.iterdir()}):
        loader.load(name)
    loader.resolve_aliases(implicit=False, external=False)
    return loader.modules_collection


def reference(loaded: griffe.ModulesCollection, folder: Path, sources: Path) -> Iterator[str]:
    """Write a page per public module and an index; yield what has no docstring.

    A module is public if no part of its name begins with ``_`` and it has ``__all__``. A name that
    several modules offer is described where its path is shortest.
    """
    folder.mkdir()
    described: set[str] = set()
    found = [m for name in list(loaded.members) for m in with_exports(loaded[name])]
    modules = sorted(found, key=lambda module: (module.path.count("."), module.path))
    for module in modules:
        options = "    options: {members: false, show_root_heading: false}"
        lines = [f"# {module.path}", "", link(module, sources), ""]
        lines += [f"::: {module.path}", options]
        again = []
        for name in map(str, module.exports or []):
            item = target(module, name)
            if item is None or name.startswith("_"):
                continue
            if item.path in described:
                again.append(f"`{name}`")
                continue
            described.add(item.path)
            if not item.is_module and item.docstring is None:
                yield f"{module.path}.{name}: is public and has no docstring ({item.path})"
            if not item.is_module:
                path = f"{module.path}.{name}"
                lines += ["", f"::: {path}", "", link(item, sources, path)]
        if again:
            lines += ["", f"Described elsewhere: {', '.join(again)}."]
        (folder / f"{module.path}.md").write_text("\n".join(lines) + "\n")
    (folder / "README.md").write_text(index(modules))


def link(item: griffe.Object, sources: Path, path: str = "") -> str:
    """Return a line that leads to an object's source; docs_text.py puts it below the heading."""
    file = Path(item.filepath).relative_to(sources)
    places = [f"packages/*/src/{file}"]
    if "_shared" in file.parts:
        places = [f"shared_csrc/{Path(*file.parts[file.parts.index('_shared') + 1 :])}"]
    elif file == Path("apex", "__init__.py"):  # the packages have copies, which git ignores
        places = ["shared_csrc/namespace/__init__.py"]
    found = next((f for place in places for f in ROOT.glob(place)), None)
    if found is None:
        return ""
    name, line = found.relative_to(ROOT).as_posix(), item.lineno or 1
    at = f"{MATRIX['home']}/blob/{commit() or 'main'}/{name}#L{line}"
    return f'<p class="source" data-of="{path}"><a href="{at}">{name}, line {line}</a></p>'


@functools.cache
def commit() -> str | None:
    try:
        return dirty.git(ROOT, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["version"]


def index(modules: list[griffe.Module]) -> str:
    """Return the first page: versions, and a line for each public module."""
    made_of = f" It is made of commit `{commit()[:12]}`." if commit() else ""
    lines = ["# API", "", "Every public module, from its docstrings." + made_of, ""]
    lines += ["| package | version | changes |", "|---|---|---|"]
    lines += [
        f"| [{p}](../packages/{p}.md) | {version(p)} | [changelog](../changes/{p}.md) |"
        for p in PACKAGES
    ]
    told = {f"{m.path}.md": first_line(m) for m in modules}
    for group in docs_menu.by_package(sorted(told)):
        for title, files in group.items():
            lines += ["", f"## {title}", ""]
            lines += [
                f"- [`{Path(file).stem}`]({file})" + f": {told[file]}" * bool(told[file])
                for entry in files
                for file in entry.values()
            ]
    return "\n".join(lines) + "\n"


def first_line(module: griffe.Module) -> str:
    text = markdown(module.docstring.value) if module.docstring else ""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", paragraph)[0].rstrip(".:;")


def with_exports(module: griffe.Module) -> Iterator[griffe.Module]:
    if module.exports:
        yield module
    for name, item in module.members.items():
        if not item.is_alias and item.is_module and not name.startswith("_"):
            yield from with_exports(item)


def target(module: griffe.Module, name: str) -> griffe.Object | None:
    """What a name of a module is; None where it is another project's, such as torch's."""
    item = module.members.get(name)
    try:
        return item.final_target if item is not None and item.is_alias else item
    except griffe.AliasResolutionError:
        return None
