"""Builds the documentation site: `nox -s docs`.

Pages are those of docs/, the READMEs and CHANGELOGs of the packages, and generated ones: a page per
public module from its docstrings, one per benchmark from its .csv, and a list of all ops. Tables of
arguments (ci/docs_tables.py) and figures (ci/docs_figures.py) on pages are generated, too. A link
that leads nowhere, a public name without a docstring, an argument that no docstring describes and a
figure without a record are errors.
"""

import argparse
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "testkit"))

from apex_testkit.bench_report import markdown, plot, read_records
from ci import docs_api, docs_figures, docs_menu, docs_tables, workspace
from ci.workspace import PACKAGES, ROOT

CONFIG = ROOT / "ci" / "mkdocs.yml"
TEXT, METHODS = ROOT / "ci" / "docs_text.py", ROOT / "ci" / "docs_methods.py"
STYLE = ROOT / "ci" / "docs.css"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folder", type=Path, help="for pages and sources, emptied first")
    options.add_argument("site", type=Path, help="where the site is to be")
    folder, site = (path.resolve() for path in vars(options.parse_args()).values())
    shutil.rmtree(folder, ignore_errors=True)
    pages, sources = folder / "pages", folder / "sources"
    written(pages)
    examples(pages / "examples")
    packages(pages)
    benchmark_pages(pages / "benchmarks")
    docs_figures.fill(pages)
    workspace.merge_sources(sources)
    modules = docs_api.load(sources)
    docs_tables.fill(pages, sources, modules)
    (pages / "ops.md").write_text(docs_menu.overview(pages))
    complaints = list(docs_api.reference(modules, pages / "api", sources))
    if complaints:
        print("\n".join(complaints), file=sys.stderr)
        return 1
    config = folder / "mkdocs.yml"
    write_config(config, pages, sources, site)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    return subprocess.run(command, check=False).returncode


def written(pages: Path) -> None:
    """Copy the pages of docs/, and what the site looks like."""
    for file in workspace.files("docs/**/*.md", "docs/*.md"):
        target = pages / file.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copy(STYLE, pages)


def examples(folder: Path) -> None:
    """Put the source below the page of each example; its tests are left out."""
    for page in folder.glob("*/**/README.md"):
        blocks = [
            f'??? example "{file.name}"\n\n    ```python\n'
            f"{textwrap.indent(file.read_text().rstrip(), '    ')}\n    ```\n"
            for file in sorted(
                (ROOT / "docs" / page.relative_to(folder.parent)).parent.glob("*.py")
            )
            if not file.name.startswith("test_")
        ]
        with page.open("a") as text:
            text.write("\n## Source\n\n" + "\n".join(blocks))


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
    names = []
    for record in sorted(docs_figures.RECORDS.glob("[!.]*.csv")):
        page = folder / f"{record.stem}.md"
        if page.is_file():  # of a GPU
            docs_figures.gpu_page(record, page)
        else:
            names.append(record.stem)
            benchmark_page(record.stem, folder)
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


def write_config(file: Path, pages: Path, sources: Path, site: Path) -> None:
    """Write ci/mkdocs.yml with the folders and the menu."""
    result = yaml.safe_load(CONFIG.read_text())
    result |= {"docs_dir": str(pages), "site_dir": str(site), "nav": docs_menu.menu(pages)}
    handler = result["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    handler["paths"] = [str(sources)]
    handler["options"]["extensions"] = [str(TEXT), str(METHODS)]
    result["hooks"] = [str(TEXT)]
    file.write_text(yaml.safe_dump(result, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main())
