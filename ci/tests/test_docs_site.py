"""`nox -s docs`: what becomes of docstrings, and what stops the site from being built."""

import importlib
import re
import subprocess
import sys

import pytest

from ci import docs, docs_api, docs_menu, workspace
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


@pytest.mark.parametrize(
    ("head", "name"),
    [("peers' time / ours (in a loop)", "figures"), ("median in a loop", "summary"), ("op", None)],
)
def test_tables_that_the_style_dresses(head, name):
    """The style shows the last column first, so the ratio must be the last one."""
    table = f"<table>\n<thead><tr><th>op</th><th>{head}</th></tr></thead><tbody></tbody></table>"
    plain = "<table><thead><tr><th>a</th></tr></thead></table>"
    dressed = f'<div class="{name}">{table}</div>' if name else table
    assert on_page_content(plain + table + plain) == plain + dressed + plain


def test_a_benchmark_page_has_a_table_per_setting(tmp_path):
    docs.benchmark_page("clip_grad", tmp_path)
    page = (tmp_path / "clip_grad.md").read_text()
    assert page.count("\n## ") == 3
    assert "\n## 1 thread, tuned malloc\n" in page
    assert "(in a loop)" not in page
    assert (tmp_path / "clip_grad.png").stat().st_size > 1000


def test_the_menu_does_not_repeat_a_package():
    files = ["api/apex.amp.md", "api/apex.amp.scaler.md", "api/amp_C.md"]
    assert docs_menu.by_package(files) == [
        {"apex.amp": [{"apex.amp": files[0]}, {"scaler": files[1]}]},
        {"Apex's extension modules": [{"amp_C": files[2]}]},
    ]


def test_ops_are_grouped_by_purpose_and_none_is_lost(tmp_path):
    pages = ("optimizers/README", "optimizers/a", "contrib/xentropy", "contrib/new_op")
    for name in pages:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.md").write_text("# Title\n\n```python\n1\n```\n\nFirst. Second.\n")
    assert docs_menu.grouped(tmp_path, docs_menu.OPS) == [
        {"Optimizers": ["optimizers/README.md", "optimizers/a.md"]},
        {"Losses": ["contrib/xentropy.md"]},
        {"Other ops": ["contrib/new_op.md"]},
    ]
    overview = docs_menu.overview(tmp_path)
    assert "## Other ops\n\n- [Title](contrib/new_op.md): First\n" in overview


def test_lists_of_the_menu_name_pages_that_exist():
    for groups in (docs_menu.OPS, docs_menu.GUIDES):
        for pattern in {p for patterns in groups.values() for p in patterns}:
            made = pattern == "guides/shared-kernels"  # of shared_csrc/README.md
            assert made or docs_menu.listed(docs.ROOT / "docs", pattern), pattern


def test_examples_have_their_source_on_the_site(tmp_path):
    docs.written(tmp_path)
    docs.examples(tmp_path / "examples")
    for name in ("gpt", "simple/distributed", "several_hosts"):
        page = (tmp_path / "examples" / name / "README.md").read_text()
        _, _, source = page.partition("\n## Source\n")
        files = {f.name for f in (docs.ROOT / "docs" / "examples" / name).glob("*.py")}
        shown = set(re.findall(r'^\?\?\? example "(.*)"$', source, re.M))
        assert shown == {file for file in files if not file.startswith("test_")}
    train = (docs.ROOT / "docs/examples/several_hosts/train.py").read_text().splitlines()
    assert all(f"    {line}".rstrip() in source for line in train)
    listed = (docs.ROOT / "docs/examples/README.md").read_text()
    for page in (docs.ROOT / "docs/examples").glob("*/**/README.md"):
        assert f"({page.relative_to(docs.ROOT / 'docs/examples').as_posix()})" in listed


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
    sources, folder = tmp_path / "sources", tmp_path / "api"
    complaints = list(docs_api.reference(docs_api.load(sources), folder, sources))
    assert complaints == ["apex.one.bare: is public and has no docstring (apex.one.bare)"]
    page = (tmp_path / "api" / "apex.one.md").read_text()
    assert "::: apex.one.described" in page
    assert "_hidden" not in page
    assert "Described elsewhere: `other`" in (tmp_path / "api" / "apex.two.md").read_text()


def test_methods_that_a_class_takes_are_described_as_its_own(tmp_path):
    apex = tmp_path / "apex"
    apex.mkdir()
    (apex / "__init__.py").write_text("")
    (apex / "parts.py").write_text('def norm(owner, kind=2):\n    """The norm."""\n')
    text = "from . import parts\n\n\nclass Whole:\n    norm = parts.norm\n    number = 3\n"
    text += "    other = parts.missing\n\n    def parts(self):\n        pass\n"
    (apex / "whole.py").write_text(text)
    members = docs_api.load(tmp_path)["apex.whole.Whole"].members
    assert members["norm"].is_function
    assert members["norm"].docstring.value == "The norm."
    assert [parameter.name for parameter in members["norm"].parameters] == ["kind"]
    assert members["number"].is_attribute
    assert members["other"].is_attribute


def small_site(pages, front):
    """Write a page of every kind that the menu lists, and the front's text."""
    (pages / "guides").mkdir(parents=True)
    for name in ("supported", "troubleshooting", "quickstart", "ops", "guides/there"):
        (pages / f"{name}.md").write_text("# A page\n")
    for package in docs.PACKAGES:
        (pages / "packages").mkdir(exist_ok=True)
        (pages / "packages" / f"{package}.md").write_text("# A package\n")
    for part in ("api", "benchmarks", "changes", "examples"):
        (pages / part).mkdir()
        (pages / part / "README.md").write_text("# A part\n")
    (pages / "docs.css").touch()
    (pages / "index.md").write_text(front)


def built_site(folder, pages, sources):
    """Build it as `nox -s docs` does; return how the process ended."""
    config = folder / "mkdocs.yml"
    docs.write_config(config, pages, sources, folder / "site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_site_shows_methods_that_a_class_takes(tmp_path):
    """What mkdocs is configured with, and not what the checks of names load."""
    apex, pages = tmp_path / "sources" / "apex", tmp_path / "pages"
    small_site(pages, "# Home\n\n::: apex.whole.Whole\n")
    apex.mkdir(parents=True)
    (apex / "__init__.py").write_text("")
    (apex / "parts.py").write_text('def norm(owner, kind=2):\n    """The norm, told."""\n')
    text = 'from . import parts\n\n\nclass Whole:\n    """All."""\n\n    norm = parts.norm\n'
    (apex / "whole.py").write_text(text)
    done = built_site(tmp_path, pages, tmp_path / "sources")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "The norm, told." in page
    assert "owner" not in page


def test_objects_link_to_the_lines_that_define_them(tmp_path):
    sources = workspace.merge_sources(tmp_path / "sources")
    loaded = docs_api.load(sources)
    for path in ("apex.amp.initialize", "apex.optimizers.FusedAdam", "apex"):
        item = loaded[path]
        item = item.final_target if item.is_alias else item
        line = docs_api.link(item, sources, path)
        file, number = re.search(r'/blob/[0-9a-f]{40}/([^#"]+)#L(\d+)"', line).groups()
        code = (docs.ROOT / file).read_text().splitlines()[int(number) - 1]
        assert path == "apex" or re.match(rf"(def|class) {path.split('.')[-1]}\b", code)
    assert file == "shared_csrc/namespace/__init__.py"


def test_a_link_to_a_source_stands_below_its_heading():
    line = '<p class="source" data-of="a.b"><a href="x">x</a></p>'
    heading = '<h2 id="a.b" class="doc">a.b</h2>'
    assert on_page_content(f"{heading}<div>text</div>{line}") == (
        f"{heading}\n{line}<div>text</div>"
    )
    assert on_page_content(line) == line


def test_the_index_of_the_api_has_versions_and_first_sentences(tmp_path):
    loaded = docs_api.load(workspace.merge_sources(tmp_path / "sources"))
    index = docs_api.index([loaded["apex.optimizers"], loaded["amp_C"]])
    pyproject = (docs.ROOT / "packages/apex-optimizers/pyproject.toml").read_text()
    version = re.search(r'^version = "(.+?)"', pyproject, re.M)[1]
    assert f"| [apex-optimizers](../packages/apex-optimizers.md) | {version} |" in index
    doc = importlib.import_module("apex.optimizers").__doc__.split(".")[0]
    assert f"- [`apex.optimizers`](apex.optimizers.md): {doc.splitlines()[0][:20]}" in index
    assert "## Apex's extension modules\n\n- [`amp_C`](amp_C.md)" in index


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
    small_site(pages, f"# Home\n\n{text.replace('there.md', 'guides/there.md')}\n")
    done = built_site(tmp_path, pages, tmp_path / "sources")
    if reason is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert reason in done.stderr


def test_a_page_that_no_menu_lists_is_an_error(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "page.md").write_text("# Page\n")
    with pytest.raises(ValueError, match=r"new/page\.md: is in no part of the site"):
        docs_menu.menu(tmp_path)
