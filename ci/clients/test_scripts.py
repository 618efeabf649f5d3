"""What scripts of Apex's days do: amp.initialize twice in a process, as GANs did, and old calls."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex import amp
from apex.fp16_utils import to_python_float
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from apex.parallel.LARC import LARC

STEPS = 80


@pytest.fixture(autouse=True)
def _amp_ends():
    yield
    amp._amp_state.handle._deactivate()


def generator():
    return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def discriminator():
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def scaled_backward(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def losses_of(net_d, real, fake):
    """BCE as scripts had it: a sigmoid, then a loss that must see float32."""
    probabilities = [torch.sigmoid(net_d(x)).float() for x in (real, fake)]
    ones, zeros = (f(len(real), 1) for f in (torch.ones, torch.zeros))
    return sum(
        -(t * p.clamp(1e-6).log() + (1 - t) * (1 - p).clamp(1e-6).log()).mean()
        for p, t in zip(probabilities, (ones, zeros), strict=True)
    )


@pytest.mark.parametrize("levels", [("O1", "O1"), ("O2", "O2"), ("O1", "O2"), ("O4", "O5")])
def test_gan_with_two_initializations(levels):
    """Each pair of model and optimizer in a call of its own; options of the last call hold."""
    torch.manual_seed(0)
    amp.register_float_function(torch, "sigmoid")
    nets, optimizers = [generator(), discriminator()], []
    for i, level in enumerate(levels):
        optimizer = torch.optim.Adam(nets[i].parameters(), lr=0.01, betas=(0.5, 0.999))
        nets[i], optimizer = amp.initialize(
            models=nets[i],
            optimizers=optimizer,
            opt_level=level,
            keep_batchnorm_fp32=True if level == "O2" else None,
            loss_scale="dynamic",
            verbosity=0,
        )
        optimizers.append(optimizer)
    (net_g, net_d), (optimizer_g, optimizer_d) = nets, optimizers
    centre = torch.tensor([2.0, -1.0])
    for _ in range(STEPS):
        real = centre + 0.1 * torch.randn(32, 2)
        fake = net_g(torch.randn(32, 4)).float()
        optimizer_d.zero_grad()
        scaled_backward(losses_of(net_d, real, fake.detach()), optimizer_d)
        optimizer_d.step()
        optimizer_g.zero_grad()
        scaled_backward(F.softplus(-net_d(fake).float()).mean(), optimizer_g)
        optimizer_g.step()
    assert to_python_float(torch.tensor([2.5])) == 2.5
    samples = net_g(torch.randn(256, 4)).float().detach()
    assert samples.isfinite().all()
    assert (samples.mean(0) - centre).norm() < 1.2  # from 2.2 at the start
    assert 1 < amp.state_dict()["loss_scaler0"]["loss_scale"] <= 2.0**24


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.usefixtures("one_process")
def test_recipe_of_imagenet_scripts(level):
    """convert_syncbn_model, LARC, initialize, DistributedDataParallel(delay_allreduce=True)."""
    torch.manual_seed(0)
    model = convert_syncbn_model(generator())
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model = DistributedDataParallel(model, delay_allreduce=True)
    x, y = torch.randn(64, 4), torch.randn(64, 2)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaled_backward(loss, optimizer)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 10.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
