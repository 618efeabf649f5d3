"""Text to train on, without a network: the docstrings of the installed Python, byte by byte."""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

END = b"\0"  # of a docstring
SHORTEST = 200  # bytes of a docstring that is worth reading
HELD_OUT = 0.05  # of the text, its end, for validation


def docstrings() -> Iterator[bytes]:
    """The docstrings of the standard library, then of the installed packages, in order of path."""
    paths = sysconfig.get_paths()
    for folder in map(Path, (paths["stdlib"], paths["purelib"])):
        files = (
            f for f in folder.rglob("*.py") if "site-packages" not in f.relative_to(folder).parts
        )
        for file in sorted(files):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old code's escapes
                try:
                    tree = ast.parse(file.read_bytes())
                except (SyntaxError, ValueError):
                    continue  # tests of parsers, files of other versions
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            for node in ast.walk(tree):
                text = ast.get_docstring(node) if isinstance(node, kinds) else None
                if text and len(data := text.encode(errors="ignore")) >= SHORTEST:
                    yield data


def gather(limit: int) -> bytes:
    """At most ``limit`` bytes of docstrings, each once, each with END behind it."""
    found, seen = bytearray(), set()
    for text in docstrings():
        if text not in seen:
            seen.add(text)
            found += text + END
        if len(found) >= limit:
            break
    return bytes(found[:limit])


class Text:
    """The bytes of a text as tokens; batches depend on the step alone, not on the ranks.

    ``file`` keeps what was gathered, at most ``limit`` bytes. It is written once, by rank 0.
    """

    def __init__(self, file: Path, sequence: int) -> None:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        held_out = int(len(data) * HELD_OUT)
        self.parts = {"train": data[:-held_out], "validation": data[-held_out:]}
        self.sequence = sequence
        if min(map(len, self.parts.values())) <= sequence:
            raise SystemExit(
                f"--text-bytes: {len(data)} bytes are too few for sequences of {sequence}: "
                f"the last {HELD_OUT:.0%} must be longer than one"
            )

    def batch(self, part: str, step: int, rows: int) -> Tensor:
        """``[rows, sequence + 1]`` int64, from places that ``part`` and ``step`` determine."""
        data = self.parts[part]
        seed = 2 * step + (part == "validation")
        places = torch.randint(
            len(data) - self.sequence, (rows,), generator=torch.Generator().manual_seed(seed)
        )
        return data[places[:, None] + torch.arange(self.sequence + 1)].long()


def write_text(file: Path, limit: int) -> None:
    """Gather the text into ``file``, unless it is there: packages may have changed since then."""
    if file.exists():
        return
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(gather(limit))
    partial.replace(file)
