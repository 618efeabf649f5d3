"""Plugins of the documentation site: docstrings become Markdown, formulas become MathML.

Docstrings are written in reStructuredText, as torch's are, and the site reads Markdown. Browsers
show MathML without any script. Links to sources stand below the headings of their objects.
"""

import html
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
ROLE = re.compile(r":[a-z]+:`~?([^`]*)`")
BLOCK = re.compile(r"^( *)\.\. (math|warning)::(.*\n(?:\1 +.*\n|\s*\n)*)", re.M)
SOURCE = re.compile(r'(<p class="source" data-of="([^"]+)">.*?</p>)')
# Tables that ci/docs.css dresses, by words of their first line.
TABLES = {
    "figures": "peers' time / ours",
    "summary": "median in a loop",
    "arguments": "<th>default</th>",
}
TABLE = r"<table>(?:(?!</thead>).)*%s.*?</table>"
NOWHERE = re.compile(r" <[^>]*>$")  # of :func:`name <where it is>`


class Markdown(griffe.Extension):
    """Rewrites the docstring of everything that griffe loads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Rewrite the parts of reStructuredText that our docstrings use."""
    text = BLOCK.sub(_block, text + "\n")
    text = ROLE.sub(_role, text)
    text = re.sub(r"(?<=\S)::$", ":", text, flags=re.M)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)


def _block(match: re.Match) -> str:
    indent, kind, body = match.groups()
    body = textwrap.dedent(body.replace("\n", "\n" + indent)).strip()
    if kind == "math":
        # A blank line ends a formula, and the next one begins.
        body = "\n\n".join(f"$$\n{part}\n$$" for part in re.split(r"\n\s*\n", body))
    else:
        body = "!!! warning\n\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return "\n" + textwrap.indent(body, indent) + "\n\n"


def _role(match: re.Match) -> str:
    words = " ".join(match[1].split())
    if match[0].startswith(":math:"):
        return f"${words}$"
    return f"`{NOWHERE.sub('', words)}`"


def on_page_content(content: str, /, **_: Any) -> str:
    """Finish a page (a hook of mkdocs): formulas, links to sources, tables of figures."""
    content = FORMULA.sub(_mathml, content)
    for line, name in SOURCE.findall(content):
        heading = re.search(rf'<h2 id="{re.escape(name)}".*?</h2>', content, re.S)
        if heading:
            content = content.replace(line, "")
            content = content.replace(heading[0], f"{heading[0]}\n{line}", 1)
    # Not a class of the table: the theme dresses tables that have none.
    for name, words in TABLES.items():
        table = re.compile(TABLE % re.escape(words), re.S)
        content = table.sub(rf'<div class="{name}">\g<0></div>', content)
    return content


def _mathml(match: re.Match) -> str:
    display = "block" if match[1] == "div" else "inline"
    math = convert(html.unescape(match[2]).strip(), display=display)
    return f'<div class="formula">{math}</div>' if display == "block" else math
