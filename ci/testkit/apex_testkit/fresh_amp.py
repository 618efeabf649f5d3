"""Takes back what a test has told amp, whose state is one for the whole process."""

import pytest
import torch


def reset_amp():
    """Casts are off, and no model, optimizer or scale is remembered."""
    from apex.amp._amp_state import AmpState, _amp_state  # not every package's tests have amp

    if hasattr(_amp_state, "handle"):
        _amp_state.handle._deactivate()
    _amp_state.__dict__.clear()
    _amp_state.__dict__.update(AmpState().__dict__)


@pytest.fixture(autouse=True)
def fresh_amp():
    """For every test of a module or conftest that imports it."""
    yield
    reset_amp()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
