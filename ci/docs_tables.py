"""Tables of arguments on the pages of docs/, made of signatures and docstrings with the site.

On a code host a line "[Arguments of `apex.mlp.MLP`](file)" leads to the source; on the site a table
stands in its place. Every argument must be described, by the object's own docstring or by the one
whose arguments its others "are those of".
"""

import os
import re
from pathlib import Path

import griffe

from ci.docs_text import markdown
from ci.workspace import ROOT

MARKER = re.compile(r"^(\[Arguments of `([\w.]+)`\]\((.*)\))$", re.M)
OTHERS = re.compile(r"are those\s+of\s+:\w+:`~?([\w.]+)`")


def fill(pages: Path, sources: Path, modules: griffe.ModulesCollection) -> None:
    """Put tables in the place of lines that name objects.

    Raises:
        ValueError: a line names nothing or another file, or an argument is not described.
    """
    for page in pages.rglob("*.md"):
        text = page.read_text()
        for line, path, link in MARKER.findall(text):
            text = text.replace(line, table(path, modules))
            file = modules[path].filepath.relative_to(sources)
            (source,) = ROOT.glob(f"packages/*/src/{file}")
            expected = os.path.relpath(source, ROOT / "docs" / page.relative_to(pages).parent)
            if link != expected:
                raise ValueError(f"{page.name}: {line} must link to {expected}")
        page.write_text(text)


def table(path: str, modules: griffe.ModulesCollection) -> str:
    """Return the arguments of a class or function: a row for each."""
    try:
        item = modules[path]
        parameters = {p.name: p for p in item.parameters if p.name not in ("self", "cls")}
    except (KeyError, AttributeError, griffe.AliasResolutionError) as error:
        raise ValueError(f"{path} is no class or function of the packages") from error
    text = item.docstring.value if item.docstring else ""
    told, others = descriptions(item, text), OTHERS.search(text)
    if others and parameters.keys() - told:
        other = modules[others[1] if "." in others[1] else item.resolve(others[1])]
        more = descriptions(other, other.docstring.value)
        told |= {name: more[name] for name in parameters.keys() & more if name not in told}
    if wrong := parameters.keys() ^ told:
        raise ValueError(f"{path}: not described, or no argument: {', '.join(sorted(wrong))}")
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for name, parameter in parameters.items():
        default = "required" if parameter.required else f"`{parameter.default}`"
        by_keyword = parameter.kind is griffe.ParameterKind.keyword_only
        meaning = "by keyword only: " * by_keyword + told[name]
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(rows)


def descriptions(item: griffe.Object, docstring: str) -> dict[str, str]:
    """What "Args" say: "device, dtype: of the weights" says it of both."""
    parsed = griffe.Docstring(markdown(docstring), parent=item).parse("google", warnings=False)
    return {
        name: " ".join(entry.description.split())
        for section in parsed
        if section.kind is griffe.DocstringSectionKind.parameters
        for entry in section.value
        for name in re.findall(r"\w+", entry.name)
    }
