"""amp.initialize: the number of losses, and loss scales that make no sense."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state


def init(model, **kwargs):
    return amp.initialize(model, verbosity=0, **kwargs)


def test_no_losses_to_scale():
    """A model whose losses others scale is initialized beside one whose losses amp scales."""
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), num_losses=0, verbosity=0
    )
    assert _amp_state.loss_scalers == []
    assert amp.state_dict() == {}
    with (
        pytest.raises(ValueError, match=r"loss_id must be an int in \[0, 0\)"),
        amp.scale_loss(model(torch.ones(2, 2)).sum(), optimizer),
    ):
        pass
    with pytest.raises(ValueError, match="num_losses must be an int >= 0, got -1"):
        init(nn.Linear(2, 2), num_losses=-1)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_o0_warns_of_a_loss_scale(loss_scale, recwarn):
    init(nn.Linear(2, 2), opt_level="O0", loss_scale=1.0)
    init(nn.Linear(2, 2), opt_level="O1", loss_scale=loss_scale)
    assert not [w for w in recwarn if "loss_scale" in str(w.message)]
    with pytest.warns(UserWarning, match=f"loss_scale={loss_scale} at opt_level O0") as found:
        init(nn.Linear(2, 2), opt_level="O0", loss_scale=loss_scale)
    assert found[0].filename == __file__
