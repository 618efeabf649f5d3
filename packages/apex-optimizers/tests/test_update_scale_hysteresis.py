"""update_scale_hysteresis against the rule in plain Python, over long sequences of steps."""

import itertools
import random

import amp_C
import pytest
import torch

from apex.optimizers.update_scale_hysteresis import update_scale_hysteresis
from apex_testkit.opcheck import opcheck_samples


def rule(scale, growth, tolerance, found, growth_factor, backoff_factor, interval, hysteresis):
    """One step, as the specification says it."""
    if found:
        tolerance -= 1
        if tolerance > 0:
            return scale, 0, tolerance
        return scale * backoff_factor, 0, tolerance
    growth += 1
    if growth == interval:
        grown = torch.tensor(scale * growth_factor, dtype=torch.float32)
        return scale * growth_factor if grown.isfinite() else scale, 0, hysteresis
    return scale, growth, hysteresis


@pytest.mark.parametrize(("interval", "hysteresis"), [*itertools.product((1, 3), (1, 2, 4))])
def test_follows_the_rule(interval, hysteresis, device):
    draw = random.Random(interval * 10 + hysteresis)
    scale = torch.full((1,), 2.0**16, device=device)
    growth = torch.zeros(1, dtype=torch.int32, device=device)
    tolerance = torch.full((1,), hysteresis, dtype=torch.int32, device=device)
    expected = (2.0**16, 0, hysteresis)
    for _ in range(200):
        found = float(draw.random() < 0.4)
        inf = torch.tensor([found], device=device)
        numbers = (2.0, 0.5, interval, hysteresis)
        result = amp_C.update_scale_hysteresis(scale, growth, tolerance, inf, *numbers)
        expected = rule(*expected, found, *numbers)
        assert result is scale
        assert (scale.item(), growth.item(), tolerance.item()) == expected


def test_stops_growing_where_float32_ends(device):
    scale = torch.full((1,), 2.0**127, device=device)
    counters = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(2)]
    update_scale_hysteresis(scale, *counters, torch.zeros(1, device=device), 2.0, 0.5, 2, 3)
    assert scale.item() == 2.0**127
    assert [c.item() for c in counters] == [0, 3]


def test_nan_counts_as_found(device):
    scale = torch.full((1,), 8.0, device=device)
    counters = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(2)]
    nan = torch.full((1,), float("nan"), device=device)
    update_scale_hysteresis(scale, *counters, nan, 2.0, 0.25, 2, 3)
    assert (scale.item(), *(c.item() for c in counters)) == (2.0, 0, 0)


def test_op_is_a_citizen_of_torch(device):
    scale, found = torch.ones(1, device=device), torch.zeros(1, device=device)
    counters = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(2)]
    numbers = (2.0, 0.5, 2, 3)
    opcheck_samples(update_scale_hysteresis, [(scale, *counters, found, *numbers)])


def test_wrong_tensors_change_nothing(device):
    scale, found = torch.ones(1, device=device), torch.ones(1, device=device)
    counters = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(2)]
    numbers = (2.0, 0.5, 2, 3)
    with pytest.raises(RuntimeError, match="growth_tracker must be one int32 number"):
        update_scale_hysteresis(scale, counters[0].long(), counters[1], found, *numbers)
    with pytest.raises(RuntimeError, match="found_inf must be one float32 number"):
        update_scale_hysteresis(scale, *counters, found.repeat(2), *numbers)
    with pytest.raises(RuntimeError, match="current_scale must be one float32 number"):
        update_scale_hysteresis(scale.double(), *counters, found, *numbers)
    assert (scale.item(), *(c.item() for c in counters)) == (1, 1, 1)


BAD = [
    (0, "growth_factor", 0.0),
    (1, "backoff_factor", float("nan")),
    (2, "growth_interval", 0),
    (3, "hysteresis", -1),
]


@pytest.mark.parametrize(("position", "name", "bad"), BAD)
def test_numbers_out_of_range_change_nothing(position, name, bad, device):
    scale, found = torch.ones(1, device=device), torch.ones(1, device=device)
    counters = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(2)]
    numbers = [2.0, 0.5, 2, 3]
    numbers[position] = bad
    with pytest.raises(RuntimeError, match=f"update_scale_hysteresis: {name} must be .*got"):
        update_scale_hysteresis(scale, *counters, found, *numbers)
    assert (scale.item(), *(c.item() for c in counters)) == (1, 1, 1)
