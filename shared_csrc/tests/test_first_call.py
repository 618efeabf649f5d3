"""The first call of an operator loads its kernels, also when threads race for it."""

import itertools
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import jit, library  # noqa: E402
from shared_csrc.native.errors import BuildError  # noqa: E402

TIMEOUT_S = 60
numbers = itertools.count()  # torch keeps the operators of every test
X = torch.ones(2)


class Wheel:
    """A wheel with one library of two operators; "loading" it registers kernels in Python."""

    def __init__(self, folder, monkeypatch):
        self.namespace = f"apex_first_call_{next(numbers)}"
        self.ops = library.OpLibrary(self.namespace, __file__)
        self.file = folder / "both.so"
        self.kernels = {"one": 10, "two": 20}  # what each adds to its argument
        self.builds = []
        self.failures = []  # of the next builds
        self._registered = torch.library.Library(self.namespace, "IMPL")
        self.call = {name: self._define(name, folder / name) for name in ("one", "two")}
        monkeypatch.setattr(jit, "build_op", self._build)
        monkeypatch.setattr(torch.ops, "load_library", self._load)

    def _define(self, name, folder):
        define = self.ops.define(f"{name}(Tensor x) -> Tensor", str(folder / "ops.py"))
        return define(lambda x: torch.empty_like(x))

    def _build(self, op, target, *, package):
        self.builds.append(op.name)
        if self.failures:
            raise self.failures.pop()
        return self.file

    def _load(self, path):
        assert path == str(self.file)
        for name, added in self.kernels.items():
            self._registered.impl(name, lambda x, added=added: x + added, "CPU")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    return Wheel(tmp_path, monkeypatch)


@pytest.fixture
def late(monkeypatch):
    """A thread whose call has been dispatched to the stub, and waits there until released."""
    arrived, released = threading.Event(), threading.Event()
    device_type = library._device_type
    results = []

    def wait(arguments):
        if threading.current_thread() is not threading.main_thread() and not released.is_set():
            arrived.set()
            assert released.wait(TIMEOUT_S)
        return device_type(arguments)

    def start(function):
        def work():
            try:
                results.append(function(X)[0].item())
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert arrived.wait(TIMEOUT_S)

        def finish():
            released.set()
            thread.join(TIMEOUT_S)
            (result,) = results
            return result

        return finish

    monkeypatch.setattr(library, "_device_type", wait)
    return start


@pytest.mark.parametrize("first", ["one", "two"], ids=["same op", "other op of the library"])
def test_a_call_that_was_on_its_way_while_another_thread_loaded(wheel, late, first):
    finish = late(wheel.call["one"])
    assert wheel.call[first](X)[0] == 1 + wheel.kernels[first]
    assert finish() == 11


def test_both_threads_may_find_no_kernel(wheel, late):
    del wheel.kernels["one"]
    finish = late(wheel.call["one"])
    with pytest.raises(NotImplementedError, match="one has no kernel for cpu tensors"):
        wheel.call["one"](X)
    error = finish()
    assert isinstance(error, NotImplementedError)
    assert wheel.call["two"](X)[0] == 21


def test_a_failed_build_spoils_no_other_call(wheel, late):
    wheel.failures = [BuildError("no compiler")]
    finish = late(wheel.call["one"])
    with pytest.raises(BuildError, match="no compiler"):
        wheel.call["one"](X)
    assert finish() == 11
    assert wheel.builds == ["one", "one"]


def test_a_build_that_keeps_failing_says_so_to_each(wheel, late):
    wheel.failures = [BuildError("no compiler") for _ in range(3)]
    finish = late(wheel.call["one"])
    for _ in range(2):
        with pytest.raises(BuildError, match="no compiler"):
            wheel.call["one"](X)
    assert isinstance(finish(), BuildError)


def test_threads_that_wait_for_the_lock_load_nothing_again(wheel, monkeypatch):
    """All four are in the stub before one of them builds."""
    together = threading.Barrier(4, timeout=TIMEOUT_S)
    device_type = library._device_type

    def wait_for_all(arguments):
        together.wait()
        return device_type(arguments)

    monkeypatch.setattr(library, "_device_type", wait_for_all)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(wheel.call["one"](X)[0].item()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == [11] * 4
    assert wheel.builds == ["one"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_forked_while_another_thread_builds(wheel, monkeypatch):
    """It lacks that thread, which would hold the lock for ever."""
    building, forked = threading.Event(), threading.Event()

    def build(op, target, *, package):
        building.set()
        assert forked.wait(TIMEOUT_S)
        return wheel.file

    monkeypatch.setattr(jit, "build_op", build)
    thread = threading.Thread(target=wheel.call["one"], args=(X,))
    thread.start()
    assert building.wait(TIMEOUT_S)
    child = os.fork()
    if child == 0:
        os._exit(not wheel.ops._lock.acquire(timeout=10))
    forked.set()
    thread.join(TIMEOUT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STRANGERS = {
    "sparse": (lambda x: x.to_sparse(), r"of layout torch\.sparse_coo.* Use x\.to_dense\(\)"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        r"quantized \(torch\.qint8\).* Use x\.dequantize\(\)",
    ),
    "mkldnn": (lambda x: x.to_mkldnn(), r"of layout torch\._mkldnn.* Use x\.to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore")  # of torch, on quantization
@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["first", "later"])
def test_a_tensor_that_no_kernel_takes(wheel, kind, is_loaded):
    """It is on the CPU, but the kernels for the CPU are not for it: "no kernel" would mislead."""
    if is_loaded:
        assert wheel.call["one"](X)[0] == 11
    change, said = STRANGERS[kind]
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without mkldnn")
    with pytest.raises(NotImplementedError, match=rf"::one: x is {said}"):
        wheel.call["one"](change(X))
    assert is_loaded or not wheel.builds  # nothing was compiled for that


def test_lists_without_a_tensor_reach_the_kernel(tmp_path, monkeypatch):
    """Its own checks say what is wrong with them; no tensor says which device's kernel to take."""
    name = f"apex_first_call_{next(numbers)}"
    ops = library.OpLibrary(name, __file__)
    define = ops.define("lists(Tensor[] xs, Tensor[] ys) -> int", str(tmp_path / "op" / "ops.py"))
    call = define(lambda xs, ys: 0)
    registered = torch.library.Library(name, "IMPL")

    def kernel(xs, ys):
        raise ValueError("lists: xs is empty.")

    monkeypatch.setattr(jit, "build_op", lambda op, target, *, package: tmp_path / "op.so")
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: registered.impl("lists", kernel, "CPU")
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="xs is empty"):
            call([], [])


def test_the_stub_serves_again_after_an_error(wheel):
    del wheel.kernels["one"]
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="one has no kernel for cpu tensors"):
            wheel.call["one"](X)


@pytest.mark.parametrize("prebuilt", [False, True], ids=["cache", "wheel"])
def test_a_damaged_library_is_named_with_the_remedy(tmp_path, monkeypatch, prebuilt):
    damaged = tmp_path / ("_kernels" if prebuilt else "cache") / "cpu.so"
    damaged.parent.mkdir()
    damaged.write_bytes(b"\x7fELF")
    ops = library.OpLibrary(f"apex_first_call_{next(numbers)}", str(tmp_path / "_ops.py"))
    monkeypatch.setattr(jit, "build_op", lambda op, target, *, package: damaged)
    call = ops.define("one(Tensor x) -> Tensor", str(tmp_path / "one" / "ops.py"))(torch.empty_like)
    remedy = "It is damaged: " + ("reinstall the package" if prebuilt else "delete it")
    with pytest.raises(BuildError, match=rf"cannot load {damaged}: .*file too short.*\. {remedy}"):
        call(X)
