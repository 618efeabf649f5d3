"""opcheck_samples and assert_compiles catch ops and functions that torch cannot trace."""

import pytest
import torch

from apex_testkit import LAYOUTS, assert_compiles, opcheck_samples
from apex_testkit.grids import channels_last


@pytest.fixture(scope="module")
def ops():
    library = torch.library.Library("apex_testkit_test", "FRAGMENT")
    for name, fake in [
        ("good", torch.empty_like),
        ("wrong_fake", lambda x: torch.empty_like(x) if x.dim() == 2 else x.new_empty(1)),
        ("alias", torch.empty_like),
    ]:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, (lambda x: x) if name == "alias" else (lambda x: x * 2), "CPU")
        torch.library.register_fake(f"apex_testkit_test::{name}", fake, lib=library)
    yield torch.ops.apex_testkit_test
    library._destroy()


def test_opcheck_samples(ops):
    x = torch.randn(3)
    opcheck_samples(ops.good.default, [(x,), {"x": torch.empty(0)}])
    with pytest.raises(AssertionError, match=r"sample 1 \(float32\[3\]\)"):
        opcheck_samples(ops.wrong_fake.default, [(torch.randn(1, 1),), (x,)])


def test_opcheck_catches_aliases(ops):
    with pytest.raises(AssertionError):
        opcheck_samples(ops.alias.default, [(torch.randn(3),)])


def test_opcheck_needs_samples(ops):
    with pytest.raises(ValueError, match="no sample"):
        opcheck_samples(ops.good.default, [])


def test_assert_compiles():
    x = torch.randn(4, requires_grad=True)
    assert_compiles(lambda x: (x * 2, x.detach()), x, backend="aot_eager")


def test_assert_compiles_catches_graph_breaks():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        assert_compiles(breaks, torch.randn(4), backend="eager")


def test_assert_compiles_catches_other_results():
    def depends(x):
        return x + 1 if torch.compiler.is_compiling() else x + 2

    with pytest.raises(AssertionError):
        assert_compiles(depends, torch.randn(4), backend="eager")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 4), (2, 3, 5)], ids=str)
def test_layouts_keep_values(layout, shape):
    x = torch.randn(shape)
    assert torch.equal(layout(x), x)
    if x.numel() > 1 and layout is not LAYOUTS["contiguous"]:
        y = layout(x)
        assert not y.is_contiguous() or y.storage_offset() > 0


def test_channels_last():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(channels_last(x), x)
    assert channels_last(x).stride(1) == 1
    with pytest.raises(ValueError, match=r"got \[2, 3\]"):
        channels_last(torch.ones(2, 3))
