"""Make variants of ops by core/gpu_shapes.h, for `python ci/gpu.py --campaign` to measure.

python ci/campaign.py [ARCHIVE] [ENGINE...]

ci/campaign.toml lists engines, the ops that stand for each, and variants of its numbers. Each
variant's headers, and the host's half of its ops, which takes a C++ compiler and seconds, go into
one archive, dist/campaign.tar.xz. It travels with the checkout to the machine with the GPU, where
NVRTC compiles the kernels that are measured. What is compiled here is kept in .nox/campaign.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared_csrc"), str(ROOT)]

from native import prebuilt, toolchain  # noqa: E402
from native.build import build, find_ops, headers_digest  # noqa: E402
from native.errors import BuildError  # noqa: E402
from native.targets import Target  # noqa: E402

from ci.workspace import ops as packages_of_ops  # noqa: E402
from ci.workspace import tomllib  # noqa: E402

LIST = ROOT / "ci" / "campaign.toml"
WORK = ROOT / ".nox" / "campaign"
ARCHIVE = ROOT / "dist" / "campaign.tar.xz"
PLAN = "campaign.json"  # in the archive: what each folder is
TARGET = Target(toolchain.RTC)
SHAPES = "apex/core/gpu_shapes.h"
NUMBER = re.compile(r"^inline constexpr \w+ (k\w+) = (\w+);", re.MULTILINE)


class CampaignError(ValueError):
    """What is wrong with ci/campaign.toml, and what is expected; or a variant that is no C++."""


@dataclass(frozen=True)
class Variant:
    """An engine's ops, compiled with other numbers; none: as they are."""

    engine: str
    number: int
    ops: tuple[str, ...]
    constants: dict[str, int | bool] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.engine}-{self.number}"


def variants_of(listed: dict) -> Iterator[Variant]:
    """Yield each engine's variants; the first is the numbers as they are.

    Raises:
        CampaignError: an op or a number is not there, or a variant changes nothing.
    """
    here, known = numbers(), packages_of_ops()
    for engine in listed["engine"]:
        where = f"ci/campaign.toml: {engine['name']}"
        for op in engine["ops"]:
            if op not in known:
                raise CampaignError(f"{where}: there is no op {op}")
        seen = [{}]
        for constants in engine["variants"]:
            for name, value in constants.items():
                if name not in here:
                    expected = ", ".join(here)
                    raise CampaignError(f"{where}: {SHAPES} has no {name}; it has {expected}")
                if text_of(value) == here[name]:
                    raise CampaignError(f"{where}: {name} is {here[name]} already")
            if constants in seen:
                raise CampaignError(f"{where}: {constants} is listed twice")
            seen.append(constants)
        for number, constants in enumerate(seen):
            yield Variant(engine["name"], number, tuple(engine["ops"]), constants)


def numbers() -> dict[str, str]:
    """Return what core/gpu_shapes.h says, by name."""
    return dict(NUMBER.findall((toolchain.INCLUDE / SHAPES).read_text()))


def text_of(value: int | bool) -> str:
    return str(value).lower()


def write_headers(variant: Variant, folder: Path) -> Path:
    """Write the header with a variant's numbers; return the folder that compilers look into."""

    def changed(match: re.Match) -> str:
        if match[1] not in variant.constants:
            return match[0]
        return match[0].replace(f"= {match[2]};", f"= {text_of(variant.constants[match[1]])};")

    text = NUMBER.sub(changed, (toolchain.INCLUDE / SHAPES).read_text())
    header = folder / SHAPES
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.is_file() or header.read_text() != text:  # else ninja would compile again
        header.write_text(text)
    return folder


def compile_variant(variant: Variant, work: Path, output: Path) -> None:
    """Build the host's half of a variant's ops below ``work``; put what travels below ``output``.

    The variant's headers travel, and its libraries, in the folders that a wheel has them in.

    Raises:
        CampaignError: a library does not compile.
    """
    known = packages_of_ops()
    headers = write_headers(variant, work / variant.folder / "include")
    shutil.copytree(headers, output / variant.folder / "include")
    for package in sorted({known[op] for op in variant.ops}):
        ops = [op for op in find_ops(ROOT / "packages" / package / "src") if op.name in variant.ops]
        options = {"package": package, "portable": True, "headers": headers}
        try:
            built = build(ops, [TARGET], work / variant.folder / package, **options)[TARGET]
        except BuildError as error:
            raise CampaignError(f"{variant.engine}, {variant.constants}: {error}") from error
        main = output / variant.folder / "apex" / package.removeprefix("apex-")
        kernels = main / "_kernels"
        kernels.mkdir(parents=True)
        shutil.copy(built, kernels)
        manifest = {"libraries": [prebuilt._entry(TARGET, ops)]}
        (kernels / "manifest.json").write_text(json.dumps(manifest))


def compile_all(variants: list[Variant], work: Path) -> Path:
    """Compile side by side; return the folder of what travels, with the plan in it."""
    output = work / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    os.environ.setdefault("MAX_JOBS", "1")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for variant, _ in zip(
            variants,
            pool.map(lambda v: compile_variant(v, work, output), variants),
            strict=True,
        ):
            print(f"{variant.folder}: {variant.constants or 'as it is'}", flush=True)
    listed = [vars(v) | {"folder": v.folder} for v in variants]
    plan = {"sources": sources_digest(), "variants": listed}
    (output / PLAN).write_text(json.dumps(plan, indent=1))
    return output


def sources_digest() -> str:
    """Identify headers and ops: both halves of a kernel must come from the same."""
    state = hashlib.sha256(headers_digest().encode())
    for file in sorted(p for end in ("cpp", "h") for p in ROOT.glob(f"packages/*/src/**/*.{end}")):
        if "_shared" not in file.parts:
            state.update(file.name.encode() + file.read_bytes())
    return state.hexdigest()[:16]


def pack(output: Path, archive: Path) -> None:
    """Pack what travels into one file."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(shutil.make_archive(str(output), "xztar", output), archive)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def main(arguments: list[str]) -> None:
    archive = Path(arguments.pop(0)) if arguments and "." in arguments[0] else ARCHIVE
    listed = tomllib.loads(LIST.read_text())
    names = [engine["name"] for engine in listed["engine"]]
    if unknown := [name for name in arguments if name not in names]:
        raise CampaignError(f"there is no engine {unknown[0]}; expected some of {', '.join(names)}")
    variants = [v for v in variants_of(listed) if v.engine in (arguments or names)]
    pack(compile_all(variants, WORK), archive)


if __name__ == "__main__":
    main(sys.argv[1:])
