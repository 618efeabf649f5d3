"""Every test of amp starts and ends without amp's process-wide state."""

import pytest
import torch

from apex.amp import _amp_state
from apex.amp._amp_state import AmpState


@pytest.fixture(autouse=True)
def _fresh_amp():
    yield
    if hasattr(_amp_state, "handle"):
        _amp_state.handle._deactivate()
    _amp_state.__dict__.clear()
    _amp_state.__dict__.update(AmpState().__dict__)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
