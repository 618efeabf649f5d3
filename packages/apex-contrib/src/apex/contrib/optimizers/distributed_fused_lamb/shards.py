"""The state of a rank: float32 masters and moments of its fragments, and the LAMB step on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._shared.native.writes import call_counted
from ..sharded_lamb import lamb_step
from .groups import NodeGroups
from .layout import Layout

__all__ = ["Numbers", "Shards"]


class Numbers(NamedTuple):
    """What all groups' steps share; tensors on the device, one number each."""

    step: Tensor  # int32, of the step to be taken
    lr: Tensor | None  # float32, in place of the groups'
    inv_scale: Tensor  # float32; gradients are multiplied by it
    found_inf: Tensor  # float32; not 0: nothing is changed
    grad_norm: Tensor | None  # float64, of unscaled gradients, if they are to be clipped


class Shards:
    """Own parts of masters and moments, each one flat float32 tensor of the layout's ``own`` size.

    Args:
        params: in the layout's order.
        grads: this rank's part of the reduced gradients.
        copies: the buffer in the layout to which new parameters are written, own part only.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        groups: NodeGroups,
        grads: Tensor,
        copies: Tensor,
    ) -> None:
        self._groups = groups
        self._fragments = list(layout.fragments(groups.shard))
        device = grads.device
        self.p, self.m, self.v = (torch.zeros(layout.own, device=device) for _ in "pmv")
        self._owners = torch.tensor([f.param for f in self._fragments], device=device)
        self._squares = torch.zeros(len(params), 2, dtype=torch.float64, device=device)
        self._lists = [
            [flat[f.own : f.own + f.numel] for f in self._fragments]
            for flat in (self.p, grads, self.m, self.v)
        ]
        self._copies = [copies[f.flat : f.flat + f.numel] for f in self._fragments]
        self._params, self._offsets = params, layout.offsets

    def fill(self) -> None:
        """Take the masters from the parameters."""
        for fragment, master in zip(self._fragments, self._lists[0], strict=True):
            begin = fragment.flat - self._offsets[fragment.param]
            flat = self._params[fragment.param].detach().reshape(-1)
            master.copy_(flat[begin : begin + fragment.numel])

    def step(self, groups: Sequence[tuple[dict[str, Any], set[int]]], numbers: Numbers, **options):
        """One LAMB step; norms of whole parameters are added up over the ranks of the node.

        Args:
            groups: the optimizer's, with the indices of their parameters in the layout's order.
            options: adam_w_mode and use_nvlamb.
        """
        chosen = list(self._chosen(groups))
        squares = [self._squares.new_zeros(len(own), 2) for _, own in chosen]
        for (group, own), terms in zip(chosen, squares, strict=True):
            self._launch(group, own, numbers, terms, 1, **options)
        self._squares.zero_()
        owners = [self._owners[own] for _, own in chosen]
        for own, terms in zip(owners, squares, strict=True):
            self._squares.index_add_(0, own, terms)
        self.add_up(self._squares)
        for (group, own), params in zip(chosen, owners, strict=True):
            self._launch(group, own, numbers, self._squares[params], 2, **options)

    def add_up(self, terms: Tensor) -> None:
        """Add up a tensor over the ranks of the node."""
        if self._groups.within:
            dist.all_reduce(terms, group=self._groups.within[0])

    def _chosen(self, groups: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Each group that has fragments here, with their indices."""
        for group, members in groups:
            own = [i for i, fragment in enumerate(self._fragments) if fragment.param in members]
            if own:
                yield group, own

    def _launch(
        self,
        group: dict[str, Any],
        own: list[int],
        numbers: Numbers,
        squares: Tensor,
        only_pass: int,
        adam_w_mode: bool,
        use_nvlamb: bool,
    ) -> None:
        lists = [[tensors[i] for i in own] for tensors in (*self._lists, self._copies)]
        lr, device_lr = group["lr"], numbers.lr
        if device_lr is None and isinstance(lr, Tensor):
            device_lr = lr.to(self.p.device, torch.float32).reshape(1)
        call_counted(
            lamb_step,
            *lists,
            0.0 if device_lr is not None else float(lr),
            device_lr,
            *group["betas"],
            float(group["eps"]),
            float(group["weight_decay"]),
            0,
            numbers.step,
            bool(group["bias_correction"]),
            bool(group["grad_averaging"]),
            adam_w_mode,
            use_nvlamb,
            numbers.grad_norm,
            float(group["max_grad_norm"]) if numbers.grad_norm is not None else 0.0,
            numbers.inv_scale,
            numbers.found_inf,
            squares,
            only_pass,
        )
