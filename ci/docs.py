"""Builds the documentation site: `nox -s docs`.

Pages are those of docs/, the READMEs and CHANGELOGs of the packages, and generated ones: a page per
public module from its docstrings, and one per benchmark from its .csv. Tables of arguments on pages
are generated, too (ci/docs_tables.py). A link that leads nowhere, a public name without a docstring
and an argument that no docstring describes are errors.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "testkit"))

from apex_testkit.bench_report import markdown, plot, read_records
from ci import docs_tables, workspace
from ci.workspace import PACKAGES, ROOT

CONFIG = ROOT / "ci" / "mkdocs.yml"
TEXT = ROOT / "ci" / "docs_text.py"
# Folders of docs/ as parts of the site, in the menu's order; the rest follows from the files.
PARTS = {
    "Optimizers": "optimizers",
    "Normalization": "normalization",
    "Distributed": "parallel",
    "Transformers": "transformer",
    "Other ops": "contrib",
    "Guides": "guides",
    "API": "api",
    "Benchmarks": "benchmarks",
    "Changes": "changes",
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folder", type=Path, help="for pages and sources, emptied first")
    options.add_argument("site", type=Path, help="where the site is to be")
    folder, site = (path.resolve() for path in vars(options.parse_args()).values())
    shutil.rmtree(folder, ignore_errors=True)
    pages, sources = folder / "pages", folder / "sources"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("examples", "*.csv"))
    packages(pages)
    benchmark_pages(pages / "benchmarks")
    workspace.merge_sources(sources)
    modules = load(sources)
    docs_tables.fill(pages, sources, modules)
    complaints = list(reference(modules, pages / "api"))
    if complaints:
        print("\n".join(complaints), file=sys.stderr)
        return 1
    config = folder / "mkdocs.yml"
    write_config(config, pages, sources, site)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    return subprocess.run(command, check=False).returncode


def packages(pages: Path) -> None:
    """READMEs and CHANGELOGs of the packages, and the page about the shared kernels."""
    for package in PACKAGES:
        source = ROOT / "packages" / package
        for name, part in (("README.md", "packages"), ("CHANGELOG.md", "changes")):
            (pages / part).mkdir(exist_ok=True)
            shutil.copy(source / name, pages / part / f"{package}.md")
    text = (ROOT / "shared_csrc" / "README.md").read_text()
    (pages / "guides" / "shared-kernels.md").write_text(text.replace("](../docs/", "](../"))


def benchmark_pages(folder: Path) -> None:
    """A table and a picture of each benchmark's figures, and a list of them."""
    found = {file.stem for file in (ROOT / "docs" / "benchmarks").glob("[!.]*.csv")}
    names = sorted(found - {page.stem for page in folder.glob("*.md")})  # but for those of GPUs
    for name in names:
        benchmark_page(name, folder)
    listed = "\n".join(f"- [{name}]({name}.md)" for name in names)
    with (folder / "README.md").open("a") as page:
        page.write(f"\n## All benchmarks\n\n{listed}\n")


def benchmark_page(name: str, folder: Path) -> None:
    """Write a table per setting, and a picture of the one that compares kernels alone."""
    records = read_records(ROOT / "docs" / "benchmarks" / f"{name}.csv")
    settings: dict[tuple, list[dict]] = {}
    for record in records:
        setting = tuple(record[key] for key in ("threads", "malloc", "processor", "torch"))
        settings.setdefault(setting, []).append(record)
    most = max(record["threads"] for record in records)
    main = [r for r in records if r["threads"] == most and r["malloc"] == "tuned"]
    plot(main, folder / f"{name}.png")
    tables = [
        f"## {threads} {'thread' if threads == 1 else 'threads'}, {malloc} malloc\n\n"
        f'{processor}, torch {torch}. "!": other processes took more than 12 % of a core.\n\n'
        f"{markdown(rows)}\n"
        for (threads, malloc, processor, torch), rows in settings.items()
    ]
    (folder / f"{name}.md").write_text(
        f"# {name}\n\n`nox -s bench -- {name}` repeats it.\n\n"
        f"![Time of the peers of {name}, relative to ours]({name}.png)\n\n" + "\n".join(tables)
    )


def load(sources: Path) -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[sources], allow_inspection=False)
    for name in sorted({path.stem for path in sources.iterdir()}):
        loader.load(name)
    loader.resolve_aliases(implicit=False, external=False)
    return loader.modules_collection


def reference(loaded: griffe.ModulesCollection, folder: Path) -> Iterator[str]:
    """Write a page per public module; yield what has no docstring.

    A module is public if no part of its name begins with ``_`` and it has ``__all__``. A name that
    several modules offer is described where its path is shortest.
    """
    folder.mkdir()
    described: set[str] = set()
    modules = [m for name in list(loaded.members) for m in with_exports(loaded[name])]
    for module in sorted(modules, key=lambda module: (module.path.count("."), module.path)):
        options = "    options: {members: false, show_root_heading: false}"
        lines = [f"# {module.path}", "", f"::: {module.path}", options]
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
                lines += ["", f"::: {module.path}.{name}"]
        if again:
            lines += ["", f"Described elsewhere: {', '.join(again)}."]
        (folder / f"{module.path}.md").write_text("\n".join(lines) + "\n")


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


def write_config(file: Path, pages: Path, sources: Path, site: Path) -> None:
    """Write ci/mkdocs.yml with the folders and the menu."""
    result = yaml.safe_load(CONFIG.read_text())
    result |= {"docs_dir": str(pages), "site_dir": str(site), "nav": menu(pages)}
    handler = result["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    handler["paths"] = [str(sources)]
    handler["options"]["extensions"] = [str(TEXT)]
    result["hooks"] = [str(TEXT)]
    file.write_text(yaml.safe_dump(result, sort_keys=False))


def menu(pages: Path) -> list:
    quickstarts = [{p: f"packages/{p}.md"} for p in PACKAGES]
    parts: list = [{"Home": "index.md"}, {"Packages": quickstarts}]
    for title, folder in PARTS.items():
        files = sorted(pages.glob(f"{folder}/*.md"), key=lambda f: (f.stem != "README", f.stem))
        listed = [f.relative_to(pages).as_posix() for f in files]
        parts.append({title: by_package(listed) if folder == "api" else listed})
    parts.append({"Supported versions": "supported.md"})
    parts.append({"Troubleshooting": "troubleshooting.md"})
    listed = json.dumps(parts)
    for file in pages.rglob("*.md"):
        if f'"{file.relative_to(pages).as_posix()}"' not in listed:
            name = file.relative_to(pages)
            raise ValueError(f"{name}: is in no part of the site; see PARTS in ci/docs.py")
    return parts


def by_package(files: list[str]) -> list[dict[str, list[dict[str, str]]]]:
    """The pages of modules below the names that users import from, which titles do not repeat."""
    groups: dict[str, list[dict[str, str]]] = {}
    for file in files:
        name = Path(file).stem
        parts = name.split(".")
        group = ".".join(parts[:2]) if parts[0] == "apex" else "Apex's extension modules"
        groups.setdefault(group, []).append({name.removeprefix(f"{group}."): file})
    return [{group: files} for group, files in groups.items()]


if __name__ == "__main__":
    sys.exit(main())
