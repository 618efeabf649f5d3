"""Defines operators at import and loads their kernels at the first call."""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import BuildError, not_dense
from .fakes import checked_fake
from .writes import register_writes

if TYPE_CHECKING:  # the builder is imported at the first call: imports would take twice the time
    from .build import Op

__all__ = ["BuildError", "OpLibrary", "register_fake"]

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
        self.op_folders: dict[str, Path] = {}  # of every op of the modules that are imported
        self.doctor = f"`python -m {self.package}` shows what this installation finds."
        self._torch_library = torch.library.Library(namespace, "FRAGMENT")
        # Both change under the lock alone. Who asks without it may load what is loaded: that waits.
        self._loaded: set[tuple[str, str]] = set()  # (op folder's name, device type)
        self._opened: set[Path] = set()
        self._renew_lock()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._renew_lock)
        _warn_of_another_apex()

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a forked child may lack the thread that holds it

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
            self.op_folders[folder.name] = folder
            self.schemas[name] = schema
            self._torch_library.define(schema)
            overload = getattr(getattr(torch.ops, self.namespace), name).default
            checked = checked_fake(overload, fake)
            register_fake(self._torch_library, overload.name(), checked)
            register_writes(self._torch_library, overload)
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
            arguments = (*args, *kwargs.values())
            device_type = _device_type(arguments)
            # Another thread may load the op between dispatch and this line, so a loaded op does
            # not prove that this device has no kernel. A second call that arrives here does.
            if getattr(this_thread, "calls_again", False):
                raise NotImplementedError(
                    f"{overload.name()} has no kernel for {device_type or 'cpu'} tensors."
                )
            _check_layouts(overload, args, kwargs)
            op = self.op_in(op_folder.resolve())
            self.load(op, device_type or self._device_of(op))
            this_thread.calls_again = True
            try:
                if device_type is None:  # empty lists: the dispatcher finds no device by itself
                    return overload.redispatch(_KEYS[self._device_of(op)], *args, **kwargs)
                return overload(*args, **kwargs)
            finally:
                this_thread.calls_again = False

        return stub

    def _device_of(self, op: Op) -> str:
        """Whose kernels check arguments without a tensor: those that are loaded, or the CPU's."""
        only_cuda = (op.name, "cuda") in self._loaded and (op.name, "cpu") not in self._loaded
        return "cuda" if only_cuda else "cpu"

    def load(self, op: Op, device_type: str) -> None:
        """Load the kernels of ``op`` for a device type, building them first if need be.

        Raises:
            NotImplementedError: there are no kernels for this kind of device.
            BuildError: nothing prebuilt fits, and building is forbidden or fails; or the library
                cannot be loaded.
        """
        from . import targets

        if device_type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{self.package}: {op.name} has no kernel for {device_type} tensors; it runs on "
                "cpu and cuda (NVIDIA and AMD)."
            )
        with self._lock:
            if (op.name, device_type) in self._loaded:
                return
            path, unfit = self._search(op, device_type)
            if device_type == "cpu" and targets.is_emulating():
                logger.warning("%s: %s runs on the emulated GPU.", self.package, op.name)
            if path is None:
                path = self._build(op, device_type, unfit)
            if path not in self._opened:
                self._open(path)
                self._opened.add(Path(path))  # without its open file
            self._loaded.add((op.name, device_type))

    def _build(self, op: Op, device_type: str, unfit: list[str]) -> Path:
        """Build the op's library, and say why those of the wheel do not serve."""
        from . import jit

        said = " ".join(f"The wheel's {reason}." for reason in unfit)
        if said and not jit.is_forbidden():
            logger.warning("%s: %s %s is compiled here.", self.package, said, op.name)
        try:
            return jit.build_op(op, jit.target_of(device_type), package=self.package)
        except BuildError as error:
            lines = [str(error), *([said] if said else []), self.doctor]
            raise BuildError("\n".join(lines)) from error.__cause__

    def _open(self, path: Path) -> str:
        """Load a library, which registers its kernels; return the loader's name of it."""
        from .targets import is_emulating
        from .toolchain import RTC

        name = ""
        try:
            # The emulator's reports name kernels by the library's file, so it keeps its name.
            if getattr(path, "descriptor", None) is None or is_emulating():
                torch.ops.load_library(str(path))
            else:
                # torch would look the path up again, and load what lies there by then. The loader
                # knows libraries by name, and numbers of files come again: dots make names unlike.
                dots = "/." * len(torch.ops.loaded_libraries)
                name = path.loadable.replace("/proc/self", f"/proc/self{dots}", 1)
                ctypes.CDLL(name)
                torch.ops.loaded_libraries.add(str(path))
        except OSError as error:
            from .compatibility import remedy_for

            reason = str(error.__cause__ or error)  # the loader's own words, which torch may wrap
            reason = reason.replace(name, path.name) if name else reason
            remedy = remedy_for(reason, path, is_own=path.parent == self.kernels)
            raise BuildError(
                f"{self.package}: cannot load {path}: {reason}. {remedy}. {self.doctor}"
            ) from error
        name = name or str(path)
        if path.stem == RTC:  # what its kernels are compiled by
            from . import rtc

            rtc.connect(ctypes.CDLL(name), self.op_folders)
        return name

    def open_for_rtc(self) -> Iterator[ctypes.CDLL]:
        """The libraries whose GPU kernels NVRTC compiles: the wheel's, else one built for each op.

        Raises:
            BuildError: one cannot be built or loaded.
        """
        from . import jit
        from .targets import Target
        from .toolchain import RTC

        target, opened = Target(RTC), set()
        brought = [e for e in self.manifest().get("libraries", []) if e["backend"] == RTC]
        for name, folder in sorted(self.op_folders.items()):
            files = [self.kernels / entry["file"] for entry in brought if name in entry["ops"]]
            if not files:
                files = [jit.build_op(self.op_in(folder), target, package=self.package)]
            if files[0] not in opened:
                opened.add(files[0])
                yield ctypes.CDLL(self._open(files[0]))

    def find_prebuilt(self, op: Op, device_type: str) -> Path | None:
        """The wheel's own library with this op for this device, or None."""
        return self._search(op, device_type)[0]

    def _search(self, op: Op, device_type: str) -> tuple[Path | None, list[str]]:
        """The wheel's own library with this op for this device; and why others do not serve."""
        from . import jit
        from .compatibility import why_incompatible

        backends = jit.backends_of(device_type)
        unfit = []
        for entry in self.manifest().get("libraries", []):
            if entry["backend"] not in backends or op.name not in entry["ops"]:
                continue
            reason = why_incompatible(entry)
            if reason is None:  # entries are sorted best level first
                return self.kernels / entry["file"], []
            unfit.append(f"{entry['file']} {reason}")
        return None, unfit

    @staticmethod
    def op_in(folder: Path) -> Op:
        """The op whose kernels lie in a folder."""
        from .build import Op

        return Op(folder.name, folder)

    def manifest(self) -> dict[str, Any]:
        """What this wheel brings prebuilt; empty for a wheel of sources."""
        path = self.kernels / "manifest.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def available(self, op_folder: str | os.PathLike[str], device_type: str = "cpu") -> bool:
        """Whether an op's kernels are loaded, prebuilt, or could be built here; builds nothing."""
        return self.why_missing(op_folder, device_type) is None

    def why_missing(
        self, op_folder: str | os.PathLike[str], device_type: str = "cpu"
    ) -> str | None:
        """Why an op's kernels cannot run, with the remedy; None if they can. Builds nothing."""
        from . import jit

        op = self.op_in(Path(op_folder))
        if (op.name, device_type) in self._loaded:
            return None
        path, unfit = self._search(op, device_type)
        if path is not None:
            return None
        reason = jit.why_not_build(op, jit.backend_of(device_type))
        return reason and "; ".join([*(f"the wheel's {each}" for each in unfit), reason])

    def require(
        self, op_folder: str | os.PathLike[str], who: str, device_type: str = "cpu"
    ) -> None:
        """Check that an op's kernels can run on a kind of device; builds nothing.

        Args:
            op_folder: the folder of the op.
            who: what needs them: the class, function or module that the message begins with.
            device_type: ``"cpu"`` or ``"cuda"``.

        Raises:
            BuildError: there are none, and none can be built; with the reason and the remedy.
        """
        reason = self.why_missing(op_folder, device_type)
        if reason is not None:
            raise BuildError(
                f"{who}: the kernels of {Path(op_folder).name} for {device_type} are neither "
                f"prebuilt in this installation of {self.package.replace('.', '-')} nor can they "
                f"be compiled here, because {reason}. {self.doctor}"
            )

    def require_for_import(self, module: str, *ops: str, device_type: str = "cpu") -> None:
        """Check it for a module whose callers take its import as the answer.

        Args:
            module: its name.
            ops: folders' names, of ops whose operators are defined by now.
            device_type: ``"cpu"`` or ``"cuda"``.

        Raises:
            ImportError: an op has no kernels, and none can be built; as :meth:`require` says it.
        """
        try:
            for op in ops:
                self.require(self.op_folders[op], module, device_type)
        except RuntimeError as error:
            raise ImportError(str(error), name=module) from error


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any]) -> None:
    """``torch.library.register_fake``, quickly at an import.

    For each fake kernel torch asks ``inspect`` which module registers it. It is this module, so the
    line below puts the answer into the cache of ``inspect``. Without it ``inspect`` looks at every
    module, which takes 3 ms after ``import torch``.
    """
    torch.library.register_fake(name, fake, lib=library)


def _warn_of_another_apex() -> None:
    """Warn where another project's apex was installed over ours, whose ``__init__`` would warn."""
    file = getattr(sys.modules.get("apex"), "__file__", None)
    if file is not None and not hasattr(sys.modules["apex"], "_WHEELS"):
        warnings.warn(
            f"{file}: another project's apex is installed over the Apex wheels, and their files "
            "mix. Run `pip uninstall apex`, then install the Apex wheels again with "
            "`pip install --force-reinstall --no-deps`.",
            RuntimeWarning,
            stacklevel=3,
        )


vars(inspect).get("modulesbyfile", {}).setdefault(inspect.getabsfile(register_fake), __name__)


_KEYS = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA),
}


def _device_type(arguments: tuple[Any, ...]) -> str | None:
    """The device type of the first tensor among (possibly nested) arguments; None without one."""
    tensor = next(_tensors(arguments), None)
    return None if tensor is None else tensor.device.type


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _tensors(item)


def _check_layouts(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Kernels read plain memory: refuse a tensor that has none."""
    names = [argument.name for argument in overload._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in _tensors(value):
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise not_dense(overload.name(), name, tensor)
