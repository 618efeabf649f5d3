"""A training-loop library of Apex's days: models say how to get a loss, the loop does the rest.

In one process the loop has amp alone. Over several it wraps the model in a class that derives from
Apex's DistributedDataParallel and from a base of its own, whose constructor takes arguments.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from apex import amp
from apex.parallel import DistributedDataParallel

ROWS, BATCH, EPOCHS = 64, 16, 12
METHODS = ("get_loss", "get_loss_eval", "get_predictions")


class Classifier(nn.Module):
    """What the library asks of a model: three functions of a batch beside ``forward``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)

    def get_loss(self, batch, criterion, device):
        x, labels = (part.to(device) for part in batch)
        return criterion(self(x).float(), labels)

    def get_loss_eval(self, batch, criterion, device):
        return self.get_loss(batch, criterion, device)

    def get_predictions(self, batch, device):
        x, labels = (part.to(device) for part in batch)
        return self(x).argmax(-1).cpu(), labels.cpu(), {}


class TakenMethods:
    """Takes a model's methods; they find the wrapper where they say ``self``."""

    def __init__(self, module, names=METHODS):
        self.taken = {name: getattr(type(module), name) for name in names}


class LoopDDP(DistributedDataParallel, TakenMethods):
    def __init__(self, module, names=METHODS, **options):
        DistributedDataParallel.__init__(self, module, **options)
        TakenMethods.__init__(self, module, names)

    def get_loss(self, *given):
        return self.taken["get_loss"](self, *given)

    def get_loss_eval(self, *given):
        return self.taken["get_loss_eval"](self, *given)

    def get_predictions(self, *given):
        return self.taken["get_predictions"](self, *given)


class TrainLoop:
    def __init__(self, model, loader, optimizer, criterion, amp_options, wraps, clip=None):
        self.model, self.optimizer = amp.initialize(model, optimizer, **amp_options, verbosity=0)
        if wraps:
            self.model = LoopDDP(self.model)
        self.loader, self.criterion, self.clip = loader, criterion, clip
        self.device, self.history = torch.device("cpu"), []

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                loss = self.model.get_loss(batch, self.criterion, self.device)
                with amp.scale_loss(loss, self.optimizer) as scaled:
                    scaled.backward()
                if self.clip:
                    nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.history.append(self.evaluate())

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = [self.model.get_loss_eval(b, self.criterion, self.device) for b in self.loader]
        mean = torch.stack(losses).mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean.item()

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        found = [self.model.get_predictions(batch, self.device)[:2] for batch in self.loader]
        predicted, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        return (predicted == labels).float().mean().item()


def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % 3
    centres = 2 * torch.randn(3, 4, generator=generator)
    return TensorDataset(centres[labels] + torch.randn(ROWS, 4, generator=generator) / 2, labels)


def fitted(level, world=1, rank=0, loss_scale=1024.0):
    """A fixed scale: with a dynamic one, sums over ranks overflow before their parts do."""
    torch.manual_seed(0)
    model, rows = Classifier(), data()
    if world > 1:
        sampler = DistributedSampler(rows, world, rank, shuffle=False)
        loader = DataLoader(rows, BATCH // world, sampler=sampler)
    else:
        loader = DataLoader(rows, BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options = {"opt_level": level, "loss_scale": loss_scale}
    loop = TrainLoop(model, loader, optimizer, F.cross_entropy, options, world > 1, clip=5.0)
    try:
        loop.fit(EPOCHS)
        accuracy = loop.accuracy()
    finally:
        amp._amp_state.handle._deactivate()
    return loop, accuracy


def check_levels(rank, world):
    """A process's half of each batch and the average: the same steps as of the whole batch."""
    for level in ("O0", "O1", "O2"):
        loop, accuracy = fitted(level, world, rank)
        assert loop.model.taken.keys() == set(METHODS)
        assert accuracy > 0.9
        every = [None] * world
        dist.all_gather_object(every, loop.history)
        assert every == [loop.history] * world
        alone, _ = fitted(level)
        tolerance = 1e-5 if level == "O0" else 5e-3
        torch.testing.assert_close(loop.history, alone.history, rtol=tolerance, atol=tolerance)


def test_in_one_process():
    for level in ("O0", "O1", "O2"):
        loop, accuracy = fitted(level, loss_scale=1.0 if level == "O0" else "dynamic")
        assert accuracy > 0.9
        assert loop.history[-1] < 0.5 * loop.history[0]


def test_over_two_processes(two_ranks):
    two_ranks(check_levels)
