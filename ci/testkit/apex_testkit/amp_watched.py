"""A network in training under amp beside its plain model, and the comparison of the two."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from apex import amp
from apex.amp import _amp_state

from .amp_model import MOMENTUM, Layer, Net, Plain, PlainScaler, same
from .fresh_amp import reset_amp

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
        "optimizers": st.integers(1, 2),  # that share the weights out, one each in turn
    }
)


class Watched(RuleBasedStateMachine):
    """A network, its one or two optimizers and two losses under amp, and the plain model."""

    make = staticmethod(torch.optim.SGD)

    @initialize(spec=SPECS)
    def start(self, spec):
        self.level = spec.pop("level")
        norms, frozen, window = (spec.pop(name) for name in ("norms", "frozen", "window"))
        count = min(spec.pop("optimizers"), len(norms))
        self.half = HALVES.get(self.level)
        model = Net([Layer(is_norm, i) for i, is_norm in enumerate(norms)])
        self.plain = [Plain(layer.weight.detach().clone(), 2**-9) for layer in model]
        self.frozen = {i for i in range(1, len(norms)) if frozen >> i & 1}
        for index in self.frozen:
            model[index].weight.requires_grad_(False)
        weights = [layer.weight for layer in model]
        own = [weights[i::count] for i in range(count)]
        optimizers = [self.make(params, lr=2**-9, momentum=MOMENTUM) for params in own]
        self.model, self.optimizers = amp.initialize(
            model, optimizers, opt_level=self.level, num_losses=2, verbosity=0, **spec
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
        reset_amp()

    # What is looked at.

    def weights(self):
        return [layer.weight for layer in self.model]

    def stepped_on(self):
        own = [iter([p for g in o.param_groups for p in g["params"]]) for o in self.optimizers]
        return [next(own[index % len(own)]) for index in range(len(self.plain))]

    def optimizer_of(self, index):
        return self.optimizers[index % len(self.optimizers)]

    def is_held(self, index):
        """Whether gradients of the weight's optimizer are still scaled."""
        count = len(self.optimizers)
        own = self.plain[index % count :: count]
        return self.pending is not None and any(plain.scaled is not None for plain in own)

    def is_half(self, index):
        return self.half is not None and self.model[index].norm is None

    def has_master(self, index):
        return self.stepped_on()[index] is not self.model[index].weight

    def agree(self, grad, expected):
        """Whether two gradients do; after an overflow, whether both or none are there."""
        return (grad is None) == (expected is None) if self.dirty else same(grad, expected)

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
            momentum = self.optimizer_of(index).state.get(stepped, {}).get("momentum_buffer")
            assert same(momentum, plain.momentum), f"momentum {index}"
            if self.is_held(index):
                assert self.agree(weight.grad, plain.scaled), f"scaled gradient {index}"
            if not self.is_held(index) or self.has_master(index):
                assert self.agree(stepped.grad, plain.done), f"gradient {index}"
        actual = amp.state_dict()
        for index, scaler in enumerate(self.scalers):
            entry = actual[f"loss_scaler{index}"]
            assert entry["loss_scale"] == scaler.scale, f"scale {index}"
            assert entry["unskipped"] == scaler.unskipped, f"unskipped {index}"
            assert entry.get("overflows_left", 1) == (scaler.left if scaler.hysteresis > 1 else 1)
        assert all(o._amp_stash.already_patched == self.skip for o in self.optimizers)
