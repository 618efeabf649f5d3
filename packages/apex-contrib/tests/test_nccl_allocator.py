"""apex.contrib.nccl_allocator: order of calls with a stand-in for NCCL's backend; without a GPU."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from apex.contrib import nccl_allocator
from apex.contrib.nccl_allocator import nccl_allocator as module


class Backend:
    """Notes what it is asked for, and refuses what NCCL's refuses."""

    mem_allocator = "nccl's memory"

    def __init__(self):
        self.calls, self.pools = [], set()

    def register_mem_pool(self, pool):
        assert pool.id not in self.pools
        self.pools.add(pool.id)
        self.calls.append("register")

    def deregister_mem_pool(self, pool):
        self.pools.remove(pool.id)
        self.calls.append("deregister")


@pytest.fixture
def backend(monkeypatch):
    """A GPU and an NCCL process group, as far as these functions look."""
    found = Backend()
    group = SimpleNamespace(_get_backend=lambda device: found)

    @contextlib.contextmanager
    def use(pool, device=None):
        found.calls.append(("use", device))
        yield
        found.calls.append("used")

    @contextlib.contextmanager
    def device(of):
        found.calls.append(("device", of))
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_init(monkeypatch):
    names = "NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    for name in names:
        monkeypatch.setenv(name, "x")
    nccl_allocator.init()
    assert [os.environ[name] for name in names] == ["1", "0"]
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_backend", lambda: "nccl")
    with pytest.warns(RuntimeWarning, match="call init.. before"):
        nccl_allocator.init()


def test_a_pool_is_registered_at_the_end(backend):
    pool = SimpleNamespace(id=(0, 7))
    with nccl_allocator.nccl_mem(pool):
        assert backend.calls == [("use", None)]
    with nccl_allocator.nccl_mem(pool, device=1):
        pass
    one = torch.device("cuda", 1)
    again = ["deregister", ("device", one), ("use", one), "used", "register"]
    assert backend.calls == [("use", None), "used", "register", *again]
    backend.calls.clear()
    with nccl_allocator.nccl_mem(pool, enabled=False):
        pass
    assert backend.calls == []


@pytest.mark.parametrize("argument", ["symmetric", "symm_mem", None])
def test_symmetric(argument, backend, monkeypatch):
    made = []

    class Pool:
        pass

    init = {
        "symmetric": lambda self, memory=None, symmetric=False: made.append((memory, symmetric)),
        "symm_mem": lambda self, memory=None, symm_mem=False: made.append((memory, symm_mem)),
        None: lambda self, memory=None: made.append((memory, None)),
    }[argument]
    monkeypatch.setattr(Pool, "__init__", init)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    nccl_allocator.create_nccl_mem_pool()
    assert made.pop()[0] == "nccl's memory"
    if argument:
        nccl_allocator.create_nccl_mem_pool(symmetric=True)
        assert made == [("nccl's memory", True)]
    else:
        with pytest.raises(ValueError, match="has no such argument"):
            nccl_allocator.create_nccl_mem_pool(symmetric=True)


def test_another_backend_is_refused(backend, monkeypatch):
    other = SimpleNamespace(_get_backend=lambda device: object())
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=other))
    with pytest.raises(RuntimeError, match="is object, which has no memory pools; use nccl"):
        nccl_allocator.create_nccl_mem_pool()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    import _apex_nccl_allocator

    with pytest.raises(RuntimeError, match="create_nccl_mem_pool: needs a GPU"):
        nccl_allocator.create_nccl_mem_pool()
    with pytest.raises(RuntimeError, match="nccl_mem: needs a GPU"), nccl_allocator.nccl_mem(None):
        pass
    with pytest.raises(RuntimeError, match="get_nccl_allocator: needs a GPU"):
        _apex_nccl_allocator.get_nccl_allocator()
    with nccl_allocator.nccl_mem(None, enabled=False):
        assert torch.ones(1) == 1
    assert module.get_func_args(lambda a, b=1: None) == ["a", "b"]
