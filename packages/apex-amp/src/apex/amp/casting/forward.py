"""The replacement of a model's ``forward``, which casts inputs, outputs and arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._amp_state import _amp_state
from .casts import applier, to_type
from .functions import replaced


class _NotScriptable(RuntimeError, AttributeError):
    """An error of ``torch.jit.script``; for torch.export the attribute is just not there."""


class AmpForward:
    """Calls a model's forward in another precision.

    It is an object and not a closure, so that a copied or unpickled model calls its own forward.

    Args:
        module: the model; its present ``forward`` is called.
        input_dtype: floating-point inputs are cast to it; None leaves them.
        output_dtype: floating-point outputs are cast to it; None leaves them.
        casts: switch on the casts of the handle in force.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        casts: bool,
    ) -> None:
        forward = module.forward
        # The model may be initialized a second time: the last call decides.
        self._forward = forward._forward if isinstance(forward, AmpForward) else forward
        self._module = module
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.casts = casts

    def install(self) -> None:
        """Take the place of the model's ``forward``."""
        self._module.forward = self
        # DataParallel copies a module's __dict__ into replicas: they would call the original model.
        self._module._replicate_for_data_parallel = self._replicate

    @property
    def __wrapped__(self) -> Any:
        return self._forward  # for inspect.signature(model.forward)

    @property
    def __code__(self) -> Any:
        return self._forward.__code__  # torch.export looks for the place of the definition

    @property
    def __globals__(self) -> Any:
        """What ``torch.jit.script`` asks a function for first: it cannot compile this object."""
        self.check_has_no_casts()
        raise _NotScriptable(
            f"torch.jit.script: amp has switched off the casts of {type(self._module).__name__}. "
            "Script the model while they are on, or delete its attribute `forward`, which amp has "
            "set, to script it without them."
        )

    def check_has_no_casts(self) -> None:
        """Raise ``RuntimeError`` if inputs or outputs are cast, which a script would not do."""
        casts = {"inputs": self.input_dtype, "outputs": self.output_dtype}
        said = " and ".join(f"{what} to {dtype}" for what, dtype in casts.items() if dtype)
        if said:
            raise _NotScriptable(
                f"torch.jit.script: amp.initialize made {type(self._module).__name__} cast its "
                f"{said}, in Python that TorchScript does not compile. Record the casts with "
                "torch.jit.trace(model, example_inputs); or script a model that amp has not "
                "initialized, and load the state_dict of this one, which is float32; or use O1 or "
                "O4 without cast_model_outputs."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_dtype is not None:
            cast = functools.partial(to_type, self.input_dtype)
            args, kwargs = applier(args, cast), applier(kwargs, cast)
        if self.casts and not torch.compiler.is_compiling():
            handle = getattr(_amp_state, "handle", None)
            # None in a process that unpickled the model and did not initialize amp.
            with contextlib.nullcontext() if handle is None else handle._model_call():
                output = self._forward(*args, **kwargs)
        else:  # Dynamo captures the autocast state around the call, and guards on it
            output = self._forward(*args, **kwargs)
        if self.output_dtype is not None:
            output = applier(output, functools.partial(to_type, self.output_dtype))
        return output

    def _replicate(self) -> torch.nn.Module:
        replica = type(self._module)._replicate_for_data_parallel(self._module)
        del replica.__dict__["forward"], replica.__dict__["_replicate_for_data_parallel"]
        AmpForward(replica, self.input_dtype, self.output_dtype, self.casts).install()
        return replica


@contextlib.contextmanager
def scriptable_forwards() -> Iterator[None]:
    """Let ``torch.jit.script`` compile the model's own forward within the context.

    Autocast is in force there as in all code of this thread, so O1 and O4 keep their casts.
    """

    def of_own_forward(make_stub: Callable) -> Callable:
        @functools.wraps(make_stub)
        def wrapper(function: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(function, AmpForward):
                function.check_has_no_casts()
                function = function.__wrapped__
            return make_stub(function, *args, **kwargs)

        return wrapper

    with replaced(torch.jit._recursive, "make_stub", of_own_forward):
        yield
