"""Defines operators at import and loads their kernels at the first call."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import BuildError

if TYPE_CHECKING:  # the builder is imported at the first call: imports would take twice the time
    from .build import Op

__all__ = ["BuildError", "OpLibrary"]

logger = logging.getLogger("apex")


class OpLibrary:
    """The operators of one wheel, under one namespace of ``torch.ops``.

    Args:
        namespace: name below ``torch.ops``, such as ``"apex_optimizers"``.
        file: ``__file__`` of a module in the package's main folder; prebuilt kernels lie beside it
            in ``_kernels/``.
    """

    def __init__(self, namespace: str, file: str) -> None:
        self.namespace = namespace
        self.package = namespace.replace("_", ".", 1)
        self.kernels = Path(file).resolve().parent / "_kernels"
        self.schemas: dict[str, str] = {}
        self._torch_library = torch.library.Library(namespace, "FRAGMENT")
        self._loaded: set[tuple[str, str]] = set()  # (op folder's name, device type)
        self._opened: set[Path] = set()
        self._lock = threading.RLock()

    def define(self, schema: str, file: str | None = None) -> Callable[[Callable[..., Any]], Any]:
        """Define an operator; the decorated function is its fake kernel and its documentation.

        The kernels are those of the folder in which the function is written. Nothing is built or
        loaded here.

        Args:
            schema: the operator's schema in torch's grammar, without namespace.
            file: a file in the folder of the kernels, if the function is written elsewhere.

        Returns:
            A decorator that gives the ``torch._ops.OpOverload``.
        """
        name = schema.partition("(")[0].strip()

        def decorate(fake: Callable[..., Any]) -> Any:
            folder = Path(file or fake.__code__.co_filename).parent
            self.schemas[name] = schema
            self._torch_library.define(schema)
            torch.library.register_fake(f"{self.namespace}::{name}", fake, lib=self._torch_library)
            overload = getattr(getattr(torch.ops, self.namespace), name).default
            self._torch_library.impl(
                name, self._stub(overload, folder), "CompositeExplicitAutograd"
            )
            overload.__doc__ = fake.__doc__
            return overload

        return decorate

    def _stub(self, overload: Any, op_folder: Path) -> Callable[..., Any]:
        """The kernel that runs until the real one is registered: loads that, and calls again."""
        this_thread = threading.local()

        def stub(*args: Any, **kwargs: Any) -> Any:
            device_type = _device_type((*args, *kwargs.values()))
            # That the op is loaded is no proof: another thread may have loaded it after this call
            # was dispatched. That the second call comes back here is one.
            if getattr(this_thread, "calls_again", False):
                raise NotImplementedError(
                    f"{overload.name()} has no kernel for {device_type} tensors."
                )
            self.load(_op_in(op_folder.resolve()), device_type)
            this_thread.calls_again = True
            try:
                return overload(*args, **kwargs)
            finally:
                this_thread.calls_again = False

        return stub

    def load(self, op: Op, device_type: str) -> None:
        """Load the kernels of ``op`` for a device type, building them first if need be.

        Raises:
            NotImplementedError: there are no kernels for this kind of device.
            BuildError: nothing prebuilt fits, and building is forbidden or fails; or the library
                cannot be loaded.
        """
        from . import jit, targets

        if device_type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{self.package}: {op.name} has no kernel for {device_type} tensors; it runs on "
                "cpu and cuda (NVIDIA and AMD)."
            )
        with self._lock:
            if (op.name, device_type) in self._loaded:
                return
            path = self._prebuilt(op, device_type)
            if device_type == "cpu" and targets.is_emulating():
                logger.warning("%s: %s runs on the emulated GPU.", self.package, op.name)
            if path is None:
                path = jit.build_op(op, jit.target_of(device_type), package=self.package)
            if path not in self._opened:
                self._open(path)
                self._opened.add(path)
            self._loaded.add((op.name, device_type))

    def _open(self, path: Path) -> None:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reason = error.__cause__ or error  # the loader's own words, which torch may wrap
            own = path.parent == self.kernels
            remedy = "Reinstall the package" if own else "Delete it to have it compiled anew"
            raise BuildError(f"{self.package}: cannot load {path}: {reason}. {remedy}.") from error

    def _prebuilt(self, op: Op, device_type: str) -> Path | None:
        """The wheel's own library with this op for this device, or None."""
        from . import jit, targets

        backend = jit.backend_of(device_type)
        for entry in self.manifest().get("libraries", []):
            if entry["backend"] != backend or op.name not in entry["ops"]:
                continue
            if backend == "cpu":
                fits = entry["level"] in targets.supported_cpu_levels()
            elif backend == "cuda":
                fits = targets.runs_on(tuple(entry["archs"]), torch.cuda.get_device_capability())
            else:
                fits = jit.own_rocm_arch() in entry["archs"]
            if fits:  # entries are sorted best level first
                return self.kernels / entry["file"]
        return None

    def manifest(self) -> dict[str, Any]:
        """What this wheel brings prebuilt; empty for a wheel of sources."""
        path = self.kernels / "manifest.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def available(self, op_folder: str | os.PathLike[str], device_type: str = "cpu") -> bool:
        """Whether an op's kernels are loaded, prebuilt, or could be built here; builds nothing."""
        from . import jit

        op = _op_in(Path(op_folder))
        if (op.name, device_type) in self._loaded or self._prebuilt(op, device_type) is not None:
            return True
        return jit.can_build(jit.backend_of(device_type))


def _op_in(folder: Path) -> Op:
    from .build import Op

    return Op(folder.name, folder)


def _device_type(arguments: tuple[Any, ...]) -> str:
    """The device type of the first tensor among (possibly nested) arguments; cpu without one."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if (
            isinstance(argument, (list, tuple))
            and argument
            and isinstance(argument[0], torch.Tensor)
        ):
            return argument[0].device.type
    return "cpu"
