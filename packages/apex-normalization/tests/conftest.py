"""A fixture for tests that are about our kernels of layer norm, at sizes that go to torch's."""

import pytest

from apex.normalization.fused_layer_norm import native


@pytest.fixture
def our_kernels(monkeypatch):
    """Our kernels serve every size, as they do beyond ``native.ELEMENTS``."""
    monkeypatch.setattr(native, "ELEMENTS", 0)
