"""Scaffold an op: a folder with kernel and Python, a test and a benchmark, from ci/template/op.

python ci/new_op.py [PACKAGE NAME]     asks for what is not given
"""

import keyword
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci.workspace import PACKAGES, ROOT

TEMPLATE = ROOT / "ci" / "template" / "op"
OP, MAIN = "{op}", "{main}"
# Template file: where it goes in the package.
DESTINATIONS = {
    "my_op.h": f"src/apex/{MAIN}/{OP}/{OP}.h",
    "my_op.cpp": f"src/apex/{MAIN}/{OP}/{OP}.cpp",
    "__init__.py": f"src/apex/{MAIN}/{OP}/__init__.py",
    "test.py": f"tests/test_{OP}.py",
    "bench.py": f"benchmarks/bench_{OP}.py",
}


def main(arguments: list[str]) -> int:
    if len(arguments) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    given = dict(zip(("package", "op"), arguments, strict=False))
    package = given.get("package") or ask(f"Package ({', '.join(PACKAGES)})", package_problem)
    op = given.get("op") or ask(
        "Name of the op, such as row_center", lambda n: op_problem(package, n)
    )
    problem = package_problem(package) or op_problem(package, op)
    if problem:
        print(f"new_op: {problem}", file=sys.stderr)
        return 1
    files = scaffold(package, op)
    tidy(files)
    print("\n".join(f"wrote {file.relative_to(ROOT)}" for file in files))
    print(
        f"\nNow write the formula in {op}.h, and the oracle that says whether it is right:\n"
        f"    python -m pytest packages/{package}/tests/test_{op}.py -x"
    )
    return 0


def ask(question: str, problem_of) -> str:
    """Ask until the answer has no problem."""
    while True:
        try:
            answer = input(f"{question}: ").strip()
        except EOFError:
            sys.exit("\nnew_op: no answer; give the names: nox -s new_op -- PACKAGE NAME")
        problem = problem_of(answer)
        if problem is None:
            return answer
        print(problem)


def package_problem(package: str) -> str | None:
    if package in PACKAGES:
        return None
    return f"the package must be one of {', '.join(PACKAGES)}; got {package!r}"


def op_problem(package: str, op: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", op) or keyword.iskeyword(op):
        return f"the name must be lower case words joined by underscores; got {op!r}"
    for file in destinations(package, op).values():
        if file.exists():
            return f"{file.relative_to(ROOT)} is there already; choose another name"
    # One library holds all ops of a package, so their names must differ wherever they lie.
    for source in (ROOT / "packages" / package / "src").rglob(f"{op}.cpp"):
        return f"{source.relative_to(ROOT)} is an op of that name already; choose another one"
    return None


def destinations(package: str, op: str) -> dict[Path, Path]:
    """Return where each template file goes."""
    names = {"main": package.removeprefix("apex-"), "op": op}
    folder = ROOT / "packages" / package
    return {TEMPLATE / t: folder / d.format(**names) for t, d in DESTINATIONS.items()}


def scaffold(package: str, op: str) -> list[Path]:
    """Write the op's files, and return them."""
    camel = "".join(word.capitalize() for word in op.split("_"))
    replacements = {"my_package": package.removeprefix("apex-"), "my_op": op, "MyOp": camel}
    targets = destinations(package, op)
    for source, target in targets.items():
        text = source.read_text()
        for old, new in replacements.items():
            text = text.replace(old, new)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return list(targets.values())


def tidy(files: list[Path]) -> None:
    """Format the files as lint wants them: a long name moves line breaks and import order."""
    python = [str(f) for f in files if f.suffix == ".py"]
    others = [str(f) for f in files if f.suffix != ".py"]
    subprocess.run(["ruff", "check", "--quiet", "--select", "I", "--fix", *python], check=True)
    subprocess.run(["ruff", "format", "--quiet", *python], check=True)
    subprocess.run(["clang-format", "-i", *others], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
