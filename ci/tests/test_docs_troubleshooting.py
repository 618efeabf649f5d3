"""docs/troubleshooting.md has every text of the part that loads kernels, and no other."""

import ast
import re

import pytest

from ci.workspace import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TITLES = re.findall(r"^### `(.*?)`$", PAGE, re.M)
LOADER = ROOT / "shared_csrc" / "native"
OF_OTHERS = {
    "ModuleNotFoundError: No module named 'torch'",
    "No module named 'fused_weight_gradient_mlp_cuda'",
    # megatron-core's; ci/clients/test_megatron_gpt.py has it raised.
    "ColumnParallelLinear was called with gradient_accumulation_fusion set to True but the custom "
    "CUDA extension fused_weight_gradient_mlp_cuda module is not found",
}


def text_of(node: ast.expr) -> str:
    """The words of a string; `...` where it is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "..."


def texts(file) -> list[str]:
    tree = ast.parse(file.read_text())
    kinds = (ast.Constant, ast.JoinedStr)
    return [" ".join(text_of(node).split()) for node in ast.walk(tree) if isinstance(node, kinds)]


NAMESPACE = ROOT / "shared_csrc" / "namespace" / "__init__.py"
TEXTS = [text for file in (*LOADER.glob("*.py"), NAMESPACE) for text in texts(file)]


def has(text: str, title: str) -> bool:
    """Whether the parts of a title occur in a text, in their order."""
    return re.search(".*?".join(map(re.escape, re.split(r"\s*\.\.\.\s*", title))), text) is not None


# Words of titles that are filled in, in our texts.
FILLED_IN = (
    (r"nvcc (?=was)", "... "),
    (r"(?<=no )cuda(?= kernel)", "..."),
    (r"(NVRTC|HIPRTC|NVIDIA's driver) (?=(\.\.\. did|cannot) )", "... "),
    (r"(?<=of )(NVIDIA's driver|AMD's runtime)(?= failed)", "..."),
    (r"nvrtc or nvcc", "... or ..."),
)


def with_dots(title: str) -> str:
    for words, dots in FILLED_IN:
        title = re.sub(words, dots, title)
    return title


@pytest.mark.parametrize("title", [t for t in TITLES if t not in OF_OTHERS])
def test_every_title_is_a_text_of_ours(title):
    assert any(has(text, with_dots(title)) for text in TEXTS)


LOADERS = ("jit", "library", "toolchain", "trust", "build", "prebuilt", "rtc", "nvrtc", "hiprtc")
LOADERS += ("rtc_compiler", "drivers")


def raised() -> list[str]:
    """What `raise BuildError(...)` says in the modules that load and compile."""
    found = []
    for name in LOADERS:
        for node in ast.walk(ast.parse((LOADER / f"{name}.py").read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                if getattr(call.func, "id", "") == "BuildError" and call.args:
                    found.append(" ".join(text_of(call.args[0]).split()))
    return [text for text in found if re.search(r"[a-z]{4}", text)]


# Of an unfinished op in a checkout, which its author sees.
FOR_AUTHORS = ("Two ops are called", "is not a kernel", "No op", "...: expected a compute")
FOR_AUTHORS += ("the kernel ... cannot be named", "...: ...... failed: ....")
# Another library is tried then.
FOR_AUTHORS += ("... is not HIPRTC: it has no", "...: hipRuntimeGetVersion failed with")


@pytest.mark.parametrize("text", raised())
def test_every_text_of_ours_has_a_title(text):
    if not text.startswith(FOR_AUTHORS):
        assert any(has(text, with_dots(title)) for title in TITLES)
