"""The state of a rank: float32 masters and moments of its fragments, and the LAMB step on them."""

from __future__ import annotations

from collections.abc import Sequence
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

    ``parts`` has them by name: ``p``, ``m`` and ``v``.

    Args:
        params: in the layout's order.
        param_groups: the optimizer's, whose numbers each step reads anew.
        grads: this rank's part of the reduced gradients.
        copies: the buffer in the layout to which new parameters are written, own part only.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        param_groups: Sequence[dict[str, Any]],
        layout: Layout,
        groups: NodeGroups,
        grads: Tensor,
        copies: Tensor,
    ) -> None:
        self._groups, self._device = groups, grads.device
        self.parts = {name: torch.zeros(layout.own, device=self._device) for name in "pmv"}
        masters, *moments = self.parts.values()
        self._squares = torch.zeros(len(params), 2, dtype=torch.float64, device=self._device)
        self._launches = []  # of each group that has some: itself, their parameters, the lists
        fragments = layout.fragments(groups.shard)
        group_of = {id(param): group for group in param_groups for param in group["params"]}
        for group in param_groups:
            own = [f for f in fragments if group_of[id(params[f.param])] is group]
            flats = (masters, grads, *moments)
            lists = [[flat[f.own : f.own + f.numel] for f in own] for flat in flats]
            lists.append([copies[f.flat : f.flat + f.numel] for f in own])
            owners = torch.tensor([f.param for f in own], dtype=torch.int64, device=self._device)
            if own:
                self._launches.append((group, owners, lists))
        for f in fragments:  # masters are those of the parameters
            begin = f.flat - layout.offsets[f.param]
            flat = params[f.param].detach().reshape(-1)
            masters[f.own : f.own + f.numel] = flat[begin : begin + f.numel]

    def step(self, numbers: Numbers, **options: bool) -> None:
        """One LAMB step; norms of whole parameters are added up over the ranks of the node.

        Args:
            options: adam_w_mode and use_nvlamb.
        """
        squares = [self._squares.new_zeros(len(owners), 2) for _, owners, _ in self._launches]
        for (group, _, lists), terms in zip(self._launches, squares, strict=True):
            self._launch(group, lists, numbers, terms, 1, **options)
        self._squares.zero_()
        for (_, owners, _), terms in zip(self._launches, squares, strict=True):
            self._squares.index_add_(0, owners, terms)
        self.add_up(self._squares)
        for group, owners, lists in self._launches:
            self._launch(group, lists, numbers, self._squares[owners], 2, **options)

    def add_up(self, terms: Tensor) -> None:
        """Add up a tensor over the ranks of the node."""
        if self._groups.within:
            dist.all_reduce(terms, group=self._groups.within[0])

    def _launch(
        self,
        group: dict[str, Any],
        lists: list[list[Tensor]],
        numbers: Numbers,
        squares: Tensor,
        only_pass: int,
        adam_w_mode: bool,
        use_nvlamb: bool,
    ) -> None:
        lr, device_lr = group["lr"], numbers.lr
        if device_lr is None and isinstance(lr, Tensor):
            device_lr = lr.to(self._device, torch.float32).reshape(1)
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
