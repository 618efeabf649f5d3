"""What parameters call when autograd has added to their gradients."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from .lanes import current_stream, profiled


def may_be_quick(reducer: Any) -> bool:
    """Whether hooks of a ``GradientReducer`` need not call ``comm_ready_buckets`` each time."""
    return not (reducer.options.prof or "comm_ready_buckets" in vars(reducer))


def watch(reducer: Any) -> None:
    """Hook all parameters of the module that require gradients, or did at an earlier forward.

    A graph that was made before a parameter was frozen still computes its gradient after it is
    unfrozen.
    """
    params = list(reducer.module.parameters())
    frozen = {id(param) for param in params if not param.requires_grad}
    for key, handle in reducer.hooks.items():
        if key not in frozen:
            handle.remove()
    owner = weakref.ref(reducer)  # parameters must not keep their reducer alive
    quick, early, streams = reducer.quick, reducer.early, reducer.gradient_streams
    waiting, missing = reducer.slots.waiting, reducer.slots.missing

    def on_gradient(param: Tensor) -> None:
        # The first lines are what comm_ready_buckets does in nearly all cases, for 0.6 us.
        if quick and param.requires_grad:
            bucket = waiting.pop(id(param), None)
            if bucket is not None:
                if early and (move := early.get(id(param))) is not None:
                    move()
                if streams:  # on accelerators
                    streams.add(current_stream(param.device))
                missing[bucket] -= 1
                if not missing[bucket]:
                    owner().launch_complete(bucket)
                return
        reducer = owner()
        if reducer is None:
            return
        if not reducer.options.prof:  # ranges would cost 4 us per parameter and step
            reducer.comm_ready_buckets(param)
            return
        with profiled("allreduce_hook"), profiled("comm_ready_buckets"):
            reducer.comm_ready_buckets(param)

    on_gradient.reducer = owner
    reducer.hooks = {key: handle for key, handle in reducer.hooks.items() if key in frozen} | {
        id(param): param.register_post_accumulate_grad_hook(on_gradient)
        for param in params
        if param.requires_grad
    }
    _find_sharers(reducer, params)


def _find_sharers(reducer: Any, params: list[Tensor]) -> None:
    """Tell reducers about the parameters that another one reduces, too."""
    for param in params:
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            other = getattr(hook, "reducer", lambda: None)()
            if other is not None and other is not reducer:
                other.note_shared(param, reducer)
                reducer.note_shared(param, other)
