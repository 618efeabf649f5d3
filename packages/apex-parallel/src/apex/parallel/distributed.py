"""DistributedDataParallel: averages gradients over ranks, bucket by bucket, during backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from .ddp import checks
from .ddp.broadcast import broadcast_parameters
from .ddp.flat_tensors import (
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    flatten,
    import_flatten_impl,
    imported_flatten_impl,
    split_by_type,
    split_half_float_double_bfloat16,
    unflatten,
)
from .ddp.join import NOT_JOINING, ReducerJoinHook, tell_joined_ranks
from .ddp.lanes import current_stream, profiled
from .ddp.on_demand import Reducer
from .ddp.outputs import tensors_of
from .ddp.reducer import GradientReducer
from .ddp.reduction import FlatReduction, Options

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "import_flatten_impl",
    "imported_flatten_impl",
    "split_by_type",
    "split_half_float_double_bfloat16",
    "unflatten",
]


class _Kept:
    """An attribute of the wrapper that its reducer, or a part of that, keeps.

    Args:
        part: where in the wrapper it is kept.
        writable: users may set it.
    """

    def __init__(self, part: str, *, writable: bool = True) -> None:
        self._part_of, self._writable = attrgetter(part), writable

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(self._part_of(wrapper), self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if not self._writable:
            raise AttributeError(f"{type(wrapper).__name__}: {self._name} can only be read.")
        setattr(self._part_of(wrapper), self._name, value)


# What belongs to this process, or to a context that is open in it.
_NOT_PICKLED = {"_reducer", "_join_config", "_reduces", "_divides_by_all"}


class DistributedDataParallel(nn.Module):
    r"""Wraps a module so that after ``backward`` every gradient is its average over all ranks.

    .. math:: g \leftarrow \frac{f}{W} \sum_{r=1}^{W} \frac{g_r}{f}

    with :math:`W` ranks and :math:`f` = ``gradient_predivide_factor``. The first backward records
    the order in which gradients arrive and cuts it into flat buckets; all ranks take those of rank
    0. In later backwards a bucket's all-reduce starts as soon as it is complete, while backward
    goes on. A rank that did not use a parameter contributes zeros; a parameter that no rank used is
    left alone. Parameters (not buffers) are broadcast from rank 0 at construction.

    Args:
        module: the network; all parameters on one device, GPU parameters with NCCL.
        message_size: a bucket leaves when it holds at least this many elements. The default stands
            for torch's buckets: 1 MiB for the first, 25 MiB for the others.
        delay_allreduce: reduce everything once, at the end of backward.
        shared_param: must be None.
        allreduce_trigger_params: parameters of ``module``; the bucket of a dtype leaves when one
            of them gets its gradient, and ``message_size`` is not looked at. An empty list makes
            one bucket per dtype.
        retain_allreduce_buffers: make gradients views of flat buffers and keep those in
            ``allreduce_buffers``. With ``allreduce_always_fp32`` the 16-bit gradients are views
            of a cast copy, and what is kept is the float32 result.
        allreduce_always_fp32: sum 16-bit gradients in float32 (wider ones as they are).
        num_allreduce_streams: rotate buckets over this number of process groups of the wrapper's
            own and, on GPUs, streams.
        allreduce_communicators: ``(process groups, streams)`` to rotate over instead of new ones,
            each group spanning all ranks, for no other use; streams are None on the CPU. Not
            pickled.
        gradient_average: divide by the number of ranks; if False, only ``1 / f`` is applied.
        gradient_predivide_factor: :math:`f > 0`, against overflow of the sum.
        gradient_average_split_factor: has no effect, as in Apex; a value other than None warns.
        prof: name the phases for torch.profiler and, on NVIDIA GPUs, NVTX.

    Raises:
        RuntimeError: no process group; ranks whose parameters differ in name, shape or dtype; in
            backward: a second backward after one forward, a parameter that was frozen at the last
            forward, or another rank has failed (the error names ranks and bucket).
        ValueError: an argument is out of range or contradicts another.
        TypeError: ``module`` is not a module.
        NotImplementedError: in backward, for sparse gradients.

    Note:
        A gradient that autograd made in this backward is replaced by a slot of its bucket, which
        saves a copy; a gradient that was there before is written in place. So read ``.grad`` after
        backward. A gradient that somebody still holds is never overwritten by a later backward.
        After a backward that failed, gradients may be reduced or not: set them to zero.

        You may change between iterations which parameters require gradients, and their dtypes: on
        all ranks alike, and never between a forward and its backward. Every rank's backward must
        reach at least one parameter. Call the wrapper, not ``wrapper.module``, for the forward of a
        reduced backward.

        Every wrapper reduces on process groups of its own, so its collectives never mix with those
        of another wrapper or of SyncBatchNorm. The groups are made when the wrapper is constructed;
        a copy made by pickle or deepcopy makes them at the end of its first reduced backward. Later
        wrappers take over the groups of a wrapper that was garbage collected. Therefore all ranks
        must construct their wrappers in the same order, and run the first backward of copies in the
        same order. If wrappers share a loss, all ranks must call them in the same order. With NCCL,
        kernels of two groups that ranks launch in different orders may wait for each other for
        ever: if ranks use different parameters beside another wrapper or SyncBatchNorm, give
        ``delay_allreduce=True``.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> loss_function(model(images), labels).backward()  # gradients are averages now
        >>> optimizer.step()
    """

    warn_on_half = False  # gloo, too, sums 16-bit gradients
    _join_config = NOT_JOINING  # where torch's Join writes its own
    message_size = _Kept("_reducer.options")
    delay_allreduce = _Kept("_reducer.options")
    prof = _Kept("_reducer.options")
    allreduce_trigger_params = _Kept("_reducer.options")
    retain_allreduce_buffers = _Kept("_reducer.options")
    allreduce_always_fp32 = _Kept("_reducer.options")
    num_allreduce_streams = _Kept("_reducer.options")
    gradient_average = _Kept("_reducer.options")
    gradient_predivide_factor = _Kept("_reducer.options")
    _disable_allreduce = _Kept("_reducer.options")
    allreduce_communicators = _Kept("_reducer")
    world_size = _Kept("_reducer")
    active_params = _Kept("_reducer")
    needs_refresh = _Kept("_reducer")
    allreduce_buffers = _Kept("_reducer")
    main_stream = _Kept("_reducer")
    callback_queued = _Kept("_reducer", writable=False)
    buckets = _Kept("_reducer", writable=False)
    active_i_buckets = _Kept("_reducer.slots", writable=False)
    bucket_sizes = _Kept("_reducer.slots", writable=False)
    num_buckets = _Kept("_reducer.slots", writable=False)
    next_bucket = _Kept("_reducer.slots", writable=False)
    ready_buckets_not_reduced = _Kept("_reducer.slots", writable=False)
    bucket_streams = _Kept("_reducer.lane_set", writable=False)
    bucket_events = _Kept("_reducer.lane_set", writable=False)
    bucket_pgs = _Kept("_reducer.lane_set", writable=False)

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: None = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        checks.require_process_group(checks.NAME)
        if allreduce_trigger_params is not None:
            allreduce_trigger_params = list(allreduce_trigger_params)  # may be an iterator
        checks.check_numbers(message_size, num_allreduce_streams, gradient_predivide_factor)
        checks.check_combination(
            delay_allreduce, shared_param, allreduce_trigger_params, num_allreduce_streams
        )
        device = checks.parameters_device(module)
        checks.check_communicators(allreduce_communicators, num_allreduce_streams, device)
        checks.check_triggers(allreduce_trigger_params, module)
        checks.warn_split_factor(gradient_average_split_factor)
        self.module = module
        self._reduces = True  # not in no_sync()
        self._divides_by_all = True  # in join()
        options = Options(
            message_size=message_size,
            delay_allreduce=delay_allreduce,
            prof=prof,
            allreduce_trigger_params=allreduce_trigger_params,
            retain_allreduce_buffers=retain_allreduce_buffers,
            allreduce_always_fp32=allreduce_always_fp32,
            num_allreduce_streams=num_allreduce_streams,
            gradient_average=gradient_average,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        self._reducer = self._make_reducer(options)
        self.allreduce_communicators = allreduce_communicators
        broadcast_parameters(module)
        self._reducer.connect()
        self._reducer.open_lanes()
        self.create_hooks()

    def _make_reducer(self, options: Options) -> GradientReducer:
        """A reducer that calls the steps of a subclass, where it overrides any."""
        reducer = GradientReducer(self.module, options)
        for name in (
            "create_hooks",
            "comm_ready_buckets",
            "sync_bucket_structure",
            "allreduce_fallback",
        ):
            if getattr(type(self), name) is not getattr(DistributedDataParallel, name):
                step = weakref.WeakMethod(getattr(self, name))  # or only gc would free the two
                setattr(reducer, name, lambda *given, step=step: step()(*given))
        return reducer

    def __getstate__(self) -> dict[str, Any]:
        """Module and options; the reducer with its process groups, streams and hooks stays here."""
        state = {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}
        return {**state, **vars(self._reducer.options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore module, options and hooks; the first reduced backward opens the lanes."""
        state = dict(state)
        options = Options(**{entry.name: state.pop(entry.name) for entry in fields(Options)})
        super().__setstate__(state)
        self._reduces = self._divides_by_all = True
        self._reducer = self._make_reducer(options)
        self.create_hooks()

    def enable_allreduce(self) -> None:
        """Reduce gradients in the backwards that follow, with what has accumulated so far."""
        self._disable_allreduce = False

    def disable_allreduce(self) -> None:
        """Let gradients accumulate locally in the backwards that follow."""
        self._disable_allreduce = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context: gradients of forwards inside accumulate locally, wherever their backward runs.

        As with torch's, the last forward decides: the backward of a forward before the context is
        reduced even inside it. The next reduced backward includes what has accumulated.

        Example:
            >>> with model.no_sync():
            ...     loss_function(model(images[0]), labels[0]).backward()
            >>> loss_function(model(images[1]), labels[1]).backward()  # reduces the sum of both
        """
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context: ranks may have different numbers of inputs.

        A rank that leaves the context takes part in the others' reductions with zeros until all
        have left. Then all take parameters and buffers of one that was last.

        Args:
            divide_by_initial_world_size: average over all ranks; if False, over those that still
                have inputs.
            enable: if False, the context does nothing.
            throw_on_early_termination: raise RuntimeError on all ranks when one has no inputs left.

        Note:
            Inside, a forward says whether its backward is reduced, so call ``disable_allreduce()``
            before it. Modules with collectives of their own, such as SyncBatchNorm, do not work.

        Example:
            >>> with model.join():
            ...     for images, labels in loader:  # of another length on every rank
            ...         optimizer.zero_grad()
            ...         loss_function(model(images), labels).backward()
            ...         optimizer.step()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> ReducerJoinHook:
        """What a rank without inputs does; for ``torch.distributed.algorithms.join.Join``.

        Args:
            kwargs: ``divide_by_initial_world_size``, by default True, as in :meth:`join`.
        """
        self._divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if not self._reducer.lane_set.is_connected():  # a copy
            self._reducer.connect()
        return ReducerJoinHook(self, self._divides_by_all)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters lie."""
        return self._reducer.lane_set.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All ranks."""
        return dist.group.WORLD

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and, unless gradients are off, prepare the reduction of its backward."""
        joins = self._join_config.enable
        if torch.compiler.is_compiling() and not joins:
            # Nothing below can be traced: the first gradient of the backward makes up for it.
            if torch.is_grad_enabled():
                self._reducer.compiled_forward_is_local = not self._reduces
            return self.module(*inputs, **kwargs)
        has_backward = torch.is_grad_enabled()
        if has_backward:
            with profiled("forward pass DDP logic") if self.prof else nullcontext():
                self._reducer.prepare_backward(self.module, is_local=not self._reduces)
        if joins:
            Join.notify_join_context(self)
            is_reduced = has_backward and self._reduces and not self._disable_allreduce
            tell_joined_ranks(self._reducer, is_reduced, self._divides_by_all)
        if not has_backward:
            return self.module(*inputs, **kwargs)
        output = self.module(*inputs, **kwargs)
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._reducer.queue_end_of_backward)
        return output

    def create_hooks(self) -> None:
        """Watch the gradients of all parameters that require them, or did at an earlier forward."""
        GradientReducer.create_hooks(self._reducer)

    def comm_ready_buckets(self, param: Tensor) -> None:
        """Take in the gradient of ``param`` and launch the buckets that it completes."""
        GradientReducer.comm_ready_buckets(self._reducer, param)

    def sync_bucket_structure(self) -> None:
        """Make rank 0's buckets everybody's."""
        GradientReducer.sync_bucket_structure(self._reducer)

    def allreduce_fallback(self) -> None:
        """Reduce all gradients at once, one flat buffer per dtype, and wait for the result."""
        GradientReducer.allreduce_fallback(self._reducer)

    def allreduce_bucket(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool
    ) -> Tensor:
        """The flat, reduced values of ``bucket`` (tensors of one dtype), which is not changed.

        Args:
            bucket_idx: chooses the stream and process group.
            force_default_stream: use the current stream and the first process group instead.
        """
        lane = self._reducer.lane_set.lane(bucket_idx, force_default_stream)
        options = self._reducer.options.reduction()
        with torch.no_grad(), lane.entered([current_stream(lane.device)]):
            flat = flatten(bucket)
            result = FlatReduction(flat, flat.numel(), lane, options).wait()
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
            self._reducer.keep_buffer(bucket_idx, result)
            views = unflatten(result.to(bucket[0].dtype), bucket)
            for tensor, view in zip(bucket, views, strict=True):
                tensor.set_(view)


# Not a base class: ``Joinable.__init__`` would call the constructor of a user's second base class,
# without arguments.
Joinable.register(DistributedDataParallel)
