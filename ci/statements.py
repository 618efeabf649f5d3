"""How much Python there is: files, lines, and statements, of which none is won by squeezing lines.

python ci/statements.py FOLDER...

Docstrings count as lines alone.
"""

import ast
import sys
from pathlib import Path


def main(*folders: str) -> None:
    for folder in folders:
        found = Path(folder).rglob("*.py")
        files = [f for f in found if not f.is_symlink() and "_shared" not in f.parts]  # not laid
        texts = [file.read_text() for file in files]
        lines, statements = sum(len(t.splitlines()) for t in texts), sum(map(count, texts))
        print(f"{folder}: {len(files)} files, {lines} lines, {statements} statements")


def count(text: str) -> int:
    """Return how many statements there are, but docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes)


if __name__ == "__main__":
    main(*sys.argv[1:])
