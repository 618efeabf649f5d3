"""The DistributedFusedLAMB optimizer class."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._shared.native.writes import keep_from_tracing
from ...clip_grad.ops import clip_grad_total_norm
from ..distributed import ownership
from ..distributed.arguments import sole_device
from ..distributed.collectives import broadcast, check_initialized, load_together
from ..given_lists import loss_of
from .arguments import (
    NAME,
    buffer_dtype,
    check_alike,
    check_group,
    check_options,
    checked_step,
    ordered,
    scale_of,
)
from .gradients import GradientBuffer, Reductions
from .groups import NodeGroups
from .layout import Layout
from .parameters import ParameterBuffer
from .shards import Numbers, Shards

__all__ = ["DistributedFusedLAMB"]


class AtomicCounter:
    """A number that several threads may raise."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, n: int) -> int:
        """Add ``n``; return the new value."""
        with self._lock:
            self.value += n
            return self.value


class DistributedFusedLAMB(torch.optim.Optimizer):
    r"""LAMB with gradients reduced and state divided among the ranks of a node.

    Every rank computes gradients of its own part of the batch. The optimizer averages them over all
    ranks (the model must not be wrapped in DistributedDataParallel), each rank steps its part of
    float32 masters and moments, and the new parameters are gathered. The formula is that of
    :func:`apex.contrib.optimizers.sharded_lamb.lamb_step`.

    A training loop may be any other optimizer's: ``zero_grad()``, ``backward()``, ``step()``.
    Scripts for Apex may take the same parts one by one, as all of them have defaults:
    ``_lazy_init_stage1()`` before the first backward pass, ``_lazy_init_stage2()`` after it, and in
    every iteration ``_lr = tensor``, :meth:`set_is_accumulation_step`, :meth:`set_last_step`,
    backward passes, :meth:`complete_reductions`, :meth:`set_global_scale` and :meth:`step`. All
    ranks call everything in the same order.

    Args:
        params: parameters, or dicts with parameter groups; float32, float16 or bfloat16, dense, on
            one device. Those that require no gradient now are left alone for good. One that has no
            gradient in a step counts as one of zeros.
        lr: learning rate, parameter units per step; ``>= 0``. Each group may have its own;
            assigning to ``_lr`` replaces that of all groups.
        bias_correction: divide the moments by ``1 - beta**step``.
        grad_averaging: weigh gradients by ``1 - beta1``; ``False``: by 1.
        betas: decay of the two running averages per step, each in ``[0, 1)``.
        eps: added to the root, in gradient units; ``>= 0``.
        weight_decay: per step; ``>= 0``.
        max_grad_norm: clip all gradients together to this norm; 0 does not clip.
        adam_w_mode: decay is part of the update; ``False``: of the gradient.
        use_nvlamb: use the ratio of norms also for parameters without decay.
        step_supports_amp_scaling: ``GradScaler.step`` leaves unscaling and the check to
            :meth:`step`.
        overlap_reductions: reduce blocks of gradients while the backward pass goes on. Then all
            backward passes of an iteration but the last are accumulation steps, see
            :meth:`set_is_accumulation_step`.
        dwu_group_size: ranks per node, whose ranks are consecutive. 0: the number of local GPUs; on
            CPUs ``LOCAL_WORLD_SIZE`` of torchrun, or all ranks.
        dwu_num_blocks: parts of the gradients that are reduced one after the other, the last first.
        dwu_num_chunks: parts of a block; each is divided among the ranks of a node.
        dwu_num_rs_pg, dwu_num_ar_pg, dwu_num_ag_pg: process groups for what goes on within a node,
            between nodes and in gathers: that many blocks may be under way at once. 0 gathers: the
            first kind serves.
        fused_norm: compute the gradients' norm block by block, as reductions complete.
        e5m2_allgather: gather the upper bytes of float16 numbers: half of the traffic, and
            parameters with three digits of two, on all ranks alike. Masters stay exact.
        verbose: rank 0 prints the layout.
        clip_after_ar: clip the averaged gradient to its norm; ``False``: each rank clips its own
            gradient to that one's norm, before reductions, which then are part of :meth:`step`.
        full_ar: reduce over all ranks at once instead of within and between nodes.
        set_param_views_to_flat_buffer: let the parameters' data be parts of the buffer that is
            gathered, contiguous: no copy at the end of a step.
        skip_allgather: leave it to the caller to call :meth:`gather_params` after a step.
        fuse_scale: let collectives divide by the number of ranks; ``False``: divide while copying.
        param_order: all parameters in the order in which they are to be laid out. Best is that of
            the forward pass, the default: reductions start at its end.
        nccl_allgather_channels: the most channels that NCCL uses in gathers; 0 leaves it to NCCL.
            Needs ``dwu_num_ag_pg > 0``.

    Raises:
        RuntimeError: torch.distributed is not initialized, ranks have different models, or
            parameters belong to a DistributedFusedAdam that holds gradients which no step has used.
        ValueError: an argument is out of range, or options exclude each other.
        TypeError: a parameter is of another dtype or layout.

    Note:
        Bytes per parameter: 12 divided by the ranks of a node for masters and moments, and for
        16-bit parameters 2 each for gradients and gathered values, beside the model and its
        gradients. Nothing waits for the device. Where the reduced gradient is not finite, a step
        changes nothing and does not count. A parameter belongs to the newest sharded optimizer that
        was built over it. An older one raises RuntimeError when it is used; its :meth:`state_dict`
        still works.

    Source:
        You et al. 2020, algorithm 2; states divided after Rajbhandari et al. 2020, *ZeRO*, stage 1.

    Example:
        >>> optimizer = DistributedFusedLAMB(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> for batch in batches:
        ...     optimizer.zero_grad()
        ...     model(batch).mean().backward()
        ...     optimizer.step()
    """

    AtomicCounter = AtomicCounter

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        overlap_reductions: bool = True,
        dwu_group_size: int = 0,
        dwu_num_blocks: int = 4,
        dwu_num_chunks: int = 4,
        dwu_num_rs_pg: int = 1,
        dwu_num_ar_pg: int = 4,
        dwu_num_ag_pg: int = 0,
        fused_norm: bool = False,
        e5m2_allgather: bool = False,
        verbose: bool = False,
        clip_after_ar: bool = True,
        full_ar: bool = False,
        set_param_views_to_flat_buffer: bool = False,
        skip_allgather: bool = False,
        fuse_scale: bool = False,
        param_order: Any = None,
        nccl_allgather_channels: int = 0,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        check_options(given, params)
        check_initialized(NAME)
        self._shards: Shards | None = None
        names = ("lr", "bias_correction", "grad_averaging", "betas", "eps", "weight_decay")
        keep_from_tracing(type(self))
        super().__init__(params, {name: given[name] for name in (*names, "max_grad_norm")})
        self._step_supports_amp_scaling = step_supports_amp_scaling
        self._options = given
        self._own_params = ordered(
            [p for group in self.param_groups for p in group["params"] if p.requires_grad],
            param_order,
        )
        device = sole_device(self._own_params, NAME, ValueError)
        compared = {k: v for k, v in given.items() if k not in ("lr", "param_order", "verbose")}
        check_alike(self._own_params, compared)
        self._successor: str | None = None  # an optimizer that took over parameters
        self._hook_handles: list[Any] = []
        ownership.check_free(self, self._own_params, dist.group.WORLD, device)
        counts = (dwu_num_rs_pg, dwu_num_ar_pg, dwu_num_ag_pg)
        self._groups = NodeGroups(device, dwu_group_size, counts, full_ar, nccl_allgather_channels)
        self._given_lr: tuple[Tensor, int | None] | None = None
        self._global_scale = torch.ones(1, device=device)
        self._is_accumulation_step = self._last_step = False
        self._grad_norm: Tensor | None = None
        self._is_reduced = self._has_begun = self._resume_from_checkpoint = False
        self._steps = torch.zeros(1, dtype=torch.int32, device=device)
        with torch.no_grad():
            broadcast(self._own_params, self._groups)
        self._plan()

    def _plan(self) -> None:
        """Lay out the parameters, and listen to their gradients."""
        given, params, groups = self._options, self._own_params, self._groups
        numels = [param.numel() for param in params]
        blocks, chunks = given["dwu_num_blocks"], given["dwu_num_chunks"]
        self._layout = layout = Layout(numels, blocks, chunks, groups.shards)
        self._dtype = buffer_dtype(params, given["set_param_views_to_flat_buffer"])
        factor = 1.0 if given["fuse_scale"] else 1 / groups.size
        self._gradients = GradientBuffer(params, layout, factor, self._dtype)
        self._own_grads = torch.zeros(layout.own, dtype=self._dtype, device=params[0].device)
        self._reductions = Reductions(
            layout,
            groups,
            self._gradients.flat,
            self._own_grads,
            given["full_ar"],
            given["fuse_scale"],
        )
        overlaps = given["overlap_reductions"] and given["clip_after_ar"]
        handles = self._gradients.hook(self._arrived) if overlaps else []
        ownership.claim(self, params, handles)
        if given["verbose"] and groups.rank == 0:
            print(
                f"{NAME}: {sum(numels)} elements of {len(params)} parameters in {layout.total} "
                f"{self._dtype}: {blocks} blocks of {chunks} chunks of {groups.shards} shards of "
                f"{layout.shard}."
            )

    @torch.no_grad()
    def _lazy_init_stage1(self) -> None:
        """Take parameters from rank 0 and masters from parameters; before the first backward pass.

        It is done once; :meth:`step` does it by itself. All ranks call it.
        """
        if self._shards is None:
            broadcast(self._own_params, self._groups)
            self._init_state()

    def _lazy_init_stage2(self) -> None:
        """Nothing is left to be done after the first backward pass; scripts for Apex call this."""
        self._init_state()

    @torch.no_grad()
    def _init_state(self) -> None:
        if self._shards is not None:
            return
        given, groups, params = self._options, self._groups, self._own_params
        dtype = torch.uint8 if given["e5m2_allgather"] else self._dtype
        are_views = given["set_param_views_to_flat_buffer"]
        self._new_params = ParameterBuffer(params, self._layout, groups, dtype, are_views)
        flat = self._new_params.flat
        self._shards = Shards(
            params, self.param_groups, self._layout, groups, self._own_grads, flat
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor does: the layout is fixed.

        Raises:
            RuntimeError: the optimizer exists already.
        """
        if hasattr(self, "_layout"):
            raise RuntimeError(
                f"{NAME}.add_param_group: parameters are laid out already; build a new optimizer."
            )
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    # The protocol.

    @property
    def _lr(self) -> Tensor:
        """The learning rate of all groups, float32 ``[1]``: assign to it, or write to it."""
        if self._given_lr is None:
            lr = torch.as_tensor(self.param_groups[0]["lr"], dtype=torch.float32)
            lr = lr.detach().clone().to(self._steps.device).reshape(1)
            self._given_lr = (lr, lr._version)  # counts as given once it is written to
        return self._given_lr[0]

    @_lr.setter
    def _lr(self, value: Tensor | float) -> None:
        lr = torch.as_tensor(value, dtype=torch.float32, device=self._steps.device)
        self._given_lr = (lr.reshape(1), None)

    def _own_lr(self) -> Tensor | None:
        lr, version = self._given_lr or (None, None)
        if lr is not None and lr._version == version:  # it was only read
            self._given_lr = lr = None
        return lr

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """Say whether backward passes from now on are not the last of their iteration.

        Their gradients add up in the parameters, and nothing is reduced.
        """
        self._is_accumulation_step = is_accumulation_step

    def set_last_step(self, last_step: bool) -> None:
        """Say whether this is the last iteration. Of no effect: every step is complete."""
        self._last_step = last_step

    def set_global_scale(self, global_scale: Tensor | float) -> None:
        """Say what the loss was multiplied by; stays until it is set again."""
        scale = torch.as_tensor(global_scale, dtype=torch.float32, device=self._steps.device)
        self._global_scale = scale.detach().reshape(1)

    @property
    def global_scale(self) -> Tensor:
        """What :meth:`set_global_scale` was told; float32 ``[1]``, 1 at first."""
        return self._global_scale

    @property
    def L2_grad_norm(self) -> Tensor | None:
        """The norm of the averaged, still scaled gradient; float32, without dimensions.

        With ``clip_after_ar=False`` that of the rank's own gradient. None before the first
        :meth:`complete_reductions`.
        """
        return None if self._grad_norm is None else self._grad_norm[0].float()

    @torch.no_grad()
    def _arrived(self, index: int) -> None:
        """A backward pass has completed a gradient."""
        if self._is_accumulation_step:
            return
        self._has_begun = True
        if self._is_reduced or self._gradients.last_block_of(index) > self._reductions.next_block:
            raise RuntimeError(
                f"{NAME}: a gradient arrived again after its reduction began. Call "
                "set_is_accumulation_step(True) before all backward passes of an iteration but the "
                "last, and step() or zero_grad() after the last; or pass overlap_reductions=False."
            )
        self._gradients.add(index)
        for block in range(self._reductions.next_block, -1, -1):
            if not self._gradients.is_complete(block):
                break
            self._pipeline_block_reductions(block)

    @torch.no_grad()
    def _pipeline_block_reductions(self, block_id: int) -> None:
        """Start the reductions of a block; scripts put their own function around this method.

        Args:
            block_id: all ranks count down from the last one. One that was started stays so.
        """
        if block_id == self._reductions.next_block:
            self._reductions.start()

    @torch.no_grad()
    def complete_reductions(self) -> None:
        """Reduce what has not been reduced, and wait for it; :meth:`step` does it by itself."""
        ownership.check_owner(self, "complete_reductions")
        if self._is_reduced:
            return
        self._gradients.add_missing()
        if self._options["clip_after_ar"]:
            self._grad_norm = self._reduce()
        else:
            self._grad_norm = clip_grad_total_norm([self._gradients.flat], 2.0)
            if not self._options["fuse_scale"]:
                self._grad_norm *= self._groups.size
        self._is_reduced = True

    def _reduce(self) -> Tensor:
        """Finish all reductions; return the norm of the reduced gradient, float64 ``[1]``."""
        for block in range(self._reductions.next_block, -1, -1):
            self._pipeline_block_reductions(block)
        fuses, blocks = self._options["fused_norm"], self._reductions.finish()
        norms = [clip_grad_total_norm([own], 2.0) for own in blocks if fuses]
        norms = norms or [clip_grad_total_norm([self._own_grads], 2.0)]
        square = torch.cat(norms).square().sum().reshape(1)
        self._init_state()
        self._shards.add_up(square)
        return square.sqrt()

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Take a step, unless the reduced gradient is not finite; all ranks decide alike.

        Args:
            closure: computes the loss again; called with gradients enabled.
            grad_scaler: whose scale the loss has, instead of :attr:`global_scale`; it is told
                whether the gradient was finite. ``grad_scaler.step(optimizer)`` gives itself.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: ``grad_scaler.unscale_`` was called; ``max_grad_norm`` clips instead.
        """
        ownership.check_owner(self, "step")
        loss = loss_of(closure)
        if grad_scaler is not None and not grad_scaler.is_enabled():
            grad_scaler = None
        scale = self._global_scale if grad_scaler is None else scale_of(self, grad_scaler)
        self._inv_scale, self._found_inf = scale.double().reciprocal(), torch.zeros_like(scale)
        self._pipeline_step()
        if grad_scaler is not None:
            found = {scale.device: self._found_inf[0]}
            grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = found
        self._finish_under_way()
        return loss

    @torch.no_grad()
    def _pipeline_step(self) -> None:
        """What :meth:`step` does with its scale; scripts put their own function around this."""
        inv_scale = self._inv_scale
        self._init_state()
        self.complete_reductions()
        norm, clips = self._grad_norm, self._options["clip_after_ar"]
        if not clips:
            limit = max(group["max_grad_norm"] for group in self.param_groups)
            self._gradients.clip(norm * inv_scale, limit)
            norm = self._reduce()
        self._found_inf = found_inf = (~norm.isfinite()).float()
        numbers = Numbers(
            self._steps + 1,
            self._own_lr(),
            inv_scale.float(),
            found_inf,
            norm * inv_scale if clips else None,
        )
        modes = {name: self._options[name] for name in ("adam_w_mode", "use_nvlamb")}
        self._shards.step(numbers, **modes)
        self._steps += (found_inf == 0).int()
        if not self._options["skip_allgather"]:
            self._new_params.gather()
            self._new_params.write(found_inf)

    @torch.no_grad()
    def gather_params(self) -> None:
        """Gather the new parameters of a step with ``skip_allgather``; all ranks call it."""
        ownership.check_owner(self, "gather_params")
        self._init_state()
        self._new_params.gather()
        self._new_params.write()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those that were reduced included."""
        ownership.check_owner(self, "zero_grad")
        super().zero_grad(set_to_none)
        self._finish_under_way()

    def _finish_under_way(self) -> None:
        """Wait for blocks that backward passes have started, and forget what they give."""
        if self._has_begun and not self._is_reduced:  # some ranks may have started blocks
            list(self._reductions.finish())
        self._gradients.forget()
        self._is_reduced = self._has_begun = False

    def _holds_gradients(self) -> bool:
        """Gradients are in the parameters, too, where another optimizer finds them."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: ``step``, and its parts ``fp32_p``, ``fp32_m`` and ``fp32_v``.

        It fits the same rank of as many ranks with the same parameters and options.
        """
        self._init_state()
        parts = {f"fp32_{name}": part.clone() for name, part in self._shards.parts.items()}
        return {"step": self._steps.clone(), **parts}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave on this rank; load the model by itself.

        A collective call.

        Raises:
            ValueError: parts are missing, damaged, or have other sizes.
            RuntimeError: another rank refuses its part or has that of another step, or another
                optimizer has taken over parameters. Nothing has changed on any rank, in all cases.
        """
        ownership.check_owner(self, "load_state_dict")

        def check() -> tuple[int, Callable[[], None]]:
            step = checked_step(state_dict, self._layout.own)
            return step, lambda: self._take(state_dict, step)

        where = f"{NAME}.load_state_dict"
        load_together(check, dist.group.WORLD, self._steps.device, where)

    def _take(self, state_dict: dict[str, Any], step: int) -> None:
        self._init_state()
        self._resume_from_checkpoint = True
        self._steps.fill_(step)
        for name, part in self._shards.parts.items():
            part.copy_(state_dict[f"fp32_{name}"])
