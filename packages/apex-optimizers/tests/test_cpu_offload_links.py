"""Pinned memory and streams of CPUOffload, by fakes where only a GPU has them."""

import torch

from apex.optimizers.cpu_offload.links import HostMemory, StreamLink


def test_pinned_pieces_are_shared(monkeypatch):
    """Each has its memory, its strides and its own count of changes."""
    monkeypatch.setattr(torch, "empty", _unpinned(torch.empty))
    memory = HostMemory(is_pinned=True)
    likes = [torch.empty(3, 5), torch.empty(5, 3).t(), torch.empty(7)]
    made = [memory.like(t, torch.bfloat16) for t in likes]
    assert [m.stride() for m in made] == [t.stride() for t in likes]
    assert len({m.untyped_storage().data_ptr() for m in made}) == 1
    before = [m._version for m in made]
    for value, own in enumerate(made):
        own.fill_(value)
    assert [set(m.flatten().tolist()) for m in made] == [{0.0}, {1.0}, {2.0}]
    assert [m._version for m in made] == [count + 1 for count in before]


def _unpinned(empty):
    def call(*args, pin_memory=False, **options):
        return empty(*args, **options)

    return call


class FakeStream:
    """Notes what is asked of streams, in order."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def record_event(self):
        self.log.append((self.name, "event"))
        return self


def test_streams_wait_for_the_callers(monkeypatch):
    """What StreamLink asks of torch.cuda, which no machine without a GPU can run."""
    log, names = [], iter(["down", "up"])
    here = FakeStream(log, "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    kept = lambda tensor, stream: log.append((stream.name, "keeps", tensor.numel()))
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    link = StreamLink(torch.device("cuda", 0))
    host, far = torch.zeros(3), torch.ones(3)
    link.receive([host], [far])
    assert host.tolist() == [1, 1, 1]
    link.send([host + 1], [far])
    assert far.tolist() == [2, 2, 2]
    link.join()
    assert log == [
        ("down", "waits for", "current"),
        ("down", "keeps", 3),
        ("down", "event"),
        ("up", "waits for", "current"),
        ("up", "keeps", 3),
        ("up", "event"),
        ("current", "waits for", "up"),
    ]
