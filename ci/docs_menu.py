"""The menu of the site: ops by purpose, guides by reader, modules by package.

A page of a known folder that no list names comes last in its part; a page of another folder is an
error.
"""

import json
import re
from pathlib import Path

from ci.workspace import PACKAGES

OPS = {
    "Optimizers": [
        "optimizers/*",
        "contrib/clip_grad",
        "contrib/fused_adam_swa",
        "contrib/distributed_fused_*",
        "contrib/deprecated_optimizers",
    ],
    "Normalization": [
        "normalization/*",
        "contrib/layer_norm",
        "contrib/group_norm",
        "contrib/groupbn",
    ],
    "Losses": [
        "contrib/xentropy",
        "contrib/linear_cross_entropy",
        "contrib/focal_loss",
        "contrib/transducer",
    ],
    "Attention": [
        "transformer/fused_softmax",
        "transformer/fused_rope",
        "contrib/multihead_attn",
        "contrib/fmha",
        "contrib/openfold_triton",
    ],
    "Dense layers and convolutions": [
        "contrib/fused_dense",
        "contrib/mlp",
        "contrib/fused_bias_swiglu",
        "contrib/conv_bias_relu",
        "contrib/bottleneck",
    ],
    "Several processes": ["parallel/*", "transformer/*"],
    "Other ops": ["contrib/*"],
}
GUIDES = {
    "Moving to Apex": ["guides/coming-from-apex", "guides/moving-*"],
    "Other projects": [
        "guides/megatron",
        "guides/transformers",
        "guides/lightning",
        "guides/clients",
    ],
    "Training": ["guides/several-hosts", "guides/batch-invariance"],
    "GPUs and clusters": ["guides/gpu-wheels", "guides/rocm", "guides/images"],
    "Working on Apex": ["guides/add-an-op", "guides/shared-kernels", "guides/*"],
}


def menu(pages: Path) -> list:
    """Return mkdocs' ``nav``.

    Raises:
        ValueError: a page is in no part.
    """
    packages = [{p: f"packages/{p}.md"} for p in PACKAGES]
    home = ["index.md", "quickstart.md", {"Packages": packages}, "supported.md"]
    modules = [page for page in listed(pages, "api/*") if page != "api/README.md"]
    parts: list = [
        {"Home": [*home, "troubleshooting.md"]},
        {"Ops": ["ops.md", *grouped(pages, OPS)]},
        {"Examples": listed(pages, "examples/**/*")},
        {"Guides": grouped(pages, GUIDES)},
        {"API": ["api/README.md", *by_package(modules)]},
        {"Benchmarks": benchmarks(pages)},
        {"Changes": listed(pages, "changes/*")},
    ]
    text = json.dumps(parts)
    for page in pages.rglob("*.md"):
        name = page.relative_to(pages)
        if f'"{name.as_posix()}"' not in text:
            raise ValueError(f"{name}: is in no part of the site; see ci/docs_menu.py")
    return parts


def listed(pages: Path, pattern: str) -> list[str]:
    """Return the pages that match, an overview before the others."""
    found = pages.glob(f"{pattern}.md")
    ordered = sorted(found, key=lambda f: (f.parent, f.stem != "README", f.stem))
    return [f.relative_to(pages).as_posix() for f in ordered]


def grouped(pages: Path, groups: dict[str, list[str]]) -> list[dict[str, list[str]]]:
    """Return the pages of each group; a page that several patterns match is in the first group."""
    taken: dict[str, str] = {}
    for title, patterns in groups.items():
        for page in (page for pattern in patterns for page in listed(pages, pattern)):
            taken.setdefault(page, title)
    members = {title: [p for p in taken if taken[p] == title] for title in groups}
    return [{title: found} for title, found in members.items() if found]


def by_package(files: list[str]) -> list[dict[str, list[dict[str, str]]]]:
    """The pages of modules below the names that users import from, which titles do not repeat."""
    groups: dict[str, list[dict[str, str]]] = {}
    for file in files:
        name = Path(file).stem
        parts = name.split(".")
        group = ".".join(parts[:2]) if parts[0] == "apex" else "Apex's extension modules"
        groups.setdefault(group, []).append({name.removeprefix(f"{group}."): file})
    # Users import from `apex`; the extension modules are for code that calls them by name.
    return [{group: groups[group]} for group in sorted(groups, key=lambda g: g[0] == "A")]


def benchmarks(pages: Path) -> list:
    """The overview, then each GPU, then the CPU's benchmarks."""
    names = listed(pages, "benchmarks/*")
    gpus = [page for page in names if re.search(r"/(nvidia|amd|gpu)-", page)]
    rest = [page for page in names if page not in gpus and not page.endswith("/README.md")]
    parts = [{"GPUs": gpus}, {"CPU": rest}]
    return ["benchmarks/README.md"] * (len(names) > len(gpus) + len(rest)) + [
        part for part in parts if all(part.values())
    ]


def overview(pages: Path) -> str:
    """Return a page of all ops by purpose, each with the first sentence of its page."""
    lines = ["# Ops by purpose", ""]
    for group in grouped(pages, OPS):
        for title, files in group.items():
            lines += [f"## {title}", ""]
            lines += [one_line(pages, file) for file in files]
            lines.append("")
    return "\n".join(lines)


def one_line(pages: Path, file: str) -> str:
    title, _, rest = (pages / file).read_text().removeprefix("# ").partition("\n")
    prose = re.sub(r"```.*?```|\$\$.*?\$\$", "", rest, flags=re.S)
    text = " ".join(prose.strip().partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:;])\s", text)[0].rstrip(".:;")
    # Links of the sentence are relative to its page.
    sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return f"- [{title}]({file}): {sentence}"
