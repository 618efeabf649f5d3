"""A network in training under amp beside its plain model, and the comparison of the two."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from apex import amp
from apex.amp import _amp_state
from apex.amp._amp_state import AmpState

from .amp_model import MOMENTUM, Layer, Net, Plain, PlainScaler, same

HALVES = {"O2": torch.float16, "O5": torch.bfloat16}
SPECS = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["O0", "O1", "O2", "O4", "O5"]),
        "loss_scale": st.sampled_from(["dynamic", "dynamic", 1.0, 8.0]),
        "min_loss_scale": st.sampled_from([None, 16.0]),
        "max_loss_scale": st.sampled_from([32.0, 256.0]),
        "hysteresis": st.integers(1, 2),
        "window": st.integers(1, 3),
        "norms": st.lists(st.booleans(), min_size=1, max_size=4),
        "frozen": st.integers(0, 15),
    }
)


class Watched(RuleBasedStateMachine):
    """A network, its optimizer and two losses under amp, and the plain model of them."""

    make = staticmethod(torch.optim.SGD)

    @initialize(spec=SPECS)
    def start(self, spec):
        self.level = spec.pop("level")
        norms, frozen, window = (spec.pop(name) for name in ("norms", "frozen", "window"))
        self.half = HALVES.get(self.level)
        model = Net([Layer(is_norm, i) for i, is_norm in enumerate(norms)])
        self.plain = [Plain(layer.weight.detach().clone(), 2**-9) for layer in model]
        self.frozen = {i for i in range(1, len(norms)) if frozen >> i & 1}
        for index in self.frozen:
            model[index].weight.requires_grad_(False)
        weights = [layer.weight for layer in model]
        optimizer = self.make(weights, lr=2**-9, momentum=MOMENTUM)
        self.model, self.optimizer = amp.initialize(
            model, optimizer, opt_level=self.level, num_losses=2, verbosity=0, **spec
        )
        for scaler in _amp_state.loss_scalers:
            scaler._scale_seq_len = window
        self.scalers = [PlainScaler(spec, window) for _ in range(2)]
        # Without anything to unscale amp leaves gradients to autograd, and does not count.
        self.is_plain = self.half is None and spec["loss_scale"] == 1.0
        self.skip = self.dirty = False  # the next step is skipped; gradients are of an overflow
        self.pending, self.pending_overflow = None, False  # the loss_id of a delayed pass
        self.saved, self.paused = None, False

    def teardown(self):
        if hasattr(_amp_state, "handle"):
            _amp_state.handle._deactivate()
        _amp_state.__dict__.clear()
        _amp_state.__dict__.update(AmpState().__dict__)

    # What is looked at.

    def weights(self):
        return [layer.weight for layer in self.model]

    def stepped_on(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def is_half(self, index):
        return self.half is not None and self.model[index].norm is None

    def has_master(self, index):
        return self.stepped_on()[index] is not self.model[index].weight

    @invariant()
    def agrees(self):
        if not hasattr(self, "saved"):
            return
        for index, (weight, stepped, plain) in enumerate(
            zip(self.weights(), self.stepped_on(), self.plain, strict=True)
        ):
            dtype = self.half if self.is_half(index) else torch.float32
            assert weight.dtype is dtype
            assert torch.equal(weight, plain.value.to(dtype)), f"parameter {index}"
            if stepped is not weight:
                assert stepped.dtype is torch.float32
                assert self.is_half(index)
                assert torch.equal(stepped, plain.value), f"master {index}"
            momentum = self.optimizer.state.get(stepped, {}).get("momentum_buffer")
            assert same(momentum, plain.momentum), f"momentum {index}"
            if self.dirty:
                continue
            if self.pending is not None:
                assert same(weight.grad, plain.scaled), f"scaled gradient {index}"
            if self.pending is None or self.has_master(index):
                assert same(stepped.grad, plain.done), f"gradient {index}"
        actual = amp.state_dict()
        for index, scaler in enumerate(self.scalers):
            entry = actual[f"loss_scaler{index}"]
            assert entry["loss_scale"] == scaler.scale, f"scale {index}"
            assert entry["unskipped"] == scaler.unskipped, f"unskipped {index}"
            assert entry.get("overflows_left", 1) == (scaler.left if scaler.hysteresis > 1 else 1)
        assert self.optimizer._amp_stash.already_patched == self.skip
