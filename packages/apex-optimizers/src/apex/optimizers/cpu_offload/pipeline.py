"""Parameters of a device, their copies on the host, and what is under way between them.

While the CPU steps a bucket, gradients of the next ones come, and parameters of those before go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import Bucket
from ..stepping.checks import check_dense, check_gradients
from ..stepping.sharding import is_sharded
from .links import HostMemory, Link, StreamLink, Trip

_NAME = "CPUOffload"
# Elements of a bucket: the first one's gradients and the last one's parameters overlap with no
# step, and a launch takes about 100 us.
_PART = 1 << 21


class Mirror:
    """A parameter of a device, with what the host has of it."""

    def __init__(self, param: Tensor, link: Link, memory: HostMemory) -> None:
        check_dense(_NAME, [param])
        self.param, self.link, self.memory = param, link, memory
        self.device = param.device
        self.host = memory.like(param, param.dtype)
        self.part = self.order = 0
        self.known: Any = None  # the parameter's state when the host had the same values
        self.gradient: Tensor | None = None  # the host's, if there is any
        self._buffers: list[Tensor] = []  # for a gradient, and for another one to be added
        self._is_added = True
        self.coming: list[Trip] = []
        self.going: Trip | None = None
        self.hook: Any = None  # of the parameter, where gradients are taken

    def mark(self) -> Any:
        return self.param._version, self.param.data_ptr()

    def is_outdated(self) -> bool:
        """Whether the host's copy is of another kind, or for another device, than the parameter."""
        own, now = self.host, self.param
        return (self.device, own.dtype, own.shape, own.stride()) != (
            now.device,
            now.dtype,
            now.shape,
            now.stride(),
        )

    def renew(self, link: Link, memory: HostMemory) -> None:
        """Give the host's copy, and its gradient, the parameter's kind."""
        self.settle()
        check_dense(_NAME, [self.param])
        self.link, self.memory, self.device = link, memory, self.param.device
        self.host.data = self._like(self.param.dtype)
        self.known, self._buffers, before = None, [], self.gradient
        self.gradient = None
        if before is not None and before.shape == self.param.shape:
            self.gradient = self._like(self.param.dtype).copy_(before)
            self._buffers = [self.gradient]

    def _like(self, dtype: torch.dtype) -> Tensor:
        return self.memory.like(self.param, dtype)

    def place_for(self, grad: Tensor) -> Tensor:
        """Where a gradient may arrive. Nothing has changed before :meth:`accept`."""
        if self.gradient is not None:
            self.settle()  # the buffer for a second one may be needed again
        if self._buffers and self._buffers[0].dtype != grad.dtype:
            self._buffers = [self._like(grad.dtype)]
            if self.gradient is not None:
                self.gradient = self._buffers[0].copy_(self.gradient)
        number = 0 if self.gradient is None else 1
        if len(self._buffers) == number:
            self._buffers.append(self._like(grad.dtype))
        return self._buffers[number]

    def accept(self, place: Tensor) -> None:
        """A gradient is under way to this place; a second one is added when it is there."""
        if place is self._buffers[0]:
            self.gradient = place
        else:
            self._is_added = False

    def settle(self) -> None:
        """Wait until the host may read, and write, all that is here."""
        trips = [*self.coming, *([self.going] if self.going is not None else [])]
        self.coming, self.going = [], None
        try:
            for trip in trips:
                trip.synchronize()
        except BaseException:
            self.known = None  # nobody knows what the host has now
            self.forget_gradient()
            raise
        if not self._is_added:
            self._is_added = True
            self.gradient += self._buffers[1]

    def forget_gradient(self) -> None:
        self.gradient, self._is_added = None, True


class Pipeline:
    """What a fused optimizer on the host asks before it reads gradients and when it has stepped.

    Args:
        offload_gradients: whether gradients are taken from the device during the backward.
        minimal_size: parameters of fewer elements have no mirror.
        link: of all parameters; None: those on GPUs have one.
    """

    def __init__(self, offload_gradients: bool, minimal_size: int, link: Link | None) -> None:
        self._takes, self._minimal_size, self._link = offload_gradients, minimal_size, link
        self.grad_name = "grad"
        self._links: dict[Any, tuple[Link, HostMemory]] = {}
        self._mirrors: dict[Tensor, Mirror] = {}  # by parameter
        self._by_host: dict[int, Mirror] = {}
        self._count = 0

    # What the optimizer on the host calls.

    def part_of(self, host: Tensor) -> int | None:
        """Parameters of different parts are in different buckets."""
        mirror = self._by_host.get(id(host))
        return None if mirror is None else mirror.part

    def wait(self, bucket: Bucket) -> None:
        """Wait for a bucket's gradients and parameters."""
        for mirror in self._of(bucket.params):
            mirror.settle()

    def send(self, bucket: Bucket) -> None:
        """Send the parameters of a bucket that was stepped."""
        for mirrors in _by_link(self._of(bucket.params)):
            trip = mirrors[0].link.send(*_pairs(mirrors))
            for mirror in mirrors:
                mirror.going, mirror.known = trip, mirror.mark()

    def order(self, bucket: Bucket) -> int:
        """When the last gradient of a bucket was asked for; -1: it was never elsewhere."""
        return max((mirror.order for mirror in self._of(bucket.params)), default=-1)

    # What CPUOffload calls.

    def host_of(self, param: Tensor) -> Tensor:
        """The host's copy of a parameter, or the parameter itself where it has none."""
        mirror = self._mirrors.get(param)
        if not self._is_far(param):
            self.drop(param)
            return param
        if mirror is None:
            if not (param.requires_grad and param.numel() >= self._minimal_size):
                return param
            mirror = self._mirrors[param] = Mirror(param, *self._way(param))
            self._by_host[id(mirror.host)] = mirror
            if self._takes:
                hook = _taking(weakref.ref(self))
                mirror.hook = param.register_post_accumulate_grad_hook(hook)
        elif mirror.is_outdated():
            mirror.renew(*self._way(param))
        return mirror.host

    def drop(self, param: Tensor) -> None:
        """Forget a parameter; a gradient that was taken becomes its own again."""
        mirror = self._mirrors.pop(param, None)
        if mirror is None:
            return
        mirror.settle()
        del self._by_host[id(mirror.host)]
        if mirror.hook is not None:
            mirror.hook.remove()
        if self._takes and mirror.gradient is not None and param.grad is None:
            param.grad = mirror.gradient.to(param.device, param.dtype)

    def cut(self, groups: Iterable[dict[str, Any]]) -> None:
        """Cut each group into parts that are stepped one after another."""
        part = 0
        for group in groups:
            part, elements = part + 1, 0
            for mirror in self._found(group["params"]):
                if elements and elements + mirror.param.numel() > _PART:
                    part, elements = part + 1, 0
                mirror.part = part
                elements += mirror.param.numel()

    def begin(self, groups: Iterable[dict[str, Any]]) -> None:
        """Let all gradients, and parameters that were changed, come to the host.

        Raises:
            RuntimeError: a gradient cannot be used; nothing has been changed.
        """
        mirrors = [m for group in groups for m in self._found(group["params"])]
        grads = [getattr(m.param, self.grad_name, None) for m in mirrors]
        present = [(m, g) for m, g in zip(mirrors, grads, strict=True) if g is not None]
        params, given = [m.param for m, _ in present], [g for _, g in present]
        check_gradients(f"{_NAME}.step", params, given, any_dtype=self.grad_name != "grad")
        parts: dict[tuple[int, int], list[tuple[Mirror, Tensor, Tensor]]] = {}
        for mirror, grad in zip(mirrors, grads, strict=True):
            jobs = parts.setdefault((id(mirror.link), mirror.part), [])
            if not self._takes:
                mirror.forget_gradient()
            if grad is not None:
                jobs.append((mirror, mirror.place_for(grad), grad))
            has_gradient = grad is not None or mirror.gradient is not None
            if has_gradient and mirror.known != mirror.mark():
                mirror.settle()
                jobs.append((mirror, mirror.host, mirror.param))
        for jobs in filter(None, parts.values()):
            self._receive(jobs)
        for mirror in mirrors:
            setattr(mirror.host, self.grad_name, mirror.gradient)

    def end(self, is_done: bool) -> None:
        """Let the devices see what was sent; gradients that were taken are used up by a step."""
        for mirror in self._mirrors.values():
            setattr(mirror.host, self.grad_name, None)
            if mirror.coming:
                mirror.settle()  # the device's gradient may be changed from now on
            if is_done and self._takes:
                mirror.forget_gradient()
        for link, _ in self._links.values():
            link.join()

    def fetch(self, all_of_them: bool) -> None:
        """Let parameters that were changed, or all, come to the host, and wait for them."""
        for mirror in self._mirrors.values():
            if all_of_them or mirror.known != mirror.mark():
                mirror.settle()
                self._receive([(mirror, mirror.host, mirror.param)])
        for mirror in self._mirrors.values():
            mirror.settle()

    def clear_gradients(self, set_to_none: bool) -> None:
        for mirror in self._mirrors.values():
            if set_to_none:
                mirror.forget_gradient()
            elif mirror.gradient is not None:
                mirror.settle()
                mirror.gradient.zero_()

    def take(self, param: Tensor) -> None:
        """Let a gradient come to the host, and forget it on the device."""
        mirror, grad = self._mirrors.get(param), param.grad
        if mirror is None or grad is None or grad.layout != torch.strided or mirror.is_outdated():
            return
        with torch.no_grad():
            self._receive([(mirror, mirror.place_for(grad), grad)])

    def _receive(self, jobs: Sequence[tuple[Mirror, Tensor, Tensor]]) -> None:
        """Let gradients and parameters of one link come; where it fails nothing has changed."""
        mirrors, hosts, devices = zip(*jobs, strict=True)
        trip = mirrors[0].link.receive(hosts, devices)
        self._count += 1
        for mirror, host, device in jobs:
            mirror.coming.append(trip)
            mirror.order = self._count
            if host is mirror.host:
                mirror.known = mirror.mark()
                continue
            mirror.accept(host)
            if self._takes and getattr(mirror.param, self.grad_name, None) is device:
                setattr(mirror.param, self.grad_name, None)

    def _of(self, hosts: Iterable[Tensor]) -> list[Mirror]:
        found = (self._by_host.get(id(host)) for host in hosts)
        return [mirror for mirror in found if mirror is not None]

    def _found(self, params: Iterable[Tensor]) -> list[Mirror]:
        return [self._mirrors[param] for param in params if param in self._mirrors]

    def _is_far(self, param: Tensor) -> bool:
        return (self._link is not None or param.device.type != "cpu") and param.numel() > 0

    def _way(self, param: Tensor) -> tuple[Link, HostMemory]:
        if is_sharded(param):
            raise TypeError(
                f"{_NAME}: params has a DTensor on {param.device}; its shards must be on the CPU "
                "already, as with fully_shard(..., offload_policy=CPUOffloadPolicy())."
            )
        key = param.device
        if key not in self._links:
            if self._link is None and key.type != "cuda":
                raise TypeError(
                    f"{_NAME}: params has a tensor on {key}; expected an NVIDIA or AMD GPU, which "
                    "torch calls cuda, or the CPU."
                )
            link = StreamLink(key) if self._link is None else self._link
            self._links[key] = link, HostMemory(link.is_pinned)
        return self._links[key]


def _by_link(mirrors: Iterable[Mirror]) -> Iterable[list[Mirror]]:
    found: dict[int, list[Mirror]] = {}
    for mirror in mirrors:
        found.setdefault(id(mirror.link), []).append(mirror)
    return found.values()


def _pairs(mirrors: Sequence[Mirror]) -> tuple[list[Tensor], list[Tensor]]:
    return [m.host for m in mirrors], [m.param for m in mirrors]


def _taking(pipeline: weakref.ref[Pipeline]) -> Callable[[Tensor], None]:
    """A hook that does nothing once the optimizer is gone."""

    def hook(param: Tensor) -> None:
        if (present := pipeline()) is not None:
            present.take(param)

    return hook
