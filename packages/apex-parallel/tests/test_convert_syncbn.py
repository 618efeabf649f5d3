"""convert_syncbn_model: what is replaced, what is kept, what is shared."""

import pytest
import torch
from torch import nn

from apex.parallel import SyncBatchNorm, convert_syncbn_model


def model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.BatchNorm1d(4, affine=False)),
        nn.BatchNorm3d(4, track_running_stats=False, momentum=None),
    )


def test_what_is_converted():
    original = model()
    keys = list(original.state_dict())
    inner = original[2]
    converted = convert_syncbn_model(original)
    assert converted is original  # only a root that is a batch norm itself becomes another object
    assert converted[2] is inner
    assert list(converted.state_dict()) == keys
    types = [type(m) for m in (converted[1], *inner, converted[3])]
    assert types == [SyncBatchNorm, nn.InstanceNorm2d, SyncBatchNorm, SyncBatchNorm]
    assert (converted[1].eps, converted[1].momentum) == (1e-3, 0.3)
    assert converted[3].momentum is None
    assert converted[3].running_mean is None
    assert inner[1].weight is None


def test_parameters_are_copied_and_statistics_shared():
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight)
    norm.bias.requires_grad_(False)
    converted = convert_syncbn_model(norm)
    assert type(converted) is SyncBatchNorm
    assert torch.equal(converted.weight, norm.weight)
    assert converted.weight.data_ptr() != norm.weight.data_ptr()
    assert isinstance(converted.weight, nn.Parameter)
    assert not converted.bias.requires_grad
    for name, buffer in norm.named_buffers():
        assert converted.get_buffer(name) is buffer


def test_mode_hooks_and_device_are_kept():
    norm = nn.BatchNorm2d(4, affine=False, device="meta").eval()
    norm.my_attribute = "mine"
    seen = []
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    converted = convert_syncbn_model(norm)
    assert not converted.training
    assert converted.running_mean.device.type == "meta"
    assert converted.my_attribute == "mine"
    converted.register_forward_pre_hook(lambda *_: seen.append("before"))
    converted(torch.empty(2, 4, 3, 3, device="meta"))
    assert seen == ["before", "forward"]
    norm(torch.empty(2, 4, 3, 3, device="meta"))
    assert seen == ["before", "forward"] * 2  # hooks are shared, like statistics


def test_handles_of_hooks_still_remove_them():
    norm = nn.BatchNorm1d(4)
    seen = []
    handle = norm.register_forward_hook(lambda *_: seen.append("forward"))
    converted = convert_syncbn_model(norm)
    del norm
    converted(torch.ones(2, 4))
    handle.remove()
    converted(torch.ones(2, 4))
    assert seen == ["forward"]


def test_options():
    converted = convert_syncbn_model(model(), "group", channel_last=True, fuse_relu=True)
    norms = [m for m in converted.modules() if isinstance(m, SyncBatchNorm)]
    assert len(norms) == 3
    assert all(m.process_group == "group" and m.channel_last and m.fuse_relu for m in norms)
    again = convert_syncbn_model(converted)
    assert [m for m in again.modules() if isinstance(m, SyncBatchNorm)] == norms
    assert all(m.process_group == "group" and m.channel_last for m in norms)


def test_torchs_own_keeps_its_group():
    theirs = nn.SyncBatchNorm(4, process_group="group")
    assert convert_syncbn_model(theirs).process_group == "group"
    assert convert_syncbn_model(theirs, "other").process_group == "other"


def test_shared_modules_stay_shared():
    norm = nn.BatchNorm1d(4)
    converted = convert_syncbn_model(nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)}))
    assert converted["a"] is converted["b"][0]
    assert type(converted["a"]) is SyncBatchNorm


def test_weights_tied_between_batch_norms_stay_tied():
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.weight = first.weight
    converted = convert_syncbn_model(nn.Sequential(first, nn.ModuleList([second])))
    assert converted[0].weight is converted[1][0].weight
    assert converted[0].weight is not first.weight
    assert converted[0].bias is not converted[1][0].bias


def test_parametrized_modules_are_refused_before_anything_changes():
    mixed = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    nn.utils.parametrize.register_parametrization(mixed[1], "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"1 is a Parametrized.*remove_parametrizations"):
        convert_syncbn_model(mixed)
    assert type(mixed[0]) is nn.BatchNorm1d


def test_lazy_modules_are_refused_before_anything_changes():
    mixed = nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1 is a LazyBatchNorm1d without parameters yet"):
        convert_syncbn_model(mixed)
    assert type(mixed[0]) is nn.BatchNorm1d
