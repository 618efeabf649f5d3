"""The backend: Inductor with convolutions' gradients apart, and graphs on several streams."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import config

aten = torch.ops.aten

_graph_ids = itertools.count()


def enable_multi_stream_scheduling(compile_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function like ``compile_fx`` make graphs that run on several streams.

    The result takes the same arguments. Its ``inner_compile`` compiles the parts of a graph, see
    :func:`apex.contrib.torchsched.multi_stream.multi_stream_compile`; nothing of Inductor is
    replaced. Graphs that cannot be divided are compiled as before: those off CUDA, with sizes that
    vary, or with operators whose order is not in the graph. ``config.debug`` tells which and why.
    """

    @functools.wraps(compile_fn)
    def compiled(
        model_: fx.GraphModule,
        example_inputs_: Sequence[Any],
        inner_compile: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        from functorch.compile import config as functorch_config
        from torch._inductor.compile_fx import compile_fx_inner

        from .multi_stream import multi_stream_compile

        inner_compile = multi_stream_compile(inner_compile or compile_fx_inner)
        # AOTAutograd's cache knows neither divided graphs nor what they were compiled with.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fn(model_, example_inputs_, inner_compile=inner_compile, **options)

    return compiled


def convolution_backward_decomp_dwb(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of a convolution's input, weight and bias, one call each, in this order.

    A decomposition of ``aten.convolution_backward``, whose arguments and results it has. The three
    are independent, so that streams can run them at the same time; what needs the input's gradient
    is launched first.

    Returns:
        ``NotImplemented`` off CUDA, and where only one gradient is wanted.
    """
    given = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    return _convolution_gradients("dwb", grad_output, input, weight, given, output_mask)


def convolution_backward_decomp_wbd(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """:func:`convolution_backward_decomp_dwb`, but weight, bias and input in this order."""
    given = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    return _convolution_gradients("wbd", grad_output, input, weight, given, output_mask)


def _convolution_gradients(
    scheme: str,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    given: tuple[Any, ...],
    output_mask: Sequence[bool],
) -> Any:
    if grad_output.device.type != "cuda" or sum(output_mask) < 2:
        return NotImplemented
    return split_convolution_backward(scheme, grad_output, input, weight, given, output_mask)


def split_convolution_backward(
    scheme: str,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    given: tuple[Any, ...],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that ``output_mask`` asks for, by a call each, in the order of ``scheme``.

    Args:
        scheme: ``"dwb"`` or ``"wbd"``: d is the input's gradient, w the weight's, b the bias's.
        given: the arguments of ``aten.convolution_backward`` between ``weight`` and
            ``output_mask``.
    """
    found: dict[str, Tensor | None] = dict.fromkeys("dwb")
    for which in scheme:
        place = "dwb".index(which)
        if not output_mask[place]:
            continue
        if which == "b":
            found["b"] = grad_output.sum([0, *range(2, grad_output.dim())])
        else:
            mask = [place == 0, place == 1, False]
            results = aten.convolution_backward(grad_output, input, weight, *given, mask)
            found[which] = results[place]
    return found["d"], found["w"], found["b"]


class DecompositionsWrapper(torch._TorchCompileInductorWrapper):
    """Inductor's own backend with more decompositions, and graphs on several streams.

    Args:
        mode, options, dynamic: as ``torch.compile`` has them.
        decompositions: more of them, by operator; they come before Inductor's.
    """

    def __init__(
        self,
        mode: str | None,
        options: dict[str, Any] | None,
        dynamic: bool | None,
        decompositions: dict[Any, Callable[..., Any]] | None,
    ) -> None:
        super().__init__(mode, options, dynamic)
        self.decompositions = dict(decompositions or {})

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.decompositions == getattr(
            other, "decompositions", None
        )

    __hash__ = None  # as that of the class above

    def __call__(
        self, model_: fx.GraphModule, inputs_: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compile a graph. Further arguments are those of ``compile_fx``.

        ``config_patches`` and ``decompositions`` among them come before the wrapper's own.
        """
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        own = self.decompositions | dict(kwargs.pop("decompositions", None) or {})
        patches = self.config | dict(kwargs.pop("config_patches", None) or {})
        if config.enable_pre_grad_pass and isinstance(model_, fx.GraphModule):
            from .passes import pre_grad_custom_pass

            pre_grad_custom_pass(model_.graph)
            model_.recompile()
        return enable_multi_stream_scheduling(compile_fx)(
            model_,
            inputs_,
            *args,
            config_patches=patches,
            decompositions={**select_decomp_table(), **own},
            **kwargs,
        )


def get_backend(backend: str = "torch", scheme: str = "dwb") -> Callable[..., Any]:
    """A backend for ``torch.compile(backend=...)``.

    Args:
        backend: ``"torch"`` is Inductor as it is; ``"torchsched"`` runs graphs on several streams.
        scheme: the order in which the gradients of a convolution's input (d), weight (w) and bias
            (b) are launched: ``"dwb"`` or ``"wbd"``. Inductor alone has no such order.

    Raises:
        ValueError: another backend or scheme.
    """
    if scheme not in ("dwb", "wbd"):
        raise ValueError(f"get_backend: scheme must be dwb or wbd, got {scheme!r}.")
    if backend == "torch":
        return _inductor
    if backend != "torchsched":
        raise ValueError(f"get_backend: backend must be torch or torchsched, got {backend!r}.")
    decompositions = {
        "dwb": convolution_backward_decomp_dwb,
        "wbd": convolution_backward_decomp_wbd,
    }
    own = {aten.convolution_backward.default: decompositions[scheme]}
    return DecompositionsWrapper(None, None, None, own)


def _inductor(model_: fx.GraphModule, example_inputs_: Sequence[Any], **options: Any) -> Any:
    """Inductor as it is; graphs are written to ``config.dump_code_dir`` where that is asked for."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if config.dump_code_dir is None or "inductor" not in config.dump_code_backends:
        return compile_fx(model_, example_inputs_, **options)
    from .multi_stream import dump

    inner = options.pop("inner_compile", compile_fx_inner)

    def dumped(gm: fx.GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        dump("inductor", next(_graph_ids), gm)
        return inner(gm, example_inputs, **more)

    return compile_fx(model_, example_inputs_, inner_compile=dumped, **options)
