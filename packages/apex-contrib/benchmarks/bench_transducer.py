"""Loss and joint of transducers, forward and backward.

The peer of the loss is plain PyTorch that computes whole diagonals of the lattice. Traffic: the
loss reads the logits (1); its backward reads them again and writes the gradient (2). The joint
writes its result (1); its backward reads the gradient twice (2), for f and for g.
"""

import torch

from apex.contrib.transducer import TransducerJoint, TransducerLoss
from apex.contrib.transducer.transducer_loss import plain
from apex_testkit.bench import chosen_device, compare

# (batch, frames, labels, classes): a recognizer of characters, of word pieces, and short texts.
LOSSES = [(8, 120, 40, 32), (2, 100, 30, 1024), (32, 20, 5, 64)]
# (batch, frames, labels and one, columns).
JOINTS = [(4, 100, 30, 512), (8, 120, 40, 64), (4, 50, 20, 63)]


def lengths(batch: int, most: int, device: str) -> torch.Tensor:
    """From half of the most to all of it."""
    return torch.linspace(most / 2, most, batch, device=device).long()


def plain_joint(f, g):
    return (f[:, :, None] + g[:, None]).relu()


def measure(name, label, numel, size, units, function, peers, leaves, seed, device):
    given = {"apex": function, **peers}
    detached = [leaf.detach() for leaf in leaves]
    both = lambda f: lambda: torch.autograd.grad(f(*leaves), leaves, seed)
    forward = lambda f: lambda: f(*detached)
    for suffix, step, moved in zip(("fwd", "fwd+bwd"), (forward, both), units, strict=True):
        steps = {peer: step(f) for peer, f in given.items()}
        compare(f"{name} {suffix}", label, bytes_moved=moved * numel * size, device=device, **steps)


def loss(batch, frames, labels, classes, dtype, device):
    x = torch.randn(batch, frames, labels + 1, classes, device=device).to(dtype).requires_grad_()
    label = torch.randint(1, classes, (batch, labels), device=device)
    given = (label, lengths(batch, frames, device), lengths(batch, labels, device))
    seed = torch.ones(batch, device=device)
    ours = TransducerLoss()
    measure(
        "transducer_loss",
        f"{str(dtype).removeprefix('torch.')} {batch}x{frames}x{labels + 1}x{classes}",
        x.numel(),
        x.element_size(),
        (1, 3),
        lambda x: ours(x, *given, 0),
        {"torch": lambda x: plain.transducer_loss(x, *given, None, 0, frames, True)[0]},
        [x],
        seed,
        device,
    )


def joint(batch, frames, width, columns, dtype, device):
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    f, g = (
        torch.randn(batch, n, columns, device=device).to(dtype).requires_grad_()
        for n in (frames, width)
    )
    whole = [torch.full((batch,), n, device=device) for n in (frames, width)]
    seed = torch.randn(batch, frames, width, columns, device=device).to(dtype)
    ours = TransducerJoint(relu=True)
    measure(
        "transducer_joint relu",
        f"{str(dtype).removeprefix('torch.')} {batch}x{frames}x{width}x{columns}",
        seed.numel(),
        seed.element_size(),
        (1, 3),
        lambda f, g: ours(f, g, *whole),
        {"torch": plain_joint, "torch_compiled": torch.compile(plain_joint, dynamic=False)},
        [f, g],
        seed,
        device,
    )


for dtype in (torch.float32, torch.bfloat16):
    for shape in LOSSES:
        loss(*shape, dtype, chosen_device())
    for shape in JOINTS:
        joint(*shape, dtype, chosen_device())
