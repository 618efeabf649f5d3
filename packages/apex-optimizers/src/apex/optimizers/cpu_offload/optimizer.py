"""The CPUOffload optimizer class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .._shared.native.errors import check_is_no_module
from .._shared.native.writes import keep_from_tracing
from ..fused_adam import FusedAdam
from ..stepping.checkpoints import outside_inference_mode
from ..stepping.momentum import MomentumOptimizer
from ..stepping.optimizer import FusedOptimizer
from .links import Link
from .pipeline import Pipeline
from .threads import share_of_cores, threads


class CPUOffload(torch.optim.Optimizer):
    """A fused optimizer whose states live in the host's memory, and whose step the CPU computes.

    Parameters and gradients stay on their GPU. A step copies gradients to the host, in their own
    dtype, and parameters back, in parts: while the CPU steps one, the gradients of the next ones
    come and the parameters of those before go. Results are those of the optimizer itself on the
    CPU, bit by bit.

    Args:
        params: parameters, or dicts with parameter groups, as for every ``torch.optim`` optimizer.
            On NVIDIA or AMD GPUs. Those on the CPU, such as the shards of FSDP2's
            ``CPUOffloadPolicy``, are stepped where they are, without any copy.
        optimizer_class: FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad, FusedNovoGrad or FusedLARS.
        offload_gradients: let gradients come to the host during the backward, and set ``grad`` to
            None on the device at once. Those of several backwards are added on the host, in the
            gradient's dtype as on the device. A step uses them up. Without it the device keeps its
            gradients until :meth:`zero_grad`, and a step takes them as they are then: clipped,
            unscaled, accumulated.
        minimal_size: parameters of fewer elements, and those that were frozen when they were given,
            are stepped on their device, where their states are, too.
        cpu_threads: threads of a step; by default the cores that this process may use, divided by
            ``LOCAL_WORLD_SIZE``, the number of this host's processes that ``torchrun`` sets.
        link: what parameters travel over instead of a GPU's streams, those of the CPU, too.
        options: those of ``optimizer_class``, such as ``lr`` or ``master_weights``.

    State:
        That of ``optimizer_class``, in :meth:`state_dict`, too: checkpoints load in both
        directions. Tensors are on the CPU. On the host there are, beside the state, a copy of each
        parameter and a buffer for its gradient, both pinned; with ``offload_gradients`` another
        buffer where several backwards come before a step.

    Attributes:
        host_optimizer: the optimizer of the copies on the host.

    Raises:
        TypeError: ``optimizer_class`` is none of those above, a parameter is on another kind of
            device or a DTensor that is not on the CPU, or an option is unknown.
        ValueError: an option is out of range; ``capturable`` is set, though no CUDA graph can hold
            a step that the CPU computes; or ``offload_gradients`` in one of several processes: the
            gradients would leave before they are reduced.

    Note:
        Parameters that somebody changed between two steps come to the host again; a change through
        ``param.data`` is not noticed, see :meth:`fetch_parameters`. Masters then follow as they do
        without CPUOffload. With ``stochastic_rounding`` the random bits are others than without
        CPUOffload, and the same in every run.

    Source:
        Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training*, USENIX ATC 2021. The
        constructor is that of torchao's ``CPUOffloadOptimizer``.

    Example:
        >>> model = torch.nn.Linear(128, 64)
        >>> optimizer = CPUOffload(model.parameters(), FusedAdam, lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(2, 128)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[FusedOptimizer] = FusedAdam,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        cpu_threads: int | None = None,
        link: Link | None = None,
        **options: Any,
    ) -> None:
        _check_class(optimizer_class)
        check_is_no_module("CPUOffload", params)
        if options.get("capturable"):
            raise ValueError(
                "CPUOffload: capturable must be False, got True: the CPU computes the step, which "
                "no CUDA graph can hold."
            )
        if offload_gradients and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "CPUOffload: offload_gradients must be False where there are several processes "
                f"({dist.get_world_size()}): it would take gradients before "
                "DistributedDataParallel, or whatever adds those of all processes, has reduced "
                "them."
            )
        if cpu_threads is not None and not cpu_threads >= 1:
            raise ValueError(f"CPUOffload: cpu_threads must be >= 1 or None, got {cpu_threads}.")
        keep_from_tracing(type(self))
        self.offload_gradients = offload_gradients
        self.cpu_threads = cpu_threads
        self._pipeline = Pipeline(offload_gradients, minimal_size, link)
        self._step_supports_amp_scaling = offload_gradients  # to refuse what it cannot support
        self.host_optimizer: Any = None
        super().__init__(params, {})
        with outside_inference_mode(), torch.no_grad():
            host = optimizer_class(list(map(self._on_host, self.param_groups)), **options)
        host.pipeline = self._pipeline
        self._pipeline.grad_name = host.layout.grad_name
        self.host_optimizer, self.defaults = host, host.defaults
        self._adopt()
        self._prepare()

    def _on_host(self, group: dict[str, Any]) -> dict[str, Any]:
        hosts = list(map(self._pipeline.host_of, group["params"]))
        if "param_names" in group:
            hosts = list(zip(group["param_names"], hosts, strict=True))
        return {**{k: v for k, v in group.items() if k != "param_names"}, "params": hosts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a hyper-parameter of the group is out of range, or a parameter is there
                twice.
            TypeError: a parameter has a dtype, or is on a device, that is not supported.
        """
        if self.host_optimizer is None:  # the constructor adds all at once
            super().add_param_group(param_group)
            return
        self._align()
        super().add_param_group(param_group)
        try:
            with outside_inference_mode(), torch.no_grad():
                self.host_optimizer.add_param_group(self._on_host(self.param_groups[-1]))
        except (TypeError, ValueError, RuntimeError):
            for param in self.param_groups.pop()["params"]:
                self._pipeline.drop(param)
            raise
        self._adopt()
        self._prepare()

    def step(self, closure: Callable[[], Any] | None = None, **limits: Any) -> Any:
        """Take one step; parameters without gradient are left alone.

        Args:
            closure: evaluates the model again and returns the loss.
            limits: what the ``step`` of ``optimizer_class`` takes, such as FusedAdam's ``max_norm``
                and ``skip_nonfinite``. A norm of all gradients waits for all of them.

        Returns:
            What ``closure`` returned, or None. The CPU has stepped then; parameters may still be
            under way to the device, whose work from now on sees them.

        Raises:
            RuntimeError: a gradient cannot be used, and no parameter and no state has been changed
                (what ``offload_gradients`` has taken waits on the host for the next step or
                :meth:`zero_grad`); or gradients are scaled although ``offload_gradients`` takes
                them before they could be unscaled.
        """
        if self.offload_gradients and (hasattr(self, "_amp_stash") or hasattr(self, "grad_scale")):
            self._refuse_scaling()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_done = False
        with outside_inference_mode(), torch.no_grad():
            self._align()
            try:
                self._pipeline.begin(self.param_groups)
                with threads(self.cpu_threads or share_of_cores()):
                    self.host_optimizer.step(**limits)
                is_done = True
            finally:
                self._adopt()
                self._pipeline.end(is_done)
        return loss

    def _refuse_scaling(self) -> NoReturn:
        raise RuntimeError(
            "CPUOffload.step: a loss scaler has to unscale gradients, which offload_gradients=True "
            "takes from the device during the backward. Use bfloat16 without a loss scale, or "
            "offload_gradients=False."
        )

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients, where ``optimizer_class`` has taken it."""
        return getattr(self.host_optimizer, "grad_norm", None)

    def host_copy(self, param: Tensor) -> Tensor:
        """What :attr:`host_optimizer` knows a parameter by: its copy on the host, or itself."""
        return self._pipeline.host_of(param)

    def fetch_parameters(self) -> None:
        """Copy all parameters to the host.

        For changes through ``param.data``, which no count of a tensor tells.
        """
        self._prepare(fetches_all=True)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: set them to None, or to zero.

        Args:
            set_to_none: defaults to what ``optimizer_class`` does.
        """
        host, is_none = self.host_optimizer, set_to_none
        if is_none is None:
            is_none = host.set_grad_none or isinstance(host, MomentumOptimizer)
        super().zero_grad(is_none)
        name = self._pipeline.grad_name
        for param in _params(self.param_groups) if name != "grad" else ():
            setattr(param, name, None)
        self._pipeline.clear_gradients(is_none)

    def state_dict(self) -> dict[str, Any]:
        """The state, which ``optimizer_class`` loads, too."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._prepare()
        saved = self.host_optimizer.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            replaced = hook(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of ``optimizer_class``, or whatever that loads.

        Raises:
            ValueError: groups, or shapes of the state, do not fit. Nothing is changed then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._prepare()
        self.host_optimizer.load_state_dict(state_dict)
        self._adopt()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "CPUOffload cannot be copied or pickled: its parameters are linked to copies on the "
            "host. Save state_dict(), and load it into another CPUOffload."
        )

    def _prepare(self, fetches_all: bool = False) -> None:
        """Let the host know all that a step would find."""
        with outside_inference_mode(), torch.no_grad():
            self._align()
            self._pipeline.fetch(fetches_all)

    def _align(self) -> None:
        """Give the host's groups and states what ours are; users change ours alone."""
        host = self.host_optimizer
        for group, own in zip(self.param_groups, host.param_groups, strict=True):
            params = [self._pipeline.host_of(param) for param in group["params"]]
            own.clear()
            own.update({**group, "params": params})
        _copy_entries(host.state, self.state, zip(*self._both(), strict=True))
        if len(host.state) > len(self.state):  # a parameter has another copy now, or none
            own = {id(param) for param in _params(host.param_groups)}
            for key in [key for key in host.state if id(key) not in own]:
                del host.state[key]
        self._pipeline.cut(self.param_groups)

    def _adopt(self) -> None:
        """Take over what the host's groups and states have become."""
        host = self.host_optimizer
        for group, own in zip(self.param_groups, host.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update({**own, "params": params})
        hosts, params = self._both()
        if not isinstance(self.state, defaultdict):
            self.state = defaultdict(dict, self.state)
        _copy_entries(self.state, host.state, zip(params, hosts, strict=True))

    def _both(self) -> tuple[list[Tensor], list[Tensor]]:
        return _params(self.host_optimizer.param_groups), _params(self.param_groups)


def _params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def _copy_entries(
    target: dict[Any, Any], source: dict[Any, Any], keys: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Let entries of ``target`` be those of ``source``, which has them by the second keys."""
    for key, other in keys:
        entry = source.get(other)
        if not entry:
            target.pop(key, None)
        elif target.get(key) is not entry:
            target[key] = entry


def _check_class(optimizer_class: object) -> None:
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)
    if not is_class or optimizer_class.capturable:
        got = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise TypeError(
            "CPUOffload: optimizer_class must be FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad, "
            f"FusedNovoGrad or FusedLARS, got {got}."
        )
