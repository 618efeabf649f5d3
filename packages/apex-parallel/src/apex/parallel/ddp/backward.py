"""What happens to gradients during backward: they fill buckets, which leave to be reduced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..flat_tensors import flatten, unflatten
from . import checks, plan
from .broadcast import broadcast_parameters
from .lanes import Lane, current_stream, profiled
from .reduction import BucketReduction, FlatReduction, gradient_dtype, has_grad
from .slots import BucketSlots
from .state import ReductionModule


class BackwardReduction(ReductionModule):
    """The part of DistributedDataParallel that autograd drives."""

    def _attach(self) -> None:
        """Take rank 0's parameters, and watch gradients from now on."""
        broadcast_parameters(self.module)
        self._connect()
        self._open_lanes()
        self.create_hooks()

    def _prepare_backward(self) -> None:
        if self._world is None or self._world() is not dist.group.WORLD:
            self._connect()
        active = [param for param in self.module.parameters() if param.requires_grad]
        dtypes = [gradient_dtype(param) for param in active]
        changed = dtypes != self._active_dtypes or (
            [id(param) for param in active] != [id(param) for param in self.active_params]
        )
        self._delayed = self.delay_allreduce
        if changed or self.needs_refresh or not (self._delayed or self._slots):
            self.active_params, self._slots, self.needs_refresh = active, None, True
            self._active_dtypes = dtypes
            self._index_of = {id(param): index for index, param in enumerate(active)}
            self._planner, self.allreduce_buffers = self._new_planner(), []
        if changed:
            self.create_hooks()
        if self._slots:
            self._slots.clear()
        self.main_stream = current_stream(self._device)
        self._gradient_streams = set() if self.main_stream is None else {self.main_stream}
        self._pending.clear()
        self._forward_done, self._reducing = True, False

    def create_hooks(self) -> None:
        """Watch the gradients of all parameters that require them, or did at an earlier forward.

        A graph made before a parameter was frozen still brings its gradient once it is unfrozen.
        """
        params = list(self.module.parameters())
        frozen = {id(param) for param in params if not param.requires_grad}
        for key, handle in self._hooks.items():
            if key not in frozen:
                handle.remove()
        owner = weakref.ref(self)  # parameters must not keep their wrapper alive

        def on_gradient(param: Tensor) -> None:
            wrapper = owner()
            if wrapper is None:
                return
            if not wrapper.prof:  # once per parameter and step, where ranges would cost 4 us
                wrapper.comm_ready_buckets(param)
                return
            with profiled("allreduce_hook"), profiled("comm_ready_buckets"):
                wrapper.comm_ready_buckets(param)

        self._hooks = {key: handle for key, handle in self._hooks.items() if key in frozen} | {
            id(param): param.register_post_accumulate_grad_hook(on_gradient)
            for param in params
            if param.requires_grad
        }

    def _queue_end_of_backward(self, _gradient: Tensor | None = None) -> None:
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
        if self._disable_allreduce and not self._reducing:
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
        self._queue_end_of_backward()
        if not self._reducing:  # setting an attribute of a module costs 3 us
            self._reducing = True
        if self._delayed:
            return
        if self._slots is None:
            self._planner.add(index)
            return
        if self.main_stream is not None:
            self._gradient_streams.add(current_stream(self._device))
        for bucket_idx in self._slots.fill(index, param.shape):
            self._launch(bucket_idx)

    def _finish_backward(self) -> None:
        """Reduce what has not left yet, wait for all buckets and write the gradients."""
        if not self._reducing:
            return  # autograd.grad through an output: no parameter got a gradient
        self._reducing = self._forward_done = False
        try:
            if not self._lanes:
                self._open_lanes()
            self._settle(False)
            if self.needs_refresh:
                self._agree_on_parameters()
            if self._delayed:
                self.allreduce_fallback()
            else:
                if self._slots is None:
                    self.sync_bucket_structure()
                for bucket_idx in self._slots.take_remaining():
                    self._launch(bucket_idx)
            self._finish_pending()
            self._settle(True)
        finally:
            self._pending.clear()
        self.needs_refresh = False
        self._with_news.clear()
        for lane in self._lanes:
            lane.join()

    def _agree_on_parameters(self) -> None:
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        checks.check_same_on_all_ranks(
            named, "the parameters that require gradients", self._device, self._lanes[0].group
        )

    def sync_bucket_structure(self) -> None:
        """Make rank 0's buckets everybody's."""
        count = len(self.active_params)
        numbers = torch.tensor(plan.encode(self._planner.plan(), count), device=self._device)
        dist.broadcast(numbers, 0, group=self._lanes[0].group)
        self._slots = BucketSlots(plan.decode(numbers.tolist(), count))

    def _launch(self, bucket_idx: int) -> None:
        params = [self.active_params[i] for i in self._slots.active_i_buckets[bucket_idx]]
        lane = self._lane(bucket_idx)
        self._reduce(params, bucket_idx, lane)
        if not lane.wait_blocks:
            self._finish_pending()

    def _lane(self, bucket_idx: int, force_default_stream: bool = False) -> Lane:
        if force_default_stream:
            return Lane(self._lanes[0].group, None, self._device)
        return self._lanes[bucket_idx % len(self._lanes)]

    def _reduce(self, params: Sequence[Tensor], bucket_idx: int, lane: Lane) -> None:
        # What accumulated locally may have been discarded by zero_grad since.
        is_new = [id(param) in self._with_news and param.grad is not None for param in params]
        self._settle(False)
        after = {*self._gradient_streams, current_stream(self._device)}
        reduction = BucketReduction(params, is_new, lane, self._options(), after)
        self._pending.append((bucket_idx, reduction))

    def _finish_pending(self) -> None:
        while self._pending:
            bucket_idx, reduction = self._pending.pop(0)
            buffer = reduction.finish(self.retain_allreduce_buffers)
            if buffer is not None:
                self._keep_buffer(bucket_idx, buffer)

    def _keep_buffer(self, bucket_idx: int, buffer: Tensor) -> None:
        missing = bucket_idx + 1 - len(self.allreduce_buffers)
        self.allreduce_buffers.extend([None] * missing)
        self.allreduce_buffers[bucket_idx] = buffer

    def allreduce_fallback(self) -> None:
        """Reduce all gradients at once, one flat buffer per dtype, and wait for the result."""
        lane = self._lane(0, force_default_stream=True)
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for param, dtype in zip(self.active_params, self._active_dtypes, strict=True):
            buckets.setdefault(dtype, []).append(param)
        for bucket_idx, params in enumerate(buckets.values()):
            self._reduce(params, bucket_idx, lane)
        self._finish_pending()

    def allreduce_bucket(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool
    ) -> Tensor:
        """The flat, reduced values of ``bucket`` (tensors of one dtype), which is not changed.

        Args:
            bucket_idx: chooses the stream and process group.
            force_default_stream: use the current stream and the first process group instead.
        """
        lane = self._lane(bucket_idx, force_default_stream)
        with torch.no_grad(), lane.entered([current_stream(self._device)]):
            flat = flatten(bucket)
            result = FlatReduction(flat, flat.numel(), lane, self._options()).wait()
            lane.mark_done()
        lane.join()
        return result

    def allreduce_maybe_retain(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool = False
    ) -> None:
        """Reduce the tensors of ``bucket`` in place; with retained buffers, into views of one."""
        result = self.allreduce_bucket(bucket, bucket_idx, force_default_stream)
        with torch.no_grad():
            if not self.retain_allreduce_buffers:
                torch._foreach_copy_(list(bucket), unflatten(result, bucket))
                return
            self._keep_buffer(bucket_idx, result)
            views = unflatten(result.to(bucket[0].dtype), bucket)
            for tensor, view in zip(bucket, views, strict=True):
                tensor.set_(view)
