"""Plugins of the documentation site: docstrings become Markdown, formulas become MathML.

Docstrings are written in reStructuredText, as torch's are, and the site reads Markdown. Browsers
show MathML without any script.
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
    """Write the formulas of a page as MathML (a hook of mkdocs)."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2]).strip(), display=display)
