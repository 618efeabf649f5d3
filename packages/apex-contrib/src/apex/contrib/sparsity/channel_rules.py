"""What operations do with channels: a network's graph is read once, from inputs to outputs.

Unknown operations freeze the channels that they meet, so a permutation can be missed, but not be
wrong. Inputs and outputs of the network keep their order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from . import channel_views as views
from .channel_kinds import (
    ALIKE,
    ALIKE_METHODS,
    CONCATENATIONS,
    CONVOLUTIONS,
    MEANS,
    OF_NUMBERS,
    PER_PLANE_FUNCTIONS,
    PRODUCTS,
    SHAPES,
    VIEW_FUNCTIONS,
    VIEWS,
)
from .channel_modules import MODULE_RULES, last_norm
from .channel_spaces import Attended, Channels, ChannelSpaces, Size
from .channel_views import SHAPE, Held, ShapeOf, is_number
from .shared_memory import overlapping


class ChannelRules:
    """Reads a graph; afterwards :attr:`spaces` knows what may be permuted.

    Args:
        model: the network that was traced.
        graph: its graph.
        others: graphs of what it does in other modes: its channels must suit these, too.
        constants: tensors that the network's code makes, by their names in the graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        others: Sequence[fx.Graph] = (),
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.graph, self.constants = model, graph, dict(constants or {})
        self.spaces = ChannelSpaces()
        self.values: dict[fx.Node, Any] = {}  # None: nothing is known
        self.unknown: list[str] = []  # what froze channels because no rule knows it
        # Local response norms, and the first places of their channels.
        self.local_norms: dict[nn.Module, Tensor] = {}
        self._saved = self._freeze_what_cannot_move()
        for each in (graph, *others):
            for node in each.nodes:
                self.values[node] = getattr(self, f"_{node.op}")(node)
        self.spaces.finish()

    def is_order(self, tensor: Tensor) -> bool:
        """Whether a tensor only tells where the channels of a local response norm were."""
        return any(tensor is order for order in self.local_norms.values())

    def _freeze_what_cannot_move(self) -> set[int]:
        """Freeze tensors that checkpoints lack, or whose memory is others' too; return the rest."""
        saved: dict[int, Tensor] = {}
        for module in self.model.modules():
            for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or is_lazy(tensor):
                    continue
                if own in module._non_persistent_buffers_set:
                    self.spaces.freeze_tensor(tensor, f"{own} is not saved")
                saved[id(tensor)] = tensor
        for tensor in overlapping(saved.values()):
            self.spaces.freeze_tensor(tensor, "shares memory with another tensor")
        return set(saved)

    def _placeholder(self, node: fx.Node) -> None:
        return None

    def _output(self, node: fx.Node) -> None:
        self.freeze_inputs(node, "reaches the output")

    def _get_attr(self, node: fx.Node) -> Any:
        name = str(node.target)
        value: Any = self.constants.get(name, self.model)
        for part in () if name in self.constants else name.split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor):
            return SHAPE
        if id(value) not in self._saved:
            self.spaces.freeze_tensor(value, f"{name} is neither a parameter nor a saved buffer")
        held = Held.of(name, value)
        if held is None:
            self.spaces.freeze_tensor(value, f"{name} is no plain tensor")
        return held

    def freeze_inputs(self, node: fx.Node, reason: str) -> None:
        for value in map(self.values.get, node.all_input_nodes):
            self.freeze(value, reason)

    def freeze(self, value: Any, reason: str) -> None:
        if isinstance(value, Attended):
            value = value.channels
        if isinstance(value, Channels):
            self.spaces.freeze(value, reason)
        elif isinstance(value, Held):
            self.spaces.freeze_tensor(value.tensor, reason)

    def is_unknown(self, node: fx.Node, what: str) -> None:
        if any(isinstance(self.values[n], (Channels, Attended)) for n in node.all_input_nodes):
            self.unknown.append(what)
        self.freeze_inputs(node, f"meets {what}")

    def argument(self, node: fx.Node, place: int, name: str, default: Any = None) -> Any:
        """An argument, as a value where it is a node."""
        given = node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
        return self.values[given] if isinstance(given, fx.Node) else given

    # Modules.

    def _call_module(self, node: fx.Node) -> Any:
        module, name = self.model.get_submodule(str(node.target)), str(node.target)
        x = self.argument(node, 0, "input")
        if self.is_plain(module):
            for kind, rule in MODULE_RULES:
                if isinstance(module, kind):
                    return rule(self, node, name, module, x)
            if type(module).__module__.startswith("apex.normalization."):
                return last_norm(self, node, name, module, x)
        for tensor in (*module.parameters(), *module.buffers()):
            self.spaces.freeze_tensor(tensor, f"is used by {type(module).__name__}")
        return self.is_unknown(node, type(module).__name__)

    @staticmethod
    def is_plain(module: nn.Module) -> bool:
        """Whether its weights are its own and known, and no hook does what no trace shows."""
        own = {**module._parameters, **module._buffers}
        if module._forward_hooks or module._forward_pre_hooks or any(map(is_lazy, own.values())):
            return False
        wanted = ("weight", "bias", *(f"{part}_proj_weight" for part in ("in", "q", "k", "v")))
        return all(
            name in own for name in wanted if isinstance(getattr(module, name, None), Tensor)
        )

    # Layers, of modules and of functions.

    def read(self, name: str, x: Any, weight: Tensor, axis: int, dim: int = 1) -> None:
        """Let a dimension of a weight have the channels of ``x``, or forbid to permute both."""
        is_same = isinstance(x, Channels) and x.axis == axis
        if is_same and self.spaces.size(x) == weight.shape[dim]:
            self.spaces.attach(name, weight, dim, x, reads=True)
            return
        self.freeze(x, f"meets {name}, whose channels are not known to be the same")
        self.spaces.freeze_dim(weight, dim, "has channels of an unknown origin")

    def linear(
        self,
        name: str,
        x: Any,
        weight: Tensor,
        bias: Tensor | None,
        dims: tuple[int, int] = (0, 1),
        suffix: str = ".weight",
    ) -> Channels:
        """``dims``: which dimension of the weight makes channels, and which reads them."""
        self.read(f"{name}{suffix}", x, weight, -1, dims[1])
        made = self.spaces.made_by(f"{name}{suffix}", weight, dim=dims[0])
        sizes = x.sizes if isinstance(x, Channels) else None
        sizes = sizes and (*sizes[:-1], Size(weight.shape[dims[0]]))
        channels = Channels(made, -1, sizes)
        self.spaces.attach(f"{name}.bias", bias, 0, channels)
        return channels

    def conv(
        self, node: fx.Node, name: str, x: Any, weight: Tensor, bias: Tensor | None, groups: int
    ) -> Any:
        dims = weight.dim()  # those of the input: batch, channels, places
        axis, (made, each) = 1 - dims, weight.shape[:2]
        sizes = (self._batch(node), Size(made), *views.fresh(node, dims)[2:])
        is_known = isinstance(x, Channels) and x.axis == axis
        is_known = is_known and self.spaces.size(x) == groups * each
        atom = None
        if groups == 1:
            self.read(f"{name}.weight", x, weight, axis)
        elif each == 1 and made == groups and is_known:  # depthwise: each channel is by itself
            self.spaces.attach(f"{name}.weight", weight, 0, x)
            self.spaces.attach(f"{name}.bias", bias, 0, x)
            return replace(x, sizes=sizes)
        elif each == 1:
            self.freeze(x, f"meets {name}, a depthwise convolution of other channels")
            self.spaces.freeze_tensor(weight, "has channels of an unknown origin")
            self.spaces.freeze_tensor(bias, "has channels of an unknown origin")
            return None
        else:
            atom = made // groups
            if is_known and len(x.spaces) == 1 and each > 4 and each % 4 == 0:
                self.spaces.limit_atom(x.spaces[0], each)
                self.spaces.attach_parts(f"{name}.weight", weight, 1, x, [each], reads=True)
            else:
                self.freeze(x, f"meets {name}, a convolution of groups of {each} channels")
                reason = "has small groups, or channels of an unknown origin"
                self.spaces.freeze_dim(weight, 1, reason)
        channels = Channels(self.spaces.made_by(f"{name}.weight", weight, atom), axis, sizes)
        self.spaces.attach(f"{name}.bias", bias, 0, channels)
        return channels

    def _batch(self, node: fx.Node) -> Size:
        """The batch of a convolution's input."""
        given = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(given, fx.Node):
            shape = self._shape_of(given)
            size = views.computed(operator.getitem, (shape, 0))
            if isinstance(size, Size):
                return size
        return views.fresh(node, 1)[0]

    # Functions and methods.

    def _call_function(self, node: fx.Node) -> Any:
        target, x = node.target, self.argument(node, 0, "input")
        values = [self.values[n] for n in node.all_input_nodes]
        if all(map(is_number, values)):
            is_computed = getattr(target, "__module__", "") in OF_NUMBERS and values
            arguments = self._evaluated(node.args)
            return views.computed(target, arguments) if is_computed else None
        if target is getattr:
            return self._attribute(node, x)
        if target in ALIKE:
            return self.alike(node)
        if target in PER_PLANE_FUNCTIONS:
            return self.per_plane(node, x, PER_PLANE_FUNCTIONS[target])
        if target in CONCATENATIONS:
            return self._concatenate(node)
        if target is operator.getitem:
            return self._index(node, x)
        if target in VIEW_FUNCTIONS:
            return self._view(node, VIEW_FUNCTIONS[target], x)
        if target in MEANS:
            return self._mean(node, x)
        made = self._layer_function(node, x)
        if made is not None:
            return made
        return self.is_unknown(node, getattr(target, "__name__", str(target)))

    def _layer_function(self, node: fx.Node, x: Any) -> Any:
        """A product or a convolution with tensors that the network holds; None for others."""
        target, weight = node.target, self.argument(node, 1, "weight")
        if target in PRODUCTS and isinstance(weight, Held) and None not in weight.dims:
            if len(weight.dims) != 2 or not isinstance(x, Channels):
                return None
            reads, makes = weight.dims
            return self.linear(weight.name, x, weight.tensor, None, (makes, reads), "")
        bias = self.argument(node, 2, "bias")
        if not isinstance(weight, Held) or not (bias is None or isinstance(bias, Held)):
            return None
        name = weight.name.removesuffix(".weight")
        suffix = weight.name[len(name) :]
        own_bias = bias.tensor if bias else None
        if target is F.linear and len(weight.dims) == 2 and None not in weight.dims:
            return self.linear(name, x, weight.tensor, own_bias, weight.dims, suffix)
        is_plain = weight.seen is weight.tensor
        if is_plain and len(weight.dims) == CONVOLUTIONS.get(target, -2) + 2:
            groups = self.argument(node, 6, "groups", 1)
            return self.conv(node, name, x, weight.tensor, own_bias, groups)
        return None

    def _call_method(self, node: fx.Node) -> Any:
        x, method = self.argument(node, 0, "self"), str(node.target)
        if method == "size":
            shape, dims = self._shape_of(node.args[0]), (*node.args[1:], *node.kwargs.values())
            return views.computed(operator.getitem, (shape, dims[0])) if dims else shape
        if method in SHAPES or all(is_number(self.values[n]) for n in node.all_input_nodes):
            return SHAPE
        if method in ALIKE_METHODS:
            return self.alike(node)
        if method in VIEWS:
            return self._view(node, method, x)
        if method in MEANS.values():
            return self._mean(node, x)
        return self.is_unknown(node, f".{method}()")

    def _shape_of(self, node: Any) -> Any:
        value = self.values.get(node)
        if isinstance(value, Channels):
            return SHAPE if value.sizes is None else value.sizes
        if isinstance(value, Held):
            return tuple(Size(size) for size in value.seen.shape)
        return ShapeOf(node.name) if value is None else SHAPE

    def _attribute(self, node: fx.Node, x: Any) -> Any:
        name, whole = node.args[1], node.args[0]
        if name == "shape":
            return self._shape_of(whole)
        if name in ("ndim", "dtype", "device"):
            return SHAPE
        if name == "data":
            return x
        made = None
        if name in ("T", "mT") and isinstance(x, Channels) and (name == "mT" or x.dims == 2):
            made = views.transposed(x, -2, -1)
        elif name in ("T", "mT") and isinstance(x, Held):
            made = x.viewed("transpose", (-2, -1)) if len(x.dims) == 2 else None
        return self.is_unknown(node, f".{name}") if made is None else made

    def _evaluated(self, arguments: Any) -> Any:
        return map_arg(arguments, self.values.get)

    def _view(self, node: fx.Node, method: str, x: Any) -> Any:
        """A view of channels, or of a tensor that the network holds."""
        rest, named = list(self._evaluated(node.args[1:])), dict(self._evaluated(node.kwargs))
        named.pop("input", None)
        for name in VIEWS[method][len(rest) :]:
            if name in named:
                rest.append(named.pop(name))
        is_list = len(rest) == 1 and isinstance(rest[0], (tuple, list))
        if method in ("view", "reshape", "expand", "permute"):
            rest = list(rest[0]) if is_list else rest
        made = None
        if named:
            pass
        elif isinstance(x, Held):
            made = self._view_of_held(method, x, rest)
        elif isinstance(x, Channels):
            made = self._view_of_channels(node, method, x, rest)
        return self.is_unknown(node, f".{method}()") if made is None else made

    @staticmethod
    def _view_of_held(method: str, held: Held, rest: list[Any]) -> Held | None:
        known = [s.number if isinstance(s, Size) and not s.unknown else s for s in rest]
        if method == "expand":  # by as much as there is
            known = [2 if is_number(s) and not isinstance(s, int) else s for s in known]
        return held.viewed(method, known)

    def _view_of_channels(
        self, node: fx.Node, method: str, x: Channels, rest: list[Any]
    ) -> Channels | None:
        if method in ("view", "reshape"):
            return views.reshaped(x, rest, self.spaces.size(x), node)
        if method == "flatten":
            start, end = (*rest, *(0, -1)[len(rest) :])
            return views.flattened(x, start, end, node)
        if method == "permute":
            return views.permuted(x, rest)
        if method in ("transpose", "swapaxes") and len(rest) == 2:
            return views.transposed(x, *rest)
        if method == "unsqueeze" and len(rest) == 1:
            return views.with_one(x, rest[0])
        if method == "squeeze" and len(rest) == 1 and x.sizes is not None:
            dim = rest[0]
            is_one = isinstance(dim, int) and x.sizes[dim] == Size(1)
            return views.without(x, dim) if is_one else None
        return None

    def _index(self, node: fx.Node, x: Any) -> Any:
        index, made = self._evaluated(node.args[1]), None
        if isinstance(x, Attended):
            made = x.channels if index == 0 else None
            return made if index in (0, 1) else self.is_unknown(node, "a part of attention")
        if isinstance(x, Held):
            made = x.viewed("__getitem__", (index,))
        elif isinstance(x, Channels):
            made = views.indexed(x, index, node)
        return self.is_unknown(node, "an index") if made is None else made

    def alike(self, node: fx.Node) -> Any:
        """The same for each channel; tensors that meet have the same channels, or one for all."""
        values = [self.values[n] for n in node.all_input_nodes]
        values = [value for value in values if not is_number(value)]
        channels = [value for value in values if isinstance(value, Channels)]
        if not channels or len({(c.axis, c.dims) for c in channels}) > 1:
            return self.is_unknown(node, "operands of unknown or different dimensions")
        if any(not isinstance(value, (Channels, Held)) for value in values):
            return self.is_unknown(node, "an operand of which nothing is known")
        wide = [c for c in channels if self.spaces.size(c) > 1] or channels[:1]
        made = views.met(values, wide[0], node)
        if made is None:
            return self.is_unknown(node, "a tensor of more dimensions")
        for value in values:
            if isinstance(value, Held):
                self._meet_held(value, wide[0])
        for other in wide[1:]:
            self.spaces.merge_channels(wide[0], other)
        return made

    def _meet_held(self, held: Held, channels: Channels) -> None:
        place = len(held.dims) + channels.axis
        dim = held.dims[place] if place >= 0 else None
        if dim is None:
            return  # the same for all channels
        if held.tensor.shape[dim] == self.spaces.size(channels):
            self.spaces.attach(held.name, held.tensor, dim, channels)
        else:
            self.freeze(held, "meets other channels")
            self.freeze(channels, f"meets {held.name}")

    def per_plane(self, node: fx.Node, x: Any, mixed: int) -> Any:
        if not isinstance(x, Channels) or x.axis >= -mixed:
            return self.is_unknown(node, "a pool along its channels")
        sizes = x.sizes and (*x.sizes[:-mixed], *views.fresh(node, len(x.sizes))[-mixed:])
        return replace(x, sizes=sizes)

    def _mean(self, node: fx.Node, x: Any) -> Any:
        """A mean, sum or extreme over other dimensions than that of the channels."""
        dims = self.argument(node, 1, "dim", node.kwargs.get("axis"))
        keep = self.argument(node, 2, "keepdim", node.kwargs.get("keepdims", False))
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(x, Channels) or not isinstance(dims, (tuple, list)) or not dims:
            return self.is_unknown(node, "mean")
        if x.dims is None and any(dim >= 0 for dim in dims):
            return self.is_unknown(node, "a mean over dimensions whose number is not known")
        behind = [dim if dim < 0 else dim - x.dims for dim in dims]
        if x.axis in behind:
            return self.is_unknown(node, "a mean over channels")
        sizes = x.sizes and list(x.sizes)
        for dim in sorted(behind) if sizes else ():
            sizes[dim] = Size(1) if keep else None
        sizes = sizes and tuple(size for size in sizes if size is not None)
        if keep:
            return replace(x, sizes=sizes)
        return replace(x, axis=x.axis + sum(dim > x.axis for dim in behind), sizes=sizes)

    def _concatenate(self, node: fx.Node) -> Any:
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = self.argument(node, 1, "dim", node.kwargs.get("axis", 0))
        if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
            return self.is_unknown(node, "a concatenation")
        values = [self.values[n] for n in tensors]
        channels = [value for value in values if isinstance(value, Channels)]
        known = all(isinstance(value, (Channels, Held)) for value in values)
        if not known or len({(c.axis, c.dims) for c in channels}) != 1:
            return self.is_unknown(node, "a concatenation with something unknown")
        first = channels[0]
        if dim >= 0 and first.dims is None:
            return self.is_unknown(node, "a concatenation along a dimension of unknown place")
        behind = dim if dim < 0 else dim - first.dims
        unlike = views.fresh(node, first.dims or 0)
        if behind != first.axis:
            made = self.alike(node)
            if isinstance(made, Channels) and made.sizes is not None:
                sizes = list(made.sizes)
                sizes[behind] = unlike[behind]
                made = replace(made, sizes=tuple(sizes))
            return made
        if len(channels) < len(values):
            return self.is_unknown(node, "a concatenation with a tensor that the network holds")
        sizes = first.sizes and list(first.sizes)
        if sizes:
            whole = all(c.sizes[behind] == Size(self.spaces.size(c)) for c in channels)
            total = Size(sum(self.spaces.size(c) for c in channels))
            sizes[behind] = total if whole else unlike[behind]
        spaces = tuple(space for value in channels for space in value.spaces)
        return Channels(spaces, first.axis, sizes and tuple(sizes))
