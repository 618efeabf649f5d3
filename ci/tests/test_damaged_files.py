"""Files of checkpoints that were cut off, or in which a bit was turned: an error, nothing changed.

A load that fails leaves the optimizer as it was. Where ``torch.load`` reads another number, because
it does not compare checksums, ``zipfile`` says that the file is damaged, as the documentation says.
``APEX_SPOILS`` sets how many files of each kind are damaged in either way, ``APEX_SEED`` where.
"""

import copy
import functools
import os
import random
import shutil
import zipfile
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from apex import amp
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.optimizers import FusedAdam, FusedLAMB

SPOILS = int(os.environ.get("APEX_SPOILS", "15"))
SEED = os.environ.get("APEX_SEED", "0")


class Refused(Exception):
    """Instead of a part's own error, after which nothing has changed."""


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    return None


class OneFile:
    """An optimizer whose state is one file of torch.save."""

    def __init__(self, make, **options):
        self.options = options
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.train()

    def train(self):
        for _ in range(2):
            self.model(torch.ones(2, 7)).float().square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder):
        torch.save(self.state(), folder / "state.pt")

    def load(self, folder):
        """What a program does; each part of it either fails or does all that it is to do."""
        calls = [self.optimizer.load_state_dict]
        calls += [amp.load_state_dict] if "amp" in self.options else []
        try:
            state = torch.load(folder / "state.pt", weights_only=True)
            parts = [state[name] for name in ("optimizer", "amp")[: len(calls)]]
        except Exception as error:
            raise Refused from error
        for load, part in zip(calls, parts, strict=True):
            self.whole(lambda load=load, part=part: load(part))

    def whole(self, call):
        before, error = copy.deepcopy(self.state()), error_of(call)
        if error is not None:
            assert is_same(self.state(), before), f"an error has changed something: {error!r}"
            raise Refused from error

    def state(self):
        form = {k: v for k, v in self.options.items() if k == "state_dict_format"}
        state = {"optimizer": self.optimizer.state_dict(**form)}
        state["model"] = [param.detach() for param in self.model.parameters()]
        if "amp" in self.options:
            state["amp"] = amp.state_dict()
        return state

    def is_found(self, folder):
        """Whether the check of the documentation finds the damage."""
        try:
            with zipfile.ZipFile(folder / "state.pt") as file:
                return file.testzip() is not None
        except Exception:
            return True


class Amp(OneFile):
    """Under amp O2, with masters."""

    def __init__(self):
        super().__init__(FusedAdam, amp=True)

    def train(self):
        if not hasattr(self.optimizer, "_amp_stash"):
            given = self.model, self.optimizer
            self.model, self.optimizer = amp.initialize(*given, opt_level="O2", verbosity=0)
        for _ in range(2):
            loss = self.model(torch.ones(2, 7)).float().square().sum()
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Folder(OneFile):
    """A folder of torch.distributed.checkpoint."""

    def save(self, folder):
        dcp.save({"optimizer": self.optimizer.sharded_state_dict()}, checkpoint_id=folder / "dcp")

    def load(self, folder):
        def load():
            state = {"optimizer": self.optimizer.sharded_state_dict()}
            try:
                dcp.load(state, checkpoint_id=folder / "dcp")
            except CheckpointException as error:  # no Exception: it may hold a BaseException
                raise RuntimeError(str(error)) from error
            self.optimizer.load_sharded_state_dict(state["optimizer"])

        self.whole(load)

    def is_found(self, folder):
        return True  # torch.distributed.checkpoint has no checksums: the page says so


def sharded(**options):
    return lambda params, lr: DistributedFusedAdam(params, lr=lr, bucket_cap_mb=1e-4, **options)


KINDS = {
    "amp O2": Amp,
    "FusedAdam": lambda: OneFile(FusedAdam),
    "FusedLAMB": lambda: OneFile(FusedLAMB),
    "DistributedFusedAdam": lambda: OneFile(sharded()),
    "DistributedFusedAdam, format 1": lambda: OneFile(sharded(), state_dict_format=1),
    "DistributedFusedAdam, scaled": lambda: OneFile(
        sharded(with_scaled_states=True, dtype=torch.float16)
    ),
    "DistributedFusedAdam, folder": lambda: Folder(sharded()),
    "DistributedFusedLAMB": lambda: OneFile(
        functools.partial(DistributedFusedLAMB, dwu_num_blocks=1, dwu_num_chunks=1)
    ),
}


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def is_same(a, b):
    """All bits, of nested states."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(is_same, a, b))
    return repr(a) == repr(b)


def damage(generator, folder, how):
    """Cut a file off, or turn one of its bits."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    file = generator.choice(files)
    data = bytearray(file.read_bytes())
    at = generator.randrange(len(data))
    if how == "cut":
        del data[at:]
    else:
        data[at] ^= 1 << generator.randrange(8)
    file.write_bytes(data)
    return f"{file.name}, {how} at {at} of {len(data)}"


def made(kind):
    torch.manual_seed(0)
    return KINDS[kind]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["cut", "bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind, how, tmp_path):
    subject, generator, counts = made(kind), random.Random(f"{SEED} {kind} {how}"), Counter()
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    subject.save(good)
    subject.load(good)  # torch adds keys that older versions did not save
    saved = copy.deepcopy(subject.state())
    subject.train()
    later = copy.deepcopy(subject.state())
    assert not is_same(saved, later)
    for _ in range(SPOILS):
        subject = made(kind)  # another one may have taken options with damaged names
        subject.train()
        shutil.copytree(good, bad)
        where = damage(generator, bad, how)
        try:
            subject.load(bad)
        except Refused:
            counts["refused"] += 1
        else:
            is_right = is_same(subject.state()["optimizer"], saved["optimizer"])
            counts["right" if is_right else "found by a checksum"] += 1
            assert is_right or (how == "bit" and subject.is_found(bad)), where
        shutil.rmtree(bad)
    subject.load(good)
    assert is_same(subject.state()["optimizer"], saved["optimizer"])
    assert how == "bit" or counts["refused"] == SPOILS
    print(f"{kind}, {how}: {dict(counts)}")
