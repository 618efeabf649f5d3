"""`nox -s docs`: what becomes of docstrings, and what stops the site from being built."""

import subprocess
import sys

import pytest

from ci import docs
from ci.docs_text import markdown, on_page_content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"rate :math:`\eta_t`, per step", r"rate $\eta_t$, per step"),
        (":class:`torch.optim.Adam`", "`torch.optim.Adam`"),
        (":func:`~apex.amp.initialize`", "`apex.amp.initialize`"),
        (":func:`here\n    <a.b>`", "`here`"),
        ("Example:\n    >>> f()", "Examples:\n    >>> f()"),
        ("as follows::\n\n    x = 1", "as follows:\n\n    x = 1"),
        ("One::two", "One::two"),
    ],
)
def test_docstrings_become_markdown(text, expected):
    assert markdown(text).strip() == expected


@pytest.mark.parametrize("start", [".. math:: x", ".. math::\n\n    x"])
def test_formulas_of_several_lines(start):
    assert "".join(markdown(f"{start}\n    + y\n\nNext.").split()) == "$$x+y$$Next."


def test_a_blank_line_begins_another_formula():
    text = markdown(".. math::\n    x\n    + y\n\n    z\n\nNext.")
    assert "".join(text.split()) == "$$x+y$$$$z$$Next."
    assert "\n\n" not in text.strip().partition("$$")[2].partition("$$")[0]


def test_warnings():
    text = markdown(".. warning::\n    Slow.\n\nNext.")
    assert text.strip() == "!!! warning\n\n    Slow.\n\nNext."


def test_formulas_become_mathml():
    page = on_page_content(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>')
    assert page.startswith('<p><math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">')
    assert "arithmatex" not in page
    assert "&#x0003C;" in page


def test_a_benchmark_page_has_a_table_per_setting(tmp_path):
    docs.benchmark_page("clip_grad", tmp_path)
    page = (tmp_path / "clip_grad.md").read_text()
    assert page.count("\n## ") == 3
    assert "\n## 1 thread, tuned malloc\n" in page
    assert "(in a loop)" not in page
    assert (tmp_path / "clip_grad.png").stat().st_size > 1000


def test_the_menu_does_not_repeat_a_package():
    files = ["api/apex.amp.md", "api/apex.amp.scaler.md", "api/amp_C.md"]
    assert docs.by_package(files) == [
        {"apex.amp": [{"apex.amp": files[0]}, {"scaler": files[1]}]},
        {"Apex's extension modules": [{"amp_C": files[2]}]},
    ]


MODULE = '''"""A module."""

__all__ = ["bare", "described", "other"]

from apex.two import other


def described():
    """It is described."""


def bare():
    pass


def _hidden():
    pass
'''


def test_public_names_without_a_docstring_are_named(tmp_path):
    (tmp_path / "sources" / "apex").mkdir(parents=True)
    (tmp_path / "sources" / "apex" / "__init__.py").write_text('"""All."""\n')
    (tmp_path / "sources" / "apex" / "one.py").write_text(MODULE)
    other = '"""Two."""\n\n__all__ = ["other"]\n\n\ndef other():\n    """Known."""\n'
    (tmp_path / "sources" / "apex" / "two.py").write_text(other)
    complaints = list(docs.reference(docs.load(tmp_path / "sources"), tmp_path / "api"))
    assert complaints == ["apex.one.bare: is public and has no docstring (apex.one.bare)"]
    page = (tmp_path / "api" / "apex.one.md").read_text()
    assert "::: apex.one.described" in page
    assert "_hidden" not in page
    assert "Described elsewhere: `other`" in (tmp_path / "api" / "apex.two.md").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a](there.md)", None),
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](there.md#nothing)", "#nothing"),
        ("[a](/absolute.md)", "absolute"),
    ],
)
def test_links_that_lead_nowhere_are_errors(tmp_path, text, reason):
    pages = tmp_path / "pages"
    (pages / "guides").mkdir(parents=True)
    for name in ("supported", "troubleshooting", "there"):
        (pages / f"{name}.md").write_text("# A page\n")
    (pages / "there.md").rename(pages / "guides" / "there.md")
    for package in docs.PACKAGES:
        (pages / "packages").mkdir(exist_ok=True)
        (pages / "packages" / f"{package}.md").write_text("# A package\n")
    (pages / "index.md").write_text(f"# Home\n\n{text.replace('there.md', 'guides/there.md')}\n")
    config = tmp_path / "mkdocs.yml"
    docs.write_config(config, pages, tmp_path / "sources", tmp_path / "site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if reason is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert reason in done.stderr


def test_a_page_that_no_menu_lists_is_an_error(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "page.md").write_text("# Page\n")
    with pytest.raises(ValueError, match=r"new/page\.md: is in no part of the site"):
        docs.menu(tmp_path)
