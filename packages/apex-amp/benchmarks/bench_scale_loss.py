"""One iteration of loss scaling without the model: scale_loss and step against GradScaler.

Each contestant scales a loss, finds new gradients on all parameters, unscales them, looks for inf
and NaN, and calls a step that does nothing. Traffic per element: read and write a float32 gradient
= 8 bytes; from float16 gradients to float32 masters and back = 2 + 4, and 4 + 2 for the copy of
masters into the model.
"""

import torch

from apex import amp
from apex.amp import _amp_state
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import RESNET50

# GPT-2 small: embeddings; per block two norms, attention and feed-forward; the last norm.
_BLOCK = [768] * 4 + [1_769_472, 2304, 589_824, 768, 2_359_296, 3072, 2_359_296, 768]
GPT2 = [38_597_376, 786_432, *(_BLOCK * 12), 768, 768]
CASES = {"resnet50": RESNET50, "gpt2": GPT2, "161 x 10": [10] * 161, "10,000 x 10": [10] * 10_000}


class NoStep(torch.optim.SGD):
    """An optimizer whose step costs nothing: what is measured is the work around it."""

    @torch.no_grad()
    def step(self, closure=None):
        return None


class Parameters(torch.nn.Module):
    """Parameters of given sizes, and the gradients that a backward pass would bring."""

    def __init__(self, sizes, device):
        super().__init__()
        self.list = torch.nn.ParameterList(torch.randn(n, device=device) for n in sizes)
        self.pairs = []

    def make_grads(self):
        self.pairs = [(p, torch.randn_like(p)) for p in self.parameters()]

    def backward(self):
        for param, grad in self.pairs:
            param.grad = grad


def ours(sizes, device, level, loss):
    model = Parameters(sizes, device)
    model, optimizer = amp.initialize(
        model,
        NoStep(model.parameters(), lr=0.1),
        opt_level=level,
        loss_scale="dynamic",
        verbosity=0,
    )
    model.make_grads()
    scaler = _amp_state.loss_scalers[0]

    def iteration():
        scaler._loss_scale = 1.0  # gradients are unscaled in place, and must not run into 0
        _amp_state.loss_scalers = [scaler]
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer):
            model.backward()
        optimizer.step()

    return iteration


def theirs(sizes, device, loss):
    model = Parameters(sizes, device)
    optimizer = NoStep(model.parameters(), lr=0.1)
    model.make_grads()
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)

    def iteration():
        optimizer.zero_grad()
        scaler.scale(loss)
        model.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return iteration


def theirs_with_masters(sizes, device, loss):
    """A recipe without amp: gradients and masters are copied by foreach functions."""
    model = Parameters(sizes, device).half()
    model.make_grads()
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = NoStep(masters, lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)

    @torch.no_grad()
    def iteration():
        for param in params:
            param.grad = None
        scaler.scale(loss)
        model.backward()
        for master in masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(params, masters)
        optimizer.zero_grad()

    return iteration


if __name__ == "__main__":
    device = chosen_device()
    for case, sizes in CASES.items():
        loss = torch.ones((), device=device, requires_grad=True) * 1.0
        compare(
            "scale_loss",
            f"{case} O1, fp32",
            bytes_moved=8 * sum(sizes),
            device=device,
            apex=ours(sizes, device, "O1", loss),
            torch_grad_scaler=theirs(sizes, device, loss),
        )
        amp._amp_state.handle._deactivate()
        compare(
            "scale_loss_masters",
            f"{case} O2, fp16 to fp32",
            bytes_moved=12 * sum(sizes),
            device=device,
            apex=ours(sizes, device, "O2", loss),
            torch_grad_scaler=theirs_with_masters(sizes, device, loss),
        )
        amp._amp_state.handle._deactivate()
