"""What operations do with channels: a network's graph is read once, from inputs to outputs.

Unknown operations freeze the channels that they meet, so a permutation can be missed, but not be
wrong. Inputs and outputs of the network keep their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .channel_spaces import Channels, ChannelSpaces

SHAPE = "a number or a shape"


@dataclass(frozen=True)
class Held:
    """A tensor that the network holds, by its name."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Attended:
    """What MultiheadAttention returns: its first part has channels, the other has none."""

    channels: Channels


# Equal for each channel: modules, functions, and names of methods.
_ALIKE_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus),
    *(nn.LogSigmoid, nn.Softsign, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
)
_ALIKE = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul),
    *(operator.truediv, operator.itruediv, operator.neg, operator.pow),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.relu, torch.sigmoid, torch.tanh, torch.abs),
    *(torch.exp, torch.sqrt, torch.square, torch.clamp, torch.softmax, torch.log_softmax),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardsigmoid),
    *(F.hardswish, F.hardtanh, F.sigmoid, F.tanh, F.softplus, F.softmax, F.log_softmax, F.dropout),
    *(F.dropout2d, F.dropout3d, F.alpha_dropout),
}
_ALIKE_METHODS = {
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "relu", "relu_", "sigmoid"),
    *("tanh", "abs", "exp", "sqrt", "square", "clamp", "clamp_", "contiguous", "clone", "detach"),
    *("float", "half", "bfloat16", "softmax", "log_softmax"),
}
_PER_PLANE = {  # by the last dimensions that are mixed
    1: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d),
    3: (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}
_PER_PLANE_FUNCTIONS = {
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d), 1),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d), 2),
    F.adaptive_max_pool2d: 2,
    **dict.fromkeys((F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d), 3),
}
_CONVOLUTIONS = {F.conv1d: 1, torch.conv1d: 1, F.conv2d: 2, torch.conv2d: 2, F.conv3d: 3}
_CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
_SHAPES = {"size", "dim", "numel", "ndimension", "stride"}


class ChannelRules:
    """Reads a graph; afterwards :attr:`spaces` knows what may be permuted.

    Args:
        model: the network that was traced.
        graph: its graph.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.model, self.graph = model, graph
        self.spaces = ChannelSpaces()
        self.values: dict[fx.Node, Any] = {}  # None: nothing is known
        self.unknown: list[str] = []  # what froze channels because no rule knows it
        for node in graph.nodes:
            self.values[node] = getattr(self, f"_{node.op}")(node)
        self.spaces.finish()

    def _placeholder(self, node: fx.Node) -> None:
        return None

    def _output(self, node: fx.Node) -> None:
        self._freeze_inputs(node, "reaches the output")

    def _get_attr(self, node: fx.Node) -> Any:
        value: Any = self.model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return Held(str(node.target), value) if isinstance(value, Tensor) else SHAPE

    def _freeze_inputs(self, node: fx.Node, reason: str) -> None:
        for value in map(self.values.get, node.all_input_nodes):
            self._freeze(value, reason)

    def _freeze(self, value: Any, reason: str) -> None:
        if isinstance(value, Attended):
            value = value.channels
        if isinstance(value, Channels):
            self.spaces.freeze(value, reason)
        elif isinstance(value, Held):
            self.spaces.freeze_tensor(value.tensor, reason)

    def _is_unknown(self, node: fx.Node, what: str) -> None:
        if any(isinstance(self.values[n], (Channels, Attended)) for n in node.all_input_nodes):
            self.unknown.append(what)
        self._freeze_inputs(node, f"meets {what}")

    def _argument(self, node: fx.Node, place: int, name: str, default: Any = None) -> Any:
        """An argument, as a value where it is a node."""
        given = node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
        return self.values[given] if isinstance(given, fx.Node) else given

    # Modules.

    def _call_module(self, node: fx.Node) -> Any:
        module, name = self.model.get_submodule(str(node.target)), str(node.target)
        x = self._argument(node, 0, "input")
        if self._is_plain(module):
            for kind, rule in self._MODULE_RULES:
                if isinstance(module, kind):
                    return rule(self, node, name, module, x)
        for tensor in (*module.parameters(), *module.buffers()):
            self.spaces.freeze_tensor(tensor, f"is used by {type(module).__name__}")
        return self._is_unknown(node, type(module).__name__)

    @staticmethod
    def _is_plain(module: nn.Module) -> bool:
        """Whether its weights are its own, and not computed by a parametrization."""
        own = {**module._parameters, **module._buffers}
        wanted = ("weight", "bias", *(f"{part}_proj_weight" for part in ("in", "q", "k", "v")))
        return all(
            name in own for name in wanted if isinstance(getattr(module, name, None), Tensor)
        )

    def _linear_module(self, node: fx.Node, name: str, module: Any, x: Any) -> Channels:
        return self._linear(name, x, module.weight, module.bias)

    def _conv_module(self, node: fx.Node, name: str, module: Any, x: Any) -> Any:
        return self._conv(name, x, module.weight, module.bias, module.groups)

    def _norm(self, node: fx.Node, name: str, module: Any, x: Any) -> Any:
        """Batch and instance norm: the channels are dimension 1."""
        known = isinstance(x, Channels) and x.dims is not None and x.axis == 1 - x.dims
        # Apex's SyncBatchNorm may add a second tensor, or have its channels last.
        known = known and len(node.all_input_nodes) == 1
        known = known and not getattr(module, "channel_last", False)
        if not known or self.spaces.size(x) != module.num_features:
            return self._not_its_channels(node, name, module)
        for own in ("weight", "bias", "running_mean", "running_var"):
            self.spaces.attach(f"{name}.{own}", getattr(module, own), 0, x)
        return x

    def _last_norm(self, node: fx.Node, name: str, module: Any, x: Any) -> Any:
        """Layer and RMS norm of the last dimension."""
        is_last = isinstance(x, Channels) and x.axis == -1
        if not is_last or tuple(module.normalized_shape) != (self.spaces.size(x),):
            return self._not_its_channels(node, name, module)
        for own in ("weight", "bias"):
            self.spaces.attach(f"{name}.{own}", getattr(module, own, None), 0, x)
        return x

    def _not_its_channels(self, node: fx.Node, name: str, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self.spaces.freeze_tensor(tensor, f"{name} has channels of an unknown origin")
        self._freeze_inputs(node, f"meets {name}, whose channels are not known to be the same")

    def _alike_module(self, node: fx.Node, name: str, module: nn.Module, x: Any) -> Any:
        return self._alike(node)

    def _plane_module(self, node: fx.Node, name: str, module: nn.Module, x: Any) -> Any:
        mixed = next(n for n, kinds in _PER_PLANE.items() if isinstance(module, kinds))
        if getattr(module, "return_indices", False):
            return self._is_unknown(node, type(module).__name__)
        return self._per_plane(node, x, mixed)

    def _flatten_module(self, node: fx.Node, name: str, module: Any, x: Any) -> Any:
        return self._flatten(node, x, module.start_dim, module.end_dim)

    def _attention(self, node: fx.Node, name: str, module: nn.MultiheadAttention, x: Any) -> Any:
        """Readers are the three projections; what it makes are the rows of the last one."""
        inputs = [self._argument(node, i, own) for i, own in enumerate(("query", "key", "value"))]
        if module._qkv_same_embed_dim:
            names = ["in_proj_weight"] * 3
        else:
            names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        for value, own in zip(inputs, names, strict=True):
            self._read(f"{name}.{own}", value, module._parameters[own], -1)
        named = [node.kwargs.get(own) for own in ("key_padding_mask", "attn_mask")]
        for mask in (*node.args[3:], *named):
            if isinstance(mask, fx.Node):
                self._freeze(self.values[mask], "is a mask of attention")
        out = module.out_proj
        if not self._is_plain(out):
            self.spaces.freeze_tensor(out.bias, "is used by a parametrized projection")
            return None
        self.spaces.freeze_dim(out.weight, 1, "is in the order of attention heads")
        made = self.spaces.made_by(f"{name}.out_proj.weight", out.weight)
        channels = Channels(made, -1, None)
        self.spaces.attach(f"{name}.out_proj.bias", out.bias, 0, channels)
        return Attended(channels)

    _MODULE_RULES: Sequence[tuple[Any, Callable[..., Any]]] = (
        (nn.Linear, _linear_module),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv_module),
        (nn.MultiheadAttention, _attention),
        (nn.modules.batchnorm._NormBase, _norm),
        ((nn.LayerNorm, nn.RMSNorm), _last_norm),
        (_ALIKE_MODULES, _alike_module),
        (tuple(kind for kinds in _PER_PLANE.values() for kind in kinds), _plane_module),
        (nn.Flatten, _flatten_module),
    )

    # Layers, of modules and of functions.

    def _read(self, name: str, x: Any, weight: Tensor, axis: int) -> None:
        """Let dimension 1 of a weight have the channels of ``x``, or forbid to permute both."""
        is_same = isinstance(x, Channels) and x.axis == axis
        if is_same and self.spaces.size(x) == weight.shape[1]:
            self.spaces.attach(name, weight, 1, x)
            return
        self._freeze(x, f"meets {name}, whose channels are not known to be the same")
        self.spaces.freeze_dim(weight, 1, "has channels of an unknown origin")

    def _linear(self, name: str, x: Any, weight: Tensor, bias: Tensor | None) -> Channels:
        self._read(f"{name}.weight", x, weight, -1)
        return self._made(name, weight, bias, -1, x.dims if isinstance(x, Channels) else None)

    def _made(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        axis: int,
        dims: int | None,
        atom: int | None = None,
    ) -> Channels:
        made = Channels(self.spaces.made_by(f"{name}.weight", weight, atom), axis, dims)
        self.spaces.attach(f"{name}.bias", bias, 0, made)
        return made

    def _conv(self, name: str, x: Any, weight: Tensor, bias: Tensor | None, groups: int) -> Any:
        dims = weight.dim()  # those of the input: batch, channels, places
        made, each = weight.shape[:2]
        if groups == 1:
            self._read(f"{name}.weight", x, weight, 1 - dims)
            return self._made(name, weight, bias, 1 - dims, dims)
        is_known = isinstance(x, Channels) and x.axis == 1 - dims
        is_known = is_known and self.spaces.size(x) == groups * each
        if each == 1 and made == groups and is_known:  # depthwise: each channel is by itself
            self.spaces.attach(f"{name}.weight", weight, 0, x)
            self.spaces.attach(f"{name}.bias", bias, 0, x)
            return x
        if each == 1:
            self._freeze(x, f"meets {name}, a depthwise convolution of other channels")
            self.spaces.freeze_tensor(weight, "has channels of an unknown origin")
            self.spaces.freeze_tensor(bias, "has channels of an unknown origin")
            return None
        if is_known and len(x.spaces) == 1 and each > 4 and each % 4 == 0:
            self.spaces.limit_atom(x.spaces[0], each)
            self.spaces.attach_parts(f"{name}.weight", weight, 1, x, [each])
        else:
            self._freeze(x, f"meets {name}, a convolution of groups of {each} channels")
            self.spaces.freeze_dim(weight, 1, "has small groups, or channels of an unknown origin")
        return self._made(name, weight, bias, 1 - dims, dims, made // groups)

    # Functions and methods.

    def _call_function(self, node: fx.Node) -> Any:
        target, x = node.target, self._argument(node, 0, "input")
        if all(self.values[n] == SHAPE for n in node.all_input_nodes):
            return SHAPE if node.all_input_nodes else None
        if target is getattr:
            return SHAPE if node.args[1] in ("shape", "ndim", "dtype", "device") else None
        if target in _ALIKE:
            return self._alike(node)
        if target in _PER_PLANE_FUNCTIONS:
            return self._per_plane(node, x, _PER_PLANE_FUNCTIONS[target])
        if target in _CONCATENATIONS:
            return self._concatenate(node)
        if target is operator.getitem and isinstance(x, Attended):
            return x.channels if node.args[1] == 0 else None
        if target is torch.flatten:
            start, end = (
                self._argument(node, 1, "start_dim", 0),
                self._argument(node, 2, "end_dim", -1),
            )
            return self._flatten(node, x, start, end)
        if target is torch.mean:
            return self._mean(node, x)
        weight, bias = self._argument(node, 1, "weight"), self._argument(node, 2, "bias")
        if isinstance(weight, Held) and (bias is None or isinstance(bias, Held)):
            name = weight.name.removesuffix(".weight")
            own = (x, weight.tensor, bias.tensor if bias else None)
            if target is F.linear and weight.tensor.dim() == 2:
                return self._linear(name, *own)
            if target in _CONVOLUTIONS and weight.tensor.dim() == _CONVOLUTIONS[target] + 2:
                return self._conv(name, *own, self._argument(node, 6, "groups", 1))
        return self._is_unknown(node, getattr(target, "__name__", str(target)))

    def _call_method(self, node: fx.Node) -> Any:
        x = self._argument(node, 0, "self")
        if node.target in _SHAPES or all(self.values[n] == SHAPE for n in node.all_input_nodes):
            return SHAPE
        if node.target in _ALIKE_METHODS:
            return self._alike(node)
        if node.target == "flatten":
            start = self._argument(node, 1, "start_dim", 0)
            return self._flatten(node, x, start, self._argument(node, 2, "end_dim", -1))
        if node.target == "mean":
            return self._mean(node, x)
        if node.target in ("view", "reshape") and self._keeps_batch(node):
            return self._flatten(node, x, 1, -1)
        return self._is_unknown(node, f".{node.target}()")

    def _keeps_batch(self, node: fx.Node) -> bool:
        """Whether it is ``x.view(x.size(0), -1)``, in one of the ways to write that."""
        sizes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        if len(sizes) != 2 or sizes[1] != -1 or not isinstance(sizes[0], fx.Node):
            return False
        size = sizes[0]
        if size.op == "call_method" and size.target == "size":
            return size.args == (node.args[0], 0)
        if size.target is not operator.getitem or size.args[1] != 0:
            return False
        whole = size.args[0]
        return isinstance(whole, fx.Node) and whole.args[:1] == (node.args[0],)

    def _alike(self, node: fx.Node) -> Any:
        """The same for each channel; tensors that meet have the same channels, or one for all."""
        values = [self.values[n] for n in node.all_input_nodes]
        values = [value for value in values if value != SHAPE]
        channels = [value for value in values if isinstance(value, Channels)]
        if not channels or len({(c.axis, c.dims) for c in channels}) > 1:
            return self._is_unknown(node, "operands of unknown or different dimensions")
        if any(not isinstance(value, (Channels, Held)) for value in values):
            return self._is_unknown(node, "an operand of which nothing is known")
        wide = [c for c in channels if self.spaces.size(c) > 1] or channels[:1]
        for value in values:
            if isinstance(value, Held):
                self._meet_held(value, wide[0])
        for other in wide[1:]:
            self.spaces.merge_channels(wide[0], other)
        return wide[0]

    def _meet_held(self, held: Held, channels: Channels) -> None:
        dim = held.tensor.dim() + channels.axis
        if dim < 0 or held.tensor.shape[dim] == 1:
            return  # the same for all channels
        if held.tensor.shape[dim] == self.spaces.size(channels):
            self.spaces.attach(held.name, held.tensor, dim, channels)
        else:
            self._freeze(held, "meets other channels")
            self._freeze(channels, f"meets {held.name}")

    def _per_plane(self, node: fx.Node, x: Any, mixed: int) -> Any:
        if not isinstance(x, Channels) or x.axis >= -mixed:
            return self._is_unknown(node, "a pool along its channels")
        return x

    def _flatten(self, node: fx.Node, x: Any, start: Any, end: Any) -> Any:
        """All dimensions but the batch. Whoever reads more channels than there are freezes them."""
        if (
            not isinstance(x, Channels)
            or x.dims is None
            or (start, end) not in ((1, -1), (1, x.dims - 1))
        ):
            return self._is_unknown(node, "a flatten of other dimensions")
        return (
            Channels(x.spaces, -1, 2) if x.axis == 1 - x.dims else self._is_unknown(node, "flatten")
        )

    def _mean(self, node: fx.Node, x: Any) -> Any:
        """Over other dimensions than that of the channels."""
        dims, keep = self._argument(node, 1, "dim"), self._argument(node, 2, "keepdim", False)
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(x, Channels) or not isinstance(dims, (tuple, list)) or not dims:
            return self._is_unknown(node, "mean")
        if x.dims is None and any(dim >= 0 for dim in dims):
            return self._is_unknown(node, "a mean over dimensions whose number is not known")
        behind = [dim if dim < 0 else dim - x.dims for dim in dims]
        if x.axis in behind:
            return self._is_unknown(node, "a mean over channels")
        if keep:
            return x
        axis = x.axis + sum(dim > x.axis for dim in behind)
        return Channels(x.spaces, axis, None if x.dims is None else x.dims - len(dims))

    def _concatenate(self, node: fx.Node) -> Any:
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = self._argument(node, 1, "dim", 0)
        if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
            return self._is_unknown(node, "a concatenation")
        values = [self.values[n] for n in tensors]
        known = all(isinstance(v, Channels) for v in values)
        if not known or len({(v.axis, v.dims) for v in values}) > 1:
            return self._is_unknown(node, "a concatenation with something unknown")
        first = values[0]
        if dim >= 0 and first.dims is None:
            return self._is_unknown(node, "a concatenation along a dimension of unknown place")
        if (dim if dim < 0 else dim - first.dims) == first.axis:
            return first.with_spaces(space for value in values for space in value.spaces)
        return self._alike(node)
