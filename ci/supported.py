"""What is supported, as ci/matrix.toml has it: for docs/supported.md, the README and the doctor.

`nox -s lint` checks them, `nox -s lint -- --fix` writes them.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci.workspace import MATRIX, ROOT, torches_of

SENTENCE = re.compile(r"One wheel serves torch .*?(?=, because)", re.S)
PAGE = "docs/supported.md"
TESTED = re.compile(r"^TESTED = .*$", re.M)
DOCTOR = "shared_csrc/native/doctor_torch.py"

THREADS = """\
## Threads

On every Python, with a GIL or without:

- Operators may run in any number of threads at once. The first call of an operator loads its
  kernels; other threads that call it wait. torch has no lock between the registration of kernels
  and a call of the same operator that is dispatched in that very moment. To exclude this, call each
  operator once before threads start.
- A model, an optimizer and a loss scaler (`loss_id` of `amp.scale_loss`) belong to one thread at a
  time. Different ones may train in different threads.
- One thread sets up what the whole process shares, before others train: `amp.initialize`,
  `parallel_state.initialize_model_parallel`, `ASP`, the backend of `torchsched`. The casts of O1
  and O4 apply to calls of initialized models in all threads, and to other code only in the thread
  that called `amp.initialize`.
- One thread of each process makes the calls that talk to other processes
  (`DistributedDataParallel`, sharded optimizers, pipelines): all processes need the same order.
"""


def minor(version: str) -> str:
    """``"2.14.1"`` as ``"2.14"``."""
    return ".".join(version.split(".")[:2])


def sentence() -> str:
    """The README's sentence, from its first word to the comma."""
    torches, pythons = MATRIX["torch"]["versions"], MATRIX["pythons"]
    text = f"One wheel serves torch {minor(torches[0])} to {minor(torches[-1])} and Python "
    text += f"{pythons[0]} to {pythons[-1]}"
    said = []
    for verb, end in (("ends", -1), ("begins", 0)):
        found = {p: torches_of(p)[end] for p in pythons}
        said += [
            f"{verb} with {minor(t)} on Python {p}" for p, t in found.items() if t != torches[end]
        ]
    return f"{text} (torch itself {' and '.join(said)})" if said else text


def tested() -> str:
    """The doctor's line: the oldest and the newest torch."""
    torches = MATRIX["torch"]["versions"]
    return f'TESTED = ("{minor(torches[0])}", "{minor(torches[-1])}")'


def page() -> str:
    """The page of supported versions."""
    versions = ", ".join(MATRIX["torch"]["versions"])
    oldest = minor(MATRIX["torch"]["versions"][0])
    ends = {p: (torches_of(p)[0], torches_of(p)[-1]) for p in MATRIX["pythons"]}
    rows = "\n".join(
        f"| {p} | {' to '.join(dict.fromkeys(map(minor, both)))} |" for p, both in ends.items()
    )
    return f"""# Supported versions

{sentence()}.

| Python | torch |
|---|---|
{rows}

- **Tested in CI**: the same wheels on torch {versions}. They are compiled against torch
  {MATRIX["torch"]["build"]}, and use nothing that is younger than torch {oldest}.
- **Without a GIL** (Python {", ".join(MATRIX["free_threaded"])}): experimental, and not run yet.
  torch has wheels for it. Ours have no extension module of Python, which could switch the GIL on:
  kernels are libraries that torch loads. Tests with threads run on every Python. CI has a run of
  all packages' tests for it, and skips that run where it finds no such Python.
- **Systems**: Linux on x86-64 and arm64, with glibc 2.28 or later, as torch itself.
- **C++ compilers**, where kernels are compiled at their first use: {_compilers()} or later.
- **NVIDIA GPUs**: CI compiles every op for {", ".join(MATRIX["cuda"]["archs"])}, with the toolkit
  {MATRIX["cuda"]["toolkit"]}, and every kernel by NVRTC {_nvrtcs()}, the oldest and the newest that
  a supported torch brings. **AMD GPUs**: for {", ".join(MATRIX["hip"]["archs"])};
  at each commit for those that the hipcc at hand knows, for all each night. What has been run on
  real cards stands [here](index.md#what-runs-where).

{THREADS}
## What you can rely on

The six newest minor releases of torch are supported. The oldest one is given up only in a minor
release of a package, and the release before announces it. A new torch is tested within a week: a
workflow looks for it and opens a pull request with the tests' results. Pythons are those that the
newest torch supports, and {MATRIX["pythons"][0]} as long as a supported torch has it.
"""


def _nvrtcs() -> str:
    return " and ".join(minor(r.partition("==")[2]) for r in MATRIX["cuda"]["nvrtc"][:2])


def _compilers() -> str:
    names = (re.fullmatch(r"([a-z+]+)-(\d+)", each) for each in MATRIX["cpu"]["compilers"])
    return ", ".join(f"{match[1]} {match[2]}" for match in names if match)


def complaints(root: Path) -> Iterator[str]:
    """What in the documents is not as the matrix has it."""
    if not (root / PAGE).is_file() or (root / PAGE).read_text() != page():
        yield f"{PAGE}: is not what ci/matrix.toml says; `nox -s lint -- --fix` writes it"
    found = SENTENCE.search((root / "README.md").read_text())
    if found is None or " ".join(found[0].split()) != sentence():
        yield f"README.md: expected the sentence {sentence()!r}; `nox -s lint -- --fix` writes it"
    found = TESTED.search((root / DOCTOR).read_text())
    if found is None or found[0] != tested():
        yield f"{DOCTOR}: expected the line `{tested()}`; `nox -s lint -- --fix` writes it"


def main() -> None:
    (ROOT / PAGE).write_text(page())
    if list(complaints(ROOT)):
        for name, pattern, text in (
            ("README.md", SENTENCE, sentence()),
            (DOCTOR, TESTED, tested()),
        ):
            file = ROOT / name
            file.write_text(pattern.sub(text, file.read_text(), count=1))


if __name__ == "__main__":
    main()
