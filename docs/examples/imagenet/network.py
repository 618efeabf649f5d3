"""The network and the optimizer that the command line names."""

from argparse import Namespace

import torch
from torch import nn
from torchvision import models

from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import convert_syncbn_model


def build_network(args: Namespace, classes: int, device: torch.device) -> nn.Module:
    """A torchvision model with ``classes`` outputs, in float32 on ``device``."""
    network = models.get_model(args.arch, weights=None, num_classes=classes)
    if args.pretrained:
        load_pretrained(network, args.arch)
    if args.sync_bn:
        network = convert_syncbn_model(network)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    return network.to(device, memory_format=layout)


def load_pretrained(network: nn.Module, arch: str) -> None:
    """Load torchvision's weights, except into layers whose shape the number of classes changes."""
    stored = models.get_model_weights(arch).DEFAULT.get_state_dict(progress=True)
    own = network.state_dict()
    fitting = {k: v for k, v in stored.items() if k in own and v.shape == own[k].shape}
    network.load_state_dict(own | fitting)
    untrained = sorted(own.keys() - fitting.keys())
    if untrained:
        print(f"--pretrained: no weights of this shape for {', '.join(untrained)}; left random.")


def build_optimizer(args: Namespace, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters; the trainer sets the learning rate of every step."""
    common = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "fused_adam":
        return FusedAdam(network.parameters(), **common)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(network.parameters(), fused=True, **common)
    sgd = {"sgd": torch.optim.SGD, "fused_sgd": FusedSGD}[args.optimizer]
    return sgd(network.parameters(), momentum=args.momentum, **common)
