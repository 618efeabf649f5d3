"""Kernels that are compiled at their first launch, with fakes of NVRTC and of the driver."""

import ctypes
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from drawing import EXPECTED, HERE, SHARED, draw, forget

from shared_csrc.native import drivers, nvrtc, rtc, trust
from shared_csrc.native.errors import BuildError

pytestmark = pytest.mark.builds


def test_a_kernel_is_compiled_and_loaded_once_for_cards_of_a_kind(cache, open_drawn, fakes):
    driver = fakes[0]
    loads, compilations = driver.fake_loads(), driver.fake_compilations()
    library = open_drawn()
    for device in (0, 0, 1, 70, 0, 70):  # 70: more than the library counts
        assert draw(library, device) == EXPECTED
    assert (driver.fake_loads() - loads, driver.fake_compilations() - compilations) == (1, 1)
    assert draw(library, 2) == EXPECTED
    assert (driver.fake_loads() - loads, driver.fake_compilations() - compilations) == (2, 2)
    assert {folder.name for folder in cache.iterdir()} == {
        "nvrtc-13.7-sm_90",
        "nvrtc-13.7-compute_120",  # a newer card: the driver translates for it
    }


@pytest.mark.parametrize(("device", "kind"), [(0, "sm_90"), (2, "compute_120")])
def test_options(cache, open_drawn, fakes, device, kind):
    draw(open_drawn(), device)
    image = next(cache.glob(f"*{kind}/*.kernel")).read_bytes()
    symbol, magic, options = image.split(b"\0")
    assert (symbol, magic) == (b"_Z4drawIfEvPT_i4Line", b"machine code")
    assert options.startswith(b"apex::gpu::draw<float> --std=c++20 -default-device")
    assert f"--gpu-architecture={kind}".encode() in options
    assert options.endswith(b" ptx") == (kind == "compute_120")


def test_a_card_older_than_the_compiler(cache, open_drawn):
    said = draw(open_drawn(), 3)
    assert said.startswith("drawn: NVRTC 13.7 compiles for compute capability 75 and later, and")


def test_a_kernel_that_does_not_compile(cache, open_drawn, tmp_path):
    folder = tmp_path / "drawn"
    folder.mkdir()
    (folder / "drawn.cpp").write_text("")
    library = open_drawn(folder)
    for _ in range(2):
        said = draw(library)
        assert said.startswith("drawn: NVRTC 13.7 did not compile apex::gpu::draw<float>: NVRTC_E")
        assert "error: no template draw" in said


def test_another_process_finds_it(cache, open_drawn, fakes, monkeypatch):
    draw(open_drawn())
    forget(monkeypatch)
    compilations = fakes[0].fake_compilations()
    monkeypatch.setenv("APEX_JIT", "0")  # nothing is compiled
    assert draw(open_drawn()) == EXPECTED
    assert fakes[0].fake_compilations() == compilations


def test_where_compiling_is_forbidden(cache, open_drawn, monkeypatch):
    monkeypatch.setenv("APEX_JIT", "0")
    said = draw(open_drawn())
    assert said.startswith("drawn: APEX_JIT=0 forbids compiling apex::gpu::draw<float> for sm_90")
    assert not cache.exists()


def damage(file, how):
    seal = trust.seal_path(file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "no seal":
        seal.unlink()
    elif how == "another's seal":
        seal.write_text("0" * 64)
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    elif how == "writable for all":
        file.chmod(0o666)


@pytest.mark.parametrize(
    "how",
    ["truncated", "empty", "no seal", "another's seal", "a folder", "writable for all"],
)
def test_what_lies_damaged_in_the_cache_is_compiled_again(
    cache, open_drawn, fakes, monkeypatch, how
):
    draw(open_drawn())
    (file,) = cache.rglob("*.kernel")
    damage(file, how)
    forget(monkeypatch)
    compilations = fakes[0].fake_compilations()
    assert draw(open_drawn()) == EXPECTED
    assert fakes[0].fake_compilations() == compilations + 1
    forget(monkeypatch)
    assert draw(open_drawn()) == EXPECTED
    mended = how != "a folder"  # which is not ours to remove
    assert fakes[0].fake_compilations() == compilations + (1 if mended else 2)
    assert [p.name for p in cache.rglob(".kernel-*")] == []


def test_headers_are_a_part_of_its_name(cache, open_drawn, fakes, monkeypatch, tmp_path):
    folder = tmp_path / "drawn"
    folder.mkdir()
    for file in (HERE / "drawn").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    compilations = fakes[0].fake_compilations()
    for expected, text in ((1, ""), (1, ""), (2, "// another\n"), (2, "")):
        if text:
            (folder / "drawn.h").write_text((folder / "drawn.h").read_text() + text)
        forget(monkeypatch)
        assert draw(open_drawn(folder)) == EXPECTED
        assert fakes[0].fake_compilations() - compilations == expected


def no_home():
    raise RuntimeError("Could not determine home directory.")


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_writing(*_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


UNUSABLE = ["a file is there", "full", "read-only", "writable for all", "no home"]


@pytest.mark.parametrize("how", UNUSABLE)
def test_kernels_run_where_none_can_be_kept(cache, open_drawn, monkeypatch, caplog, how):
    if how == "a file is there":
        cache.write_text("")
    elif how == "full":
        monkeypatch.setattr(os, "replace", no_space)
    elif how == "read-only":
        monkeypatch.setattr(trust, "make_private_folder", no_writing)
    elif how == "no home":
        for name in ("APEX_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        cache.mkdir()
        cache.chmod(0o777)
    with caplog.at_level(logging.WARNING, "apex"):
        assert draw(open_drawn()) == EXPECTED
        assert draw(open_drawn()) == EXPECTED
    told = [r.getMessage() for r in caplog.records if "cannot be kept" in r.getMessage()]
    assert told[0].startswith("apex: compiled GPU kernels cannot be kept, so each process compiles")
    assert len(told) == len(set(told)) <= 2
    assert list(cache.rglob("*.kernel")) == []


def test_what_a_killed_process_left_is_removed_later(cache, open_drawn):
    draw(open_drawn())
    (kind,) = cache.iterdir()
    for name, age in ((".kernel-old", 7200), (".kernel-new", 60)):
        (kind / name).mkdir()
        os.utime(kind / name, (time.time() - age,) * 2)
    draw(open_drawn(), 2)
    assert (kind / ".kernel-old").exists()  # of another kind of card
    next(kind.glob("*.kernel")).unlink()
    draw(open_drawn())
    assert [path.name for path in kind.glob(".kernel-*")] == [".kernel-new"]


def test_one_line_for_the_first_and_counts_for_many(cache, open_drawn, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "apex"):
        draw(open_drawn())
        monkeypatch.setattr(rtc, "_count", 9)
        draw(open_drawn(), 2)
    first, many = [record.getMessage() for record in caplog.records]
    assert first == (
        "apex: compiling GPU kernels by nvrtc-13.7-sm_90 at their first calls, 0.1 to 2 s each; "
        f"they are kept in {cache}."
    )
    assert many == "apex: 10 GPU kernels were compiled by this process."


def test_threads_that_launch_first_at_once(cache, open_drawn, fakes):
    library, compilations = open_drawn(connects=False), fakes[0].fake_compilations()
    results = []
    threads = [threading.Thread(target=lambda: results.append(draw(library, 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # they wait for the connection
    assert results == []
    rtc.connect(library, {"drawn": HERE / "drawn"})
    for thread in threads:
        thread.join(60)
    assert results == [EXPECTED] * 8
    assert fakes[0].fake_compilations() == compilations + 1


def test_a_child_of_a_process_that_is_compiling(cache, open_drawn):
    library, holds, ends = open_drawn(), threading.Event(), threading.Event()

    def hold():
        with rtc._lock:
            holds.set()
            ends.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if draw(library) == EXPECTED else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for a lock that nobody holds there")
    ends.set()
    holder.join(60)
    assert status == 0


def test_processes_that_start_together(cache, drawn, fakes):
    script = f"""
import sys; sys.path[:0] = [{str(SHARED.parent)!r}, {str(HERE)!r}]
import ctypes, torch
from pathlib import Path
from shared_csrc.native import nvrtc, rtc
import drawing
ctypes.CDLL({str(fakes[1])!r})
rtc.compiler = lambda: nvrtc.Nvrtc({str(fakes[1])!r})
torch.cuda.get_device_capability = drawing.CAPABILITIES.get
library = ctypes.CDLL({str(drawn)!r})
library.apex_draw.restype = ctypes.c_char_p
rtc.connect(library, {{"drawn": Path({str(HERE / "drawn")!r})}})
assert drawing.draw(library) == drawing.EXPECTED
"""
    runs = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [run.wait(120) for run in runs] == [0] * 3
    (file,) = cache.rglob("*.kernel")
    assert trust.open_checked(file) is not None
    assert [p.name for p in cache.rglob(".kernel-*")] == []


def test_every_kernel_of_a_library_is_listed_and_named(open_drawn):
    plain, hidden = sorted(rtc.listed(open_drawn()), key=lambda kernel: kernel.parameter_bytes)[
        ::-1
    ]
    assert rtc.expression(plain.name.decode()) == "apex::gpu::draw<float>"
    assert (plain.unit, plain.parameter_bytes) == (b"drawn", 8 + 8 + 16)
    with pytest.raises(
        BuildError, match=r"cannot be named outside of its source: kernels and what"
    ):
        rtc.expression(hidden.name.decode())


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "PN4apex8KernelOfIXadL_ZNS_3gpu13colwise_mergeINS1_1SINS1_8BFloat16ELNS1_5PartsE6ELl8192"
            "ELb1EEEfEEvlPKfT_EEEE",
            "apex::gpu::colwise_merge<apex::gpu::S<apex::gpu::BFloat16, (apex::gpu::Parts)6, "
            "8192l, true>, float>",
        ),
    ],
)
def test_names(mangled, name):
    assert rtc.expression(mangled) == name
    assert rtc.expression(f"*{mangled}") == name  # types of one source alone begin so


def test_a_library_that_nobody_connected(open_drawn):
    # Within ten seconds somebody might.
    start = time.monotonic()
    said = draw(open_drawn(connects=False))
    assert said.startswith("this library was not loaded by Apex")
    assert time.monotonic() - start < 60


def test_no_compiler_and_no_driver(monkeypatch, tmp_path):
    with pytest.raises(BuildError, match=r"^NVRTC cannot be loaded: .*libnvrtc\.so\.99"):
        nvrtc.Nvrtc(tmp_path / "libnvrtc.so.99")
    monkeypatch.setattr(torch.version, "cuda", None)
    nvrtc.nvrtc.cache_clear()
    with pytest.raises(BuildError, match="is not built for CUDA, and brings no NVRTC"):
        nvrtc.nvrtc()
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(
        BuildError,
        match=r"libnvrtc\.so\.99, which compiles GPU kernels, was not found beside torch .*: pip "
        "install nvidia-cuda-nvrtc$",
    ):
        nvrtc.nvrtc()
    monkeypatch.setattr(ctypes, "CDLL", no_space)
    with pytest.raises(BuildError, match="NVIDIA's driver cannot be loaded"):
        drivers.CudaDriver()
