"""What modules do with channels: a rule for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from . import channel_views as views
from .channel_kinds import ALIKE_MODULES, PER_PLANE
from .channel_spaces import Attended, Channels, Size

ChannelRules = Any  # of .channel_rules, which takes its rules from here


def _linear_module(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Channels:
    return rules.linear(name, x, module.weight, module.bias)


def _conv_module(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    return rules.conv(node, name, x, module.weight, module.bias, module.groups)


def _norm(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    """Batch and instance norm: the channels are dimension 1."""
    known = isinstance(x, Channels) and x.dims is not None and x.axis == 1 - x.dims
    # Apex's SyncBatchNorm may add a second tensor, or have its channels last.
    known = known and len(node.all_input_nodes) == 1
    known = known and not getattr(module, "channel_last", False)
    known = known and getattr(module, "torch_channels_last", True)  # of apex.contrib.groupbn
    if not known or rules.spaces.size(x) != module.num_features:
        return _not_its_channels(rules, node, name, module)
    for own in ("weight", "bias", "running_mean", "running_var"):
        rules.spaces.attach(f"{name}.{own}", getattr(module, own), 0, x)
    return x


def last_norm(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    """Layer and RMS norm of the last dimensions, which have the channels or are behind them."""
    shape = tuple(getattr(module, "normalized_shape", ()))
    if not shape or not isinstance(x, Channels) or len(node.all_input_nodes) != 1:
        return _not_its_channels(rules, node, name, module)
    if len(shape) < -x.axis:
        return x  # each channel by itself
    if shape[x.axis] != rules.spaces.size(x):
        return _not_its_channels(rules, node, name, module)
    for own in ("weight", "bias"):
        tensor = getattr(module, own, None)
        rules.spaces.attach(f"{name}.{own}", tensor, len(shape) + x.axis, x)
    return x


def _local_norm(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    """Local response norm: it needs to know where its channels were."""
    is_known = isinstance(x, Channels) and x.dims is not None and x.axis == 1 - x.dims
    if not is_known or x.sizes[1] != Size(rules.spaces.size(x)):
        return _not_its_channels(rules, node, name, module)
    order = getattr(module, "channel_order", None)
    if order is None:
        device = next((p.device for p in rules.model.parameters()), None)
        order = torch.arange(rules.spaces.size(x), device=device)
    order = rules.local_norms.setdefault(module, order)
    rules.spaces.attach(f"{name}.channel_order", order, 0, x)
    return x


def _prelu(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    """A slope for all channels, or one for each, which are dimension 1."""
    if not isinstance(x, Channels):
        return _not_its_channels(rules, node, name, module)
    if module.num_parameters > 1:
        if x.dims is None or x.axis != 1 - x.dims:
            return _not_its_channels(rules, node, name, module)
        rules.spaces.attach(f"{name}.weight", module.weight, 0, x)
    return x


def _not_its_channels(rules: ChannelRules, node: fx.Node, name: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        rules.spaces.freeze_tensor(tensor, f"{name} has channels of an unknown origin")
    rules.freeze_inputs(node, f"meets {name}, whose channels are not known to be the same")


def _alike_module(rules: ChannelRules, node: fx.Node, name: str, module: nn.Module, x: Any) -> Any:
    return rules.alike(node)


def _plane_module(rules: ChannelRules, node: fx.Node, name: str, module: nn.Module, x: Any) -> Any:
    mixed = next(n for n, kinds in PER_PLANE.items() if isinstance(module, kinds))
    if getattr(module, "return_indices", False):
        return rules.is_unknown(node, type(module).__name__)
    return rules.per_plane(node, x, mixed)


def _flatten_module(rules: ChannelRules, node: fx.Node, name: str, module: Any, x: Any) -> Any:
    made = None
    if isinstance(x, Channels):
        made = views.flattened(x, module.start_dim, module.end_dim, node)
    return rules.is_unknown(node, "a flatten") if made is None else made


def _attention(
    rules: ChannelRules, node: fx.Node, name: str, module: nn.MultiheadAttention, x: Any
) -> Any:
    """Readers are the three projections; what it makes are the rows of the last one."""
    inputs = [rules.argument(node, i, own) for i, own in enumerate(("query", "key", "value"))]
    if module._qkv_same_embed_dim:
        names = ["in_proj_weight"] * 3
    else:
        names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    for value, own in zip(inputs, names, strict=True):
        rules.read(f"{name}.{own}", value, module._parameters[own], -1)
    named = [node.kwargs.get(own) for own in ("key_padding_mask", "attn_mask")]
    for mask in (*node.args[3:], *named):
        if isinstance(mask, fx.Node):
            rules.freeze(rules.values[mask], "is a mask of attention")
    out = module.out_proj
    if not rules.is_plain(out):
        rules.spaces.freeze_tensor(out.bias, "is used by a parametrized projection")
        return None
    rules.spaces.freeze_dim(out.weight, 1, "is in the order of attention heads")
    made = rules.spaces.made_by(f"{name}.out_proj.weight", out.weight)
    sizes = inputs[0].sizes if isinstance(inputs[0], Channels) else None
    channels = Channels(made, -1, sizes and (*sizes[:-1], Size(out.weight.shape[0])))
    rules.spaces.attach(f"{name}.out_proj.bias", out.bias, 0, channels)
    return Attended(channels)


MODULE_RULES: Sequence[tuple[Any, Callable[..., Any]]] = (
    (nn.Linear, _linear_module),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv_module),
    (nn.MultiheadAttention, _attention),
    (nn.modules.batchnorm._NormBase, _norm),
    ((nn.LayerNorm, nn.RMSNorm), last_norm),
    (nn.LocalResponseNorm, _local_norm),
    (nn.PReLU, _prelu),
    (ALIKE_MODULES, _alike_module),
    (tuple(kind for kinds in PER_PLANE.values() for kind in kinds), _plane_module),
    (nn.Flatten, _flatten_module),
)
