"""Tables of arguments that the site makes: what is in them, and what stops the build."""

import inspect
import pkgutil
import re
import shutil
import sys

import pytest

from ci import docs_api, docs_tables, workspace

PAGES = workspace.ROOT / "docs"
NAMED = {page: docs_tables.MARKER.findall(page.read_text()) for page in PAGES.rglob("*.md")}
PATHS = sorted({path for lines in NAMED.values() for _, path, _ in lines})
# Pages of several objects, whose tables are by hand.
BY_HAND = {"README", "amp_C", "deprecated_optimizers", "distributed", "fused_layer_norm_cuda"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return workspace.merge_sources(tmp_path_factory.mktemp("sources") / "merged")


@pytest.fixture(scope="module")
def modules(sources):
    return docs_api.load(sources)


@pytest.mark.parametrize("path", PATHS)
def test_every_argument_is_in_the_table_with_its_default(path, modules):
    described = pkgutil.resolve_name(path)
    expected = dict(inspect.signature(described).parameters)
    expected.pop("self", None)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .", docs_tables.table(path, modules), re.M)
    assert [name for name, _ in rows] == [*expected]
    for parameter, (_, found) in zip(expected.values(), rows, strict=True):
        if parameter.default is not parameter.empty:
            names = vars(sys.modules[described.__module__])
            assert eval(found.strip("`"), names) == parameter.default
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert found == "required"


def test_every_page_has_a_table_of_its_object(sources, modules, tmp_path):
    shutil.copytree(PAGES, tmp_path / "pages")
    docs_tables.fill(tmp_path / "pages", sources, modules)
    folders = ("contrib", "normalization", "optimizers", "parallel", "transformer")
    pages = [page for page in NAMED if page.parent.name in folders and page.stem not in BY_HAND]
    assert len(pages) > 30
    for page in pages:
        title, *_ = page.read_text().removeprefix("# ").splitlines()
        names = {name for _, path, _ in NAMED[page] for name in path.split(".")}
        assert title in names if title.isidentifier() else names
        text = (tmp_path / "pages" / page.relative_to(PAGES)).read_text()
        assert text.count("\n\n| name | default | meaning |\n|---|---|---|\n| `") == len(
            NAMED[page]
        )
        assert "[Arguments of" not in text


@pytest.mark.parametrize(
    ("path", "file", "reason"),
    [
        ("apex.mlp.Nothing", "mlp.py", "apex.mlp.Nothing is no class or function"),
        ("apex.mlp", "__init__.py", "apex.mlp is no class or function"),
        ("apex.mlp.MLP", "gone.py", "must link to ../packages/apex-contrib/src/apex/mlp/mlp.py"),
    ],
)
def test_lines_that_name_nothing_are_errors(path, file, reason, sources, modules, tmp_path):
    line = f"[Arguments of `{path}`](../packages/apex-contrib/src/apex/mlp/{file})"
    (tmp_path / "page.md").write_text(f"# Page\n\n{line}\n")
    with pytest.raises(ValueError, match=reason):
        docs_tables.fill(tmp_path, sources, modules)


MODULE = '''
def right(a, b, *, c=None):
    """Takes three.

    Args:
        a, b: of
            :class:`list`.
        c: other.
    """


def wrong(a, b):
    """Takes two.

    Args:
        a, c: of what.
    """
'''


def test_a_small_table(tmp_path):
    (tmp_path / "small.py").write_text(MODULE)
    small = docs_api.load(tmp_path)
    assert docs_tables.table("small.right", small).splitlines()[2:] == [
        "| `a` | required | of `list`. |",
        "| `b` | required | of `list`. |",
        "| `c` | `None` | by keyword only: other. |",
    ]
    with pytest.raises(ValueError, match=r"small\.wrong: not described, or no argument: b, c"):
        docs_tables.table("small.wrong", small)
