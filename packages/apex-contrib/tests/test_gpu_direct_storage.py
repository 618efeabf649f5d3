"""Tensors' bytes in files, against Python's own; a stand-in is in place of cuFile."""

import io
import os
import re

import pytest
import torch

from apex.contrib.gpu_direct_storage import GDSFile

pytestmark = pytest.mark.filterwarnings("ignore:apex.contrib.gpu_direct_storage is deprecated")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def values(dtype, shape=(3, 5)):
    torch.manual_seed(0)
    return torch.randint(0, 2, shape).to(dtype)


def expected_bytes(tensor):
    """The elements in row-major order, one by one."""
    elements = [element.clone().view(torch.uint8).tolist() for element in tensor.reshape(-1, 1)]
    return bytes(byte for element in elements for byte in element)


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "part": lambda t: t[1:, 2:],
    "every second": lambda t: t[:, ::2],
    "one": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:1].expand(4, 5),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saves_the_elements(tmp_path, dtype, view):
    tensor, path = view(values(dtype)), tmp_path / "x"
    for name in ("save_data", "save_data_no_gds"):
        with GDSFile(str(path), "w") as file:
            getattr(file, name)(tensor)
        assert path.read_bytes() == expected_bytes(tensor)


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loads_the_elements(tmp_path, dtype, view):
    wanted, path = VIEWS[view](values(dtype)).contiguous(), tmp_path / "x"
    path.write_bytes(expected_bytes(wanted))
    for name in ("load_data", "load_data_no_gds"):
        whole = torch.zeros(3, 5, dtype=dtype)
        tensor = VIEWS[view](whole)
        before = tensor._version
        with GDSFile(str(path), "r") as file:
            getattr(file, name)(tensor)
        assert expected_bytes(tensor) == expected_bytes(wanted)
        assert tensor._version > before or tensor.numel() == 0
        if view == "part":  # and nothing beside it
            assert expected_bytes(whole[0]) == bytes(len(expected_bytes(whole[0])))


def test_memory_formats(tmp_path):
    path = str(tmp_path / "x")
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with GDSFile(path, "w") as file:
        file.save_data(image)
    plain = torch.empty(2, 3, 4, 5)
    other = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with GDSFile(path, "r") as file:
        file.load_data(plain)
        file.load_data(other)
    assert torch.equal(plain, image)
    assert torch.equal(other, image)


def test_conjugates(tmp_path):
    path, x = str(tmp_path / "x"), torch.randn(3, dtype=torch.complex64)
    with GDSFile(path, "w") as file:
        file.save_data(x.conj())
    y = torch.zeros(3, dtype=torch.complex64)
    with GDSFile(path, "r") as file:
        file.load_data(y.conj())
    assert torch.equal(y, x)


def test_offsets(tmp_path):
    path = tmp_path / "x"
    a, b = torch.arange(4.0), torch.arange(3, dtype=torch.int16)
    with GDSFile(str(path), "w") as file:
        file.save_data(a)
        file.save_data(b, offset=a.nbytes)
        loaded = torch.zeros(3, dtype=torch.int16)
        file.load_data(loaded, offset=16)  # what is open for writing can be read
        assert torch.equal(loaded, b)
    assert path.read_bytes() == expected_bytes(a) + expected_bytes(b)
    with GDSFile(str(path), "r+") as file:
        file.save_data(b, offset=2)
    assert path.read_bytes() == expected_bytes(a)[:2] + expected_bytes(b) + expected_bytes(a)[
        8:
    ] + expected_bytes(b)


def test_parameters_that_require_gradients(tmp_path):
    path, weight = str(tmp_path / "x"), torch.nn.Parameter(torch.randn(4))
    saved = weight.detach().clone()
    with GDSFile(path, "w") as file:
        file.save_data(weight)
    loss = (weight * weight).sum()
    torch.nn.init.zeros_(weight)
    with GDSFile(path, "r") as file:
        file.load_data(weight)
    assert torch.equal(weight, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode(), GDSFile(path, "r") as file:
        fresh = torch.empty(4)
        file.load_data(fresh)
    assert torch.equal(fresh, saved)


def test_short_files(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(11))
    tensor = torch.ones(3)
    with GDSFile(str(path), "r") as file:
        for load in (file.load_data, file.load_data_no_gds):
            text = re.escape(
                "has 11 bytes from byte 0 on, but the tensor [3] of torch.float32 needs 12"
            )
            with pytest.raises(EOFError, match=text):
                load(tensor)
            with pytest.raises(EOFError, match="has 0 bytes from byte 90 on"):
                load(tensor, offset=90)
            with pytest.raises(ValueError, match="offset must be at least 0, got -1"):
                load(tensor, offset=-1)
            with pytest.raises(TypeError, match="offset must be an int, in bytes, got float"):
                load(tensor, offset=1.0)
    assert torch.equal(tensor, torch.ones(3))


def test_files_that_become_short(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(bytes(12))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with GDSFile(str(path), "r") as file, pytest.raises(EOFError, match="became shorter"):
        file.load_data(torch.ones(3))


def test_reads_and_writes_in_pieces(tmp_path, monkeypatch):
    """What one call of the system does not do, the next does."""
    path, x, y = tmp_path / "x", torch.randn(100), torch.zeros(100)
    pread, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, b, offset: pread(fd, [b[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, b, offset: pwrite(fd, b[:7], offset))
    with GDSFile(str(path), "w") as file:
        file.save_data(x)
        file.load_data(y)
    assert torch.equal(x, y)


def test_closed_files(tmp_path):
    file = GDSFile(str(tmp_path / "x"), "w")
    file.save_data(torch.ones(2))
    file.close()
    file.close()
    for name in ("load_data", "save_data", "load_data_no_gds", "save_data_no_gds"):
        with pytest.raises(ValueError, match=f"GDSFile.{name}: the file .* is closed"):
            getattr(file, name)(torch.ones(2))
    with pytest.raises(KeyError), GDSFile(str(tmp_path / "x"), "r") as file:
        raise KeyError
    with pytest.raises(ValueError, match="is closed"):
        file.load_data(torch.ones(2))


def test_files_that_are_read_only(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(8))
    with GDSFile(str(path), "r") as file:
        with pytest.raises(io.UnsupportedOperation, match="open it with mode 'w' or 'r\\+'"):
            file.save_data(torch.ones(2))
        with pytest.raises(io.UnsupportedOperation, match="save_data_no_gds"):
            file.save_data_no_gds(torch.ones(2))
    assert path.read_bytes() == bytes(8)


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        ([1.0], "list"),
        (torch.empty(2, device="meta"), "torch.strided on meta"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo on cpu"),
    ],
)
def test_what_has_no_bytes(tmp_path, tensor, got):
    with GDSFile(str(tmp_path / "x"), "w") as file:
        for name in ("load_data", "save_data"):
            with pytest.raises(TypeError, match=f"tensor must be a strided .* got {got}"):
                getattr(file, name)(tensor)


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="filename must be a str, got PosixPath"):
        GDSFile(tmp_path / "x", "r")
    with pytest.raises(TypeError, match="mode must be a str, got int"):
        GDSFile("x", 3)
    with pytest.raises(ValueError, match="mode must be one of r, w, r\\+, got 'a'"):
        GDSFile(str(tmp_path / "x"), "a")
    with pytest.raises(TypeError, match="mode"):
        GDSFile("x")  # and __del__ finds nothing to close
    with pytest.raises(FileNotFoundError):
        GDSFile(str(tmp_path / "x"), "r")
    assert not (tmp_path / "x").exists()


def test_warns_that_it_is_deprecated(tmp_path):
    with pytest.warns(FutureWarning, match=r"use torch.cuda.gds.GdsFile"):
        GDSFile(str(tmp_path / "x"), "w").close()


def test_extension_module(tmp_path):
    import _apex_gpu_direct_storage

    file = _apex_gpu_direct_storage._GDSFile(str(tmp_path / "x"), "w")
    file.save_data(torch.ones(1))
    file.close()
    assert (tmp_path / "x").read_bytes() == expected_bytes(torch.ones(1))


class OnCard(torch.Tensor):
    """A stand-in for a CUDA tensor, in the host's memory."""

    is_cuda = True


def on(tensor):
    return tensor.as_subclass(OnCard)


class GdsFile:
    """A stand-in for torch.cuda.gds.GdsFile: cuFile moves whole storages."""

    def __init__(self, filename, flags):
        self.fd = os.open(filename, flags)

    def load_storage(self, storage, offset=0):
        found = os.pread(self.fd, storage.nbytes(), offset)
        bytes_of(storage).copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))

    def save_storage(self, storage, offset=0):
        os.pwrite(self.fd, bytes(bytes_of(storage).tolist()), offset)


def bytes_of(storage):
    return torch.tensor([], dtype=torch.uint8).set_(storage)


@pytest.fixture
def on_card(monkeypatch, tmp_path):
    """Let cuFile work, by a stand-in. Gives a path, and what GdsFile was called with."""
    opened = []

    class Stream:
        waited = 0

        def synchronize(self):
            self.waited += 1

    stream = Stream()

    def open_file(*args):
        opened.append(args)
        return GdsFile(*args)

    monkeypatch.setattr(torch.cuda.gds, "GdsFile", open_file)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(os, "O_DIRECT", 0)  # not every file system of a test has it
    return str(tmp_path / "x"), opened, stream


def test_direct_transfers(on_card):
    (path, opened, stream), x, y = on_card, torch.randn(4), torch.zeros(4)
    with GDSFile(path, "w") as file:
        file.save_data(on(x), offset=8)
        file.load_data(on(y), offset=8)
        assert file.gds_error is None
        assert opened == [(path, os.O_RDWR | os.O_CREAT)]  # once, and nothing is lost
        assert stream.waited == 2  # for kernels that write the tensor, or still read it
        file.save_data_no_gds(on(2 * x))
        part = torch.zeros(8)
        file.load_data(on(part[:4]))
        assert file.gds_error == "the tensor is not all of its storage"
    assert torch.equal(y, x)
    assert torch.equal(part, torch.cat([2 * x, torch.zeros(4)]))


def test_direct_transfers_that_cannot_be(on_card, monkeypatch):
    def refuse(filename, flags):
        raise RuntimeError("cuFileHandleRegister failed")

    monkeypatch.setattr(torch.cuda.gds, "GdsFile", refuse)
    x, y = torch.randn(4), torch.zeros(4)
    with GDSFile(on_card[0], "w") as file:
        file.save_data(on(x))
        assert file.gds_error == "cuFileHandleRegister failed"
        file.load_data(on(y))
    assert torch.equal(x, y)
