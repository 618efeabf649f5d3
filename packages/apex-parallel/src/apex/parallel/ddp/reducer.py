"""DistributedDataParallel's reducer: gradients fill buckets, which leave to be reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ..._lost_ranks import explained
from . import checks, hooks, plan
from .buckets import Bucket
from .lanes import Lane, LaneSet, current_stream
from .parameters import Parameters
from .plan import BucketSlots
from .reduction import Options, gradient_dtype, refuse_sparse


class GradientReducer:
    """Reduces the gradients of one module, driven by autograd.

    It belongs to one process and is never pickled. No parameter keeps it alive: hooks of a
    reducer that is gone do nothing.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module, self.options = module, options
        self.allreduce_communicators: Any = None
        self.world_size: float | None = None  # None until attached to a process group
        self.divisor: int | None = None  # of the average, if not all ranks
        self.active_params: list[Tensor] = []  # require gradients, in order
        self._parameters = Parameters()
        self.needs_refresh = True  # the next backward agrees on buckets
        self.allreduce_buffers: list[Tensor | None] = []  # by bucket, if retained
        self.main_stream: Any = None  # the accelerator stream of the last forward
        self.lane_set = LaneSet()
        self.slots = BucketSlots()  # without buckets until ranks have agreed on them
        self._buckets: list[Bucket] = []
        self._delayed_buckets: list[Bucket] | None = None  # one per dtype
        self._strided = False  # parameters have the same strides on all ranks
        self._planner: plan.BucketPlanner | None = None  # records a backward without slots
        self._index_of: dict[int, int] = {}  # id(param) -> index in active_params
        self.hooks: dict[int, Any] = {}  # id(param) -> handle
        self.quick: list[bool] = []  # not empty: hooks fill slots themselves
        self.early: dict[int, Callable[[], None]] = {}  # id(param) -> what moves its gradient
        self._with_news: set[int] = set()  # id(param): grad not reduced since it grew
        self.gradient_streams: set[Any] = set()
        self._shared: set[int] = set()  # id(param) of those that another wrapper reduces, too
        self._sharers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()  # those wrappers'
        self.pending: list[tuple[int, Bucket]] = []
        self._end_of_backward: weakref.ref | None = None
        self._forward_done = False  # a forward has prepared a backward, not reduced yet
        self._is_local = False  # that forward ran in no_sync()
        # What a compiled forward leaves behind: a backward is to be prepared, local (True) or not.
        self.compiled_forward_is_local: bool | None = None
        self._reducing = False  # the running backward has brought a gradient to reduce
        self._delayed = False  # delay_allreduce at the time of the last forward

    def connect(self) -> None:
        """Attach to the default process group, which may have been destroyed and made again."""
        checks.require_process_group(checks.NAME)
        self.lane_set.connect(checks.parameters_device(self.module))
        self.needs_refresh = True
        self.world_size = float(dist.get_world_size())

    def open_lanes(self) -> None:
        """Get process groups and streams, a collective call."""
        self.lane_set.open(self.options.num_allreduce_streams, self.allreduce_communicators)

    def prepare_backward(self, module: nn.Module, is_local: bool = False) -> None:
        """Get ready for the backward of a forward of ``module`` that now begins.

        Args:
            is_local: its gradients accumulate on this rank, as with ``disable_allreduce()``.
        """
        if not is_local:
            self._refuse_two_sums()
        self.module, self._is_local = module, is_local
        self.compiled_forward_is_local = None
        if not self.lane_set.is_connected():
            self.connect()
        self.abandon()  # what a failed backward has left
        changed = self._parameters.look(module)
        self._delayed = self.options.delay_allreduce
        if changed or self.needs_refresh or not (self._delayed or self.slots.agreed):
            self._start_again()
        if changed:
            self.create_hooks()
        self.slots.clear()
        self.allreduce_buffers = []
        self.main_stream = current_stream(self.lane_set.device)
        self.gradient_streams.clear()
        if self.main_stream is not None:
            self.gradient_streams.add(self.main_stream)
        self._forward_done, self._reducing = not is_local, False

    def _refuse_two_sums(self) -> None:
        """Raise RuntimeError if another wrapper will sum the same gradients in this backward.

        Two averages are one average; the sum of sums is not the sum.
        """
        others = [self, *(other for other in self._sharers if other._forward_done)]
        sums = [not (r.options.gradient_average or r.options._disable_allreduce) for r in others]
        if sums[0] and any(sums[1:]):
            raise RuntimeError(
                f"{checks.NAME}: another wrapper with gradient_average=False has parameters of "
                "module, too, and had a forward without a backward: gradients would be summed over "
                "the ranks twice. Wrap a module once, or call disable_allreduce() of the wrapper "
                "that is not to reduce."
            )

    def _start_again(self) -> None:
        active = [param for param in self._parameters.all if param.requires_grad]
        self.active_params, self.needs_refresh = active, True
        self._index_of = {id(param): index for index, param in enumerate(active)}
        self.slots.forget()
        self._buckets, self._delayed_buckets = [], None
        triggers = self.options.allreduce_trigger_params
        if triggers is not None:
            triggers = checks.trigger_indices(triggers, active)
        dtypes = [gradient_dtype(param) for param in active]
        numels = [param.numel() for param in active]
        sizes, limits = plan.sizes_and_limits(numels, dtypes, self.options.message_size)
        self._planner = plan.BucketPlanner(sizes, dtypes, limits, triggers)

    def create_hooks(self) -> None:
        """Watch the gradients of all parameters that require them, or did at an earlier forward."""
        hooks.watch(self)

    def note_shared(self, param: Tensor, other: GradientReducer) -> None:
        """``other`` reduces ``param``, too, and must find the gradient that autograd made."""
        self._shared.add(id(param))
        self._sharers.add(other)
        for bucket in (*self._buckets, *(self._delayed_buckets or ())):
            bucket.hand_over = bucket.hand_over and all(param is not p for p in bucket.params)

    def queue_end_of_backward(self, _gradient: Tensor | None = None) -> None:
        """Have the engine call :meth:`_finish_backward` when the running backward ends.

        Outputs call this first, so that it is the outer backward's end even where a parameter's
        gradient arrives in a nested one (reentrant checkpoints).
        """
        if not self.callback_queued:
            callback, owner = self._finish_backward, weakref.ref(self)

            def end(_: Any) -> None:
                reducer = owner()
                if reducer is not None and reducer._reducing:  # the backward has failed
                    reducer._reducing = reducer._forward_done = False
                    reducer.abandon()

            Variable._execution_engine.queue_callback(callback)
            self._end_of_backward = weakref.ref(callback, end)
            self._reducing = False

    def comm_ready_buckets(self, param: Tensor) -> None:
        """Take in the gradient of ``param`` and launch the buckets that it completes."""
        if not param.requires_grad:
            return  # frozen since its forward: torch calls hooks, but has added nothing
        refuse_sparse(param)
        key = id(param)
        if not self._reducing:
            self._with_news.add(key)
            if not self._begin(key):
                return
        index = self._index_of.get(key)
        if index is None:
            raise RuntimeError(
                f"{checks.NAME}: a parameter of shape {list(param.shape)} got a gradient, but was "
                "frozen (requires_grad=False) at the last forward through the wrapper, so ranks "
                "have not agreed to reduce it. Freeze and unfreeze before a forward, and call "
                "backward before the next freezing."
            )
        if not self._reducing:
            self.queue_end_of_backward()
            self._reducing = True
        if self._delayed or not self.slots.agreed:
            self._with_news.add(key)
            if not self._delayed:
                self._planner.add(index)
            return
        if not self.slots.is_open:
            self.slots.open()
            if hooks.may_be_quick(self):
                self.quick.append(True)
                options = self.options.reduction(self.divisor)
                for bucket in self._buckets:
                    self.early.update(bucket.early(options))
        if self.main_stream is not None:
            self.gradient_streams.add(current_stream(self.lane_set.device))
        for bucket_idx in self.slots.fill(key, index, param.shape):
            self._launch(bucket_idx)

    def _begin(self, key: int) -> bool:
        """Whether the backward that brings its first gradient, of ``key``, is to be reduced."""
        local = self.compiled_forward_is_local
        if local is not None and not self.options._disable_allreduce:
            self.prepare_backward(self.module, local)
        if self.options._disable_allreduce or self._is_local:
            return False
        if self._forward_done:
            return True
        if any(key in other._shared and other._had_forward() for other in self._sharers):
            self._with_news.discard(key)  # the wrapper that had the forward reduces it
            return False
        raise RuntimeError(
            f"{checks.NAME}: backward without a forward through the wrapper since the last "
            "reduction. Call forward once for each backward that is reduced, or accumulate "
            "gradients locally with disable_allreduce(). If something else has wrapped the same "
            "module since, delete this wrapper or disable it so."
        )

    def _had_forward(self) -> bool:
        """Whether gradients may come that are this wrapper's to reduce or to accumulate."""
        compiled = self.compiled_forward_is_local is not None
        return self._forward_done or self._reducing or self._is_local or compiled

    def launch_complete(self, bucket_idx: int) -> None:
        """Launch the buckets that may leave, now that ``bucket_idx`` has all its gradients."""
        for leaving in self.slots.complete(bucket_idx):
            self._launch(leaving)

    def _finish_backward(self) -> None:
        """Reduce what has not left yet, wait for all buckets and write the gradients."""
        if not self._reducing:
            return  # autograd.grad through an output: no parameter got a gradient
        self._reducing = self._forward_done = False
        self.quick.clear()
        self.early.clear()
        try:
            self._agree()
            if self._delayed:
                self.allreduce_fallback()
            for bucket_idx in self.slots.take_remaining():
                self._launch(bucket_idx)
            self._finish_pending()
        except BaseException:
            self.abandon()
            raise
        self._settle()
        self._with_news.clear()
        self.lane_set.join()

    def shadow_backward(self) -> None:
        """Take part in the other ranks' reduction with zeros; gradients here stay as they are."""
        self.prepare_backward(self.module)
        self._forward_done = False
        self._agree()
        buckets = self._delayed_buckets if self._delayed else self._buckets
        options, reductions = self.options.reduction(self.divisor), []
        for bucket_idx, bucket in enumerate(buckets or []):
            lane = self.lane_set.lane(bucket_idx, force_default_stream=self._delayed)
            reductions.append(bucket.launch_zeros(lane, options))
        for bucket_idx, reduction in enumerate(reductions):
            with explained(lambda at=bucket_idx: self._name_of(at), who=checks.NAME):
                reduction.wait()
        self._settle()

    def _agree(self) -> None:
        """Have lanes, the same parameters as the other ranks, and their buckets."""
        if not self.lane_set.lanes:
            self.open_lanes()
        self.lane_set.settle(False)
        if self.needs_refresh:
            named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
            what, lane = "the parameters that require gradients", self.lane_set.lanes[0]
            with explained("the comparison of parameters", who=checks.NAME):
                hashes = checks.hashes_of_all_ranks(named, lane.device, lane.group)
            self._strided = checks.check_same_on_all_ranks(hashes, what)
        if not (self._delayed or self.slots.agreed):
            self.sync_bucket_structure()
        if self._delayed and self._delayed_buckets is None:
            self._delayed_buckets = self._one_bucket_per_dtype()

    def _settle(self) -> None:
        self.lane_set.settle(True)
        self.needs_refresh = False

    def sync_bucket_structure(self) -> None:
        """Make rank 0's buckets everybody's."""
        count, lane = len(self.active_params), self.lane_set.lanes[0]
        numbers = torch.tensor(plan.encode(self._planner.plan(), count), device=lane.device)
        with explained("the broadcast of rank 0's buckets", who=checks.NAME):
            dist.broadcast(numbers, 0, group=lane.group)
        agreed = plan.decode(numbers.tolist(), count)
        self.slots.set_plan(agreed, [id(param) for param in self.active_params])
        self._buckets = [self._bucket_of(indices) for indices in agreed]

    def _one_bucket_per_dtype(self) -> list[Bucket]:
        indices: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(self.active_params):
            indices.setdefault(gradient_dtype(param), []).append(index)
        return [self._bucket_of(of_dtype) for of_dtype in indices.values()]

    def _bucket_of(self, indices: Sequence[int]) -> Bucket:
        params = [self.active_params[index] for index in indices]
        hand_over = self._shared.isdisjoint(map(id, params))
        return Bucket(params, strided=self._strided, hand_over=hand_over)

    def _launch(self, bucket_idx: int) -> None:
        lane = self.lane_set.lane(bucket_idx)
        self._reduce(self._buckets[bucket_idx], bucket_idx, lane)
        if not lane.wait_blocks:
            self._finish_pending()

    def _reduce(self, bucket: Bucket, bucket_idx: int, lane: Lane) -> None:
        is_new = None
        if self._delayed or self.slots.missing[bucket_idx]:
            arrived, news = self.slots.has_arrived, self._with_news
            is_new = [arrived(id(param)) or id(param) in news for param in bucket.params]
        self.lane_set.settle(False)
        after = {*self.gradient_streams, current_stream(self.lane_set.device)}
        with explained(lambda: self._name_of(bucket_idx), who=checks.NAME, errors=dist.DistError):
            bucket.launch(is_new, lane, self.options.reduction(self.divisor), after)
        self.pending.append((bucket_idx, bucket))

    def _finish_pending(self) -> None:
        while self.pending:
            bucket_idx, bucket = self.pending[0]
            with explained(lambda at=bucket_idx: self._name_of(at), who=checks.NAME):
                buffer = bucket.finish(self.options.retain_allreduce_buffers)
            self.pending.pop(0)
            if buffer is not None:
                self.keep_buffer(bucket_idx, buffer)

    def _name_of(self, bucket_idx: int) -> str:
        buckets = self._delayed_buckets if self._delayed else self._buckets
        mine = {id(param) for param in buckets[bucket_idx].params}
        names = [name for name, param in self.module.named_parameters() if id(param) in mine]
        listed = ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
        return f"the all-reduce of bucket {bucket_idx} of {len(buckets)} ({listed})"

    def keep_buffer(self, bucket_idx: int, buffer: Tensor) -> None:
        """Put the flat result of a bucket into ``allreduce_buffers``."""
        missing = bucket_idx + 1 - len(self.allreduce_buffers)
        self.allreduce_buffers.extend([None] * missing)
        self.allreduce_buffers[bucket_idx] = buffer

    def allreduce_fallback(self) -> None:
        """Reduce all gradients at once, one flat buffer per dtype, and wait for the result."""
        lane = self.lane_set.lane(0, force_default_stream=True)
        if self._delayed_buckets is None:
            self._delayed_buckets = self._one_bucket_per_dtype()
        for bucket_idx, bucket in enumerate(self._delayed_buckets):
            self._reduce(bucket, bucket_idx, lane)
        self._finish_pending()

    def abandon(self) -> None:
        """Give up what a backward that failed has left in flight."""
        if self.slots.is_open and self._forward_done:
            arrived = self.slots.has_arrived
            self._with_news.update(key for key in self._index_of if arrived(key))
        for _, bucket in self.pending:
            bucket.abandon()
        self.pending.clear()
        self.quick.clear()
        self.early.clear()

    @property
    def callback_queued(self) -> bool:
        """Whether a backward is running at whose end gradients are reduced.

        The autograd engine holds the only reference to the callback and drops it when a backward
        ends or fails, so this cannot go stale.
        """
        return self._end_of_backward is not None and self._end_of_backward() is not None

    @property
    def buckets(self) -> list[list[Tensor | None]]:
        """The gradients that have arrived, by bucket and slot; empty before the first backward."""
        params, arrived = self.active_params, self.slots.has_arrived
        return [
            [params[i].grad if arrived(id(params[i])) else None for i in bucket]
            for bucket in self.slots.active_i_buckets
        ]
