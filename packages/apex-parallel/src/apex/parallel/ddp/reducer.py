"""DistributedDataParallel's reducer: gradients fill buckets, which leave to be reduced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from . import checks, plan
from .lanes import Lane, LaneSet, current_stream, profiled
from .plan import BucketSlots
from .reduction import BucketReduction, Options, gradient_dtype, has_grad


class GradientReducer:
    """Reduces the gradients of one module, driven by autograd.

    It belongs to one process and is never pickled. No parameter keeps it alive: hooks of a
    reducer that is gone do nothing.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module, self.options = module, options
        self.allreduce_communicators: Any = None
        self.world_size: float | None = None  # None until attached to a process group
        self.active_params: list[Tensor] = []  # require gradients, in order
        self._active_dtypes: list[torch.dtype] = []  # of their gradients
        self.needs_refresh = True  # the next backward agrees on buckets
        self.allreduce_buffers: list[Tensor | None] = []  # by bucket, if retained
        self.main_stream: Any = None  # the accelerator stream of the last forward
        self.lane_set = LaneSet()
        self.slots: BucketSlots | None = None  # None until ranks have agreed on buckets
        self._planner: plan.BucketPlanner | None = None  # records a backward without slots
        self._index_of: dict[int, int] = {}  # id(param) -> index in active_params
        self._hooks: dict[int, Any] = {}  # id(param) -> handle
        self._with_news: set[int] = set()  # id(param): grad not reduced since it grew
        self._gradient_streams: set[Any] = set()
        self.pending: list[tuple[int, BucketReduction]] = []
        self._end_of_backward: weakref.ref | None = None
        self._forward_done = False  # a forward has prepared a backward, not reduced yet
        self._reducing = False  # the running backward has brought a gradient to reduce
        self._delayed = False  # delay_allreduce at the time of the last forward

    def connect(self) -> None:
        """Attach to the default process group, which may have been destroyed and made again."""
        checks.require_process_group(checks.NAME)
        self.lane_set.connect(checks.parameters_device(self.module))
        self.slots, self.needs_refresh = None, True
        self.world_size = float(dist.get_world_size())

    def open_lanes(self) -> None:
        """Get process groups and streams, a collective call."""
        self.lane_set.open(self.options.num_allreduce_streams, self.allreduce_communicators)

    def prepare_backward(self, module: nn.Module) -> None:
        """Get ready for the backward of a forward of ``module`` that now begins."""
        self.module = module
        if not self.lane_set.is_connected():
            self.connect()
        active = [param for param in module.parameters() if param.requires_grad]
        dtypes = [gradient_dtype(param) for param in active]
        changed = dtypes != self._active_dtypes or (
            [id(param) for param in active] != [id(param) for param in self.active_params]
        )
        self._delayed = self.options.delay_allreduce
        if changed or self.needs_refresh or not (self._delayed or self.slots):
            self.active_params, self.slots, self.needs_refresh = active, None, True
            self._active_dtypes = dtypes
            self._index_of = {id(param): index for index, param in enumerate(active)}
            self._planner, self.allreduce_buffers = self._new_planner(), []
        if changed:
            self.create_hooks()
        if self.slots:
            self.slots.clear()
        self.main_stream = current_stream(self.lane_set.device)
        self._gradient_streams = set() if self.main_stream is None else {self.main_stream}
        self.pending.clear()
        self._forward_done, self._reducing = True, False

    def _new_planner(self) -> plan.BucketPlanner:
        triggers = self.options.allreduce_trigger_params
        if triggers is not None:
            triggers = checks.trigger_indices(triggers, self.active_params)
        return plan.BucketPlanner(
            numels=[param.numel() for param in self.active_params],
            kinds=self._active_dtypes,
            message_size=self.options.message_size,
            triggers=triggers,
        )

    def create_hooks(self) -> None:
        """Watch the gradients of all parameters that require them, or did at an earlier forward.

        A graph that was made before a parameter was frozen still computes its gradient after it is
        unfrozen.
        """
        params = list(self.module.parameters())
        frozen = {id(param) for param in params if not param.requires_grad}
        for key, handle in self._hooks.items():
            if key not in frozen:
                handle.remove()
        owner = weakref.ref(self)  # parameters must not keep their reducer alive

        def on_gradient(param: Tensor) -> None:
            reducer = owner()
            if reducer is None:
                return
            if not reducer.options.prof:  # ranges would cost 4 us per parameter and step
                reducer.comm_ready_buckets(param)
                return
            with profiled("allreduce_hook"), profiled("comm_ready_buckets"):
                reducer.comm_ready_buckets(param)

        self._hooks = {key: handle for key, handle in self._hooks.items() if key in frozen} | {
            id(param): param.register_post_accumulate_grad_hook(on_gradient)
            for param in params
            if param.requires_grad
        }

    def queue_end_of_backward(self, _gradient: Tensor | None = None) -> None:
        """Have the engine call :meth:`_finish_backward` when the running backward ends.

        Outputs call this first, so that it is the outer backward's end even where a parameter's
        gradient arrives in a nested one (reentrant checkpoints).
        """
        if not self.callback_queued:
            callback = self._finish_backward
            Variable._execution_engine.queue_callback(callback)
            self._end_of_backward = weakref.ref(callback)
            self._reducing = False

    def comm_ready_buckets(self, param: Tensor) -> None:
        """Take in the gradient of ``param`` and launch the buckets that it completes."""
        if not param.requires_grad:
            return  # frozen since its forward: torch calls hooks, but has added nothing
        has_grad(param)
        self._with_news.add(id(param))
        if self.options._disable_allreduce and not self._reducing:
            return
        if not self._forward_done:
            raise RuntimeError(
                f"{checks.NAME}: backward without a forward through the wrapper since the last "
                "reduction. Call forward once for each backward that is reduced, or accumulate "
                "gradients locally with disable_allreduce()."
            )
        index = self._index_of.get(id(param))
        if index is None:
            raise RuntimeError(
                f"{checks.NAME}: a parameter of shape {list(param.shape)} got a gradient, but was "
                "frozen (requires_grad=False) at the last forward through the wrapper, so ranks "
                "have not agreed to reduce it. Freeze and unfreeze before a forward, and call "
                "backward before the next freezing."
            )
        self.queue_end_of_backward()
        self._reducing = True
        if self._delayed:
            return
        if self.slots is None:
            self._planner.add(index)
            return
        if self.main_stream is not None:
            self._gradient_streams.add(current_stream(self.lane_set.device))
        for bucket_idx in self.slots.fill(index, param.shape):
            self._launch(bucket_idx)

    def _finish_backward(self) -> None:
        """Reduce what has not left yet, wait for all buckets and write the gradients."""
        if not self._reducing:
            return  # autograd.grad through an output: no parameter got a gradient
        self._reducing = self._forward_done = False
        try:
            if not self.lane_set.lanes:
                self.open_lanes()
            self.lane_set.settle(False)
            if self.needs_refresh:
                self._agree_on_parameters()
            if self._delayed:
                self.allreduce_fallback()
            else:
                if self.slots is None:
                    self.sync_bucket_structure()
                for bucket_idx in self.slots.take_remaining():
                    self._launch(bucket_idx)
            self._finish_pending()
            self.lane_set.settle(True)
        finally:
            self.pending.clear()
        self.needs_refresh = False
        self._with_news.clear()
        self.lane_set.join()

    def _agree_on_parameters(self) -> None:
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        what, lane = "the parameters that require gradients", self.lane_set.lanes[0]
        checks.check_same_on_all_ranks(named, what, lane.device, lane.group)

    def sync_bucket_structure(self) -> None:
        """Make rank 0's buckets everybody's."""
        count, lane = len(self.active_params), self.lane_set.lanes[0]
        numbers = torch.tensor(plan.encode(self._planner.plan(), count), device=lane.device)
        dist.broadcast(numbers, 0, group=lane.group)
        self.slots = BucketSlots(plan.decode(numbers.tolist(), count))

    def _launch(self, bucket_idx: int) -> None:
        params = [self.active_params[i] for i in self.slots.active_i_buckets[bucket_idx]]
        lane = self.lane_set.lane(bucket_idx)
        self._reduce(params, bucket_idx, lane)
        if not lane.wait_blocks:
            self._finish_pending()

    def _reduce(self, params: Sequence[Tensor], bucket_idx: int, lane: Lane) -> None:
        # What accumulated locally may have been discarded by zero_grad since.
        is_new = [id(param) in self._with_news and param.grad is not None for param in params]
        self.lane_set.settle(False)
        after = {*self._gradient_streams, current_stream(self.lane_set.device)}
        reduction = BucketReduction(params, is_new, lane, self.options.reduction(), after)
        self.pending.append((bucket_idx, reduction))

    def _finish_pending(self) -> None:
        while self.pending:
            bucket_idx, reduction = self.pending.pop(0)
            buffer = reduction.finish(self.options.retain_allreduce_buffers)
            if buffer is not None:
                self.keep_buffer(bucket_idx, buffer)

    def keep_buffer(self, bucket_idx: int, buffer: Tensor) -> None:
        """Put the flat result of a bucket into ``allreduce_buffers``."""
        missing = bucket_idx + 1 - len(self.allreduce_buffers)
        self.allreduce_buffers.extend([None] * missing)
        self.allreduce_buffers[bucket_idx] = buffer

    def allreduce_fallback(self) -> None:
        """Reduce all gradients at once, one flat buffer per dtype, and wait for the result."""
        lane = self.lane_set.lane(0, force_default_stream=True)
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for param, dtype in zip(self.active_params, self._active_dtypes, strict=True):
            buckets.setdefault(dtype, []).append(param)
        for bucket_idx, params in enumerate(buckets.values()):
            self._reduce(params, bucket_idx, lane)
        self._finish_pending()

    @property
    def callback_queued(self) -> bool:
        """Whether a backward is running at whose end gradients are reduced.

        The autograd engine holds the only reference to the callback and drops it when a backward
        ends or fails, so this cannot go stale.
        """
        return self._end_of_backward is not None and self._end_of_backward() is not None

    @property
    def known_slots(self) -> BucketSlots:
        """Those of the buckets that ranks have agreed on; empty before the first backward."""
        return self.slots or BucketSlots([])

    @property
    def buckets(self) -> list[list[Tensor | None]]:
        """The gradients that have arrived, by bucket and slot; empty before the first backward."""
        grads, slots = [param.grad for param in self.active_params], self.known_slots
        return [
            [grads[i] if arrived else None for i, arrived in zip(bucket, flags, strict=True)]
            for bucket, flags in zip(slots.active_i_buckets, slots.arrived, strict=True)
        ]
