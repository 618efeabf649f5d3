"""What is loaded from the cache, what is said of a build, and what a failed build leaves."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import build, jit, targets, toolchain, trust  # noqa: E402
from shared_csrc.native.errors import BuildError  # noqa: E402

CPU = targets.Target("cpu", "baseline")


@pytest.fixture
def op(tmp_path):
    folder = tmp_path / "my_op"
    folder.mkdir()
    (folder / "my_op.cpp").write_text("// kernels\n")
    return build.Op("my_op", folder)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(jit, "_failed", {})
    return tmp_path / "a" / "cache"


@pytest.fixture
def builds(monkeypatch):
    """Builds without a compiler: their `count`, and the `error` that they end with, if any."""
    builds = SimpleNamespace(count=0, error=None)

    def fake_build(ops, targets, folder, *, package, log):
        builds.count += 1
        log.write_text("output")
        if builds.error is not None:
            raise builds.error
        (folder / "cpu.so").write_bytes(b"a library")
        return {CPU: folder / "cpu.so"}

    monkeypatch.setattr(jit, "build", fake_build)
    return builds


def built(op):
    return jit.build_op(op, CPU, package="apex.test")


def test_a_build_is_announced_once(op, cache, builds, caplog):
    for _ in range(2):
        assert built(op).read_bytes() == b"a library"
    (record,) = caplog.records
    assert record.name == "apex"
    assert record.getMessage() == (
        f"apex: compiling my_op for the CPU, once, about 10 to 70 s; it is kept in {cache}."
    )
    assert builds.count == 1


def test_the_line_goes_to_stderr_and_can_be_silenced(capfd, monkeypatch):
    """Where a program sets up no logging, Python itself prints warnings."""
    logger = logging.getLogger("apex")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's own handlers
    monkeypatch.setattr(logger, "handlers", [])
    jit.logger.warning("apex: compiling")
    assert capfd.readouterr().err == "apex: compiling\n"
    logger.setLevel(logging.ERROR)
    try:
        jit.logger.warning("apex: compiling")
    finally:
        logger.setLevel(logging.NOTSET)
    assert capfd.readouterr().err == ""


def test_a_failed_build_is_remembered_until_something_changes(op, cache, builds, monkeypatch):
    builds.error = BuildError("my_op is wrong")
    with pytest.raises(BuildError, match=r"my_op is wrong$"):
        built(op)
    for _ in range(2):
        with pytest.raises(BuildError, match=r"my_op is wrong\nThis process did not try again"):
            built(op)
    assert builds.count == 1
    monkeypatch.setenv("CPATH", "/elsewhere")
    with pytest.raises(BuildError, match=r"my_op is wrong$"):
        built(op)
    assert builds.count == 2
    op.source.write_text("// mended\n")
    builds.error = None
    assert built(op).is_file()


def test_a_full_disk_is_not_remembered(op, cache, builds):
    builds.error = BuildError("as: cannot write: No space left on device")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"No space left on device$"):
            built(op)
    assert builds.count == 2


def test_a_place_that_forbids_code_is_refused_before_compiling(op, cache, builds, monkeypatch):
    monkeypatch.setattr(trust, "forbids_code", lambda path: True)
    with pytest.raises(BuildError, match=r"cannot be kept in .*noexec.*Set APEX_CACHE_DIR"):
        built(op)
    assert builds.count == 0


@pytest.mark.parametrize("error", [BuildError("wrong"), KeyboardInterrupt(), OSError("full")])
def test_what_a_failed_build_leaves(op, cache, builds, error):
    builds.error = error
    with pytest.raises((BuildError, KeyboardInterrupt)):
        built(op)
    assert {path.suffix for path in cache.iterdir()} <= {".lock", ".log"}


def test_what_a_killed_build_left_is_removed(op, cache, builds):
    folder = jit.library_path(op, CPU, package="apex.test").parent
    left = cache / f".{folder.name}-abc"
    left.mkdir(parents=True)
    cache.chmod(0o700)
    (left / "my_op.o").write_text("half")
    built(op)
    assert not left.exists()


@pytest.mark.parametrize("damage", ["cut short", "garbage", "foreign", "without a seal"])
def test_a_damaged_library_is_built_anew(op, cache, builds, damage):
    library = built(op)
    if damage == "without a seal":
        trust.seal_path(library).unlink()
    else:
        content = {"cut short": b"a lib", "garbage": os.urandom(99), "foreign": b"another"}
        library.write_bytes(content[damage])
    assert built(op).read_bytes() == b"a library"
    assert builds.count == 2


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_nobody_else_can_read_or_write_the_cache(op, cache, builds, umask):
    before = os.umask(umask)
    try:
        library = built(op)
    finally:
        os.umask(before)
    for path in (cache.parent, cache, library.parent):
        assert path.stat().st_mode & 0o777 == 0o700, path
    assert not library.stat().st_mode & 0o022
    trust.check_trusted(library)


@pytest.mark.parametrize("which", ["cache", "folder", "library"])
@pytest.mark.parametrize("mode", [0o720, 0o702], ids=["group", "others"])
def test_what_others_can_write_is_refused(op, cache, builds, which, mode, monkeypatch):
    monkeypatch.setattr(trust, "_is_private_group", lambda group_id: False)
    library = built(op)
    path = {"cache": cache, "folder": library.parent, "library": library}[which]
    path.chmod(mode)
    with pytest.raises(BuildError, match=f"{path} can be written by .*chmod -R go-w .*APEX_CACHE"):
        built(op)
    path.chmod(0o700)
    assert built(op) == library
    assert builds.count == 1


@pytest.mark.parametrize("which", ["cache", "folder", "library"])
def test_what_belongs_to_another_user_is_refused(op, cache, builds, which, monkeypatch):
    library = built(op)
    if os.geteuid() == 0:
        path = {"cache": cache, "folder": library.parent, "library": library}[which]
        os.chown(path, 12345, -1)
        said = f"{path} belongs to user 12345, and this process runs as user 0"
    else:  # the same by a fake: this user is not who made them
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        said = f"{cache} belongs to user {owner}"
    with pytest.raises(BuildError, match=f"{said}.* Set APEX_CACHE_DIR to a folder of your own"):
        built(op)
    assert builds.count == 1


def test_a_library_that_root_provides_is_taken(op, cache, builds, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of root's")
    library = built(op)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    trust.check_trusted(library)


def test_a_group_of_this_user_alone_is_nobody_else(op, cache, builds):
    """Caches of an earlier version, made under the umask 002 of systems with such groups."""
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        pytest.skip("this user has no name")
    library = built(op)
    if group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        pytest.skip("this user's group is not its own")
    os.chown(library, -1, user.pw_gid)
    library.chmod(0o775)
    assert built(op) == library


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes the compiler a shell script."""

    def use(script):
        program = tmp_path / "cxx"
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo fake; exit; }}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))

    return use


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "failed"),
        ("exit 0", "The compiler reported success, wrote no library|No such file|missing"),
        ("echo 'x.cpp:1: error: on purpose'; exit 1", "error: on purpose"),
        ("kill -9 $$", "failed"),
        ("sleep 60", "did not end within 1 s"),
        ("printf '\\377\\376 error'; exit 1", "error"),
    ],
    ids=["silent failure", "silent success", "error", "killed", "hangs", "no UTF-8"],
)
def test_a_compiler_that_misbehaves(op, cache, compiler, script, said, monkeypatch):
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 1)
    compiler(script)
    with pytest.raises(BuildError, match=f"(?s)compiling my_op .* failed.*({said})") as caught:
        built(op)
    log = Path(str(caught.value).rpartition("Full output: ")[2])
    assert log.is_file()
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".log"}


def test_a_compiler_that_does_not_say_its_version(tmp_path, monkeypatch):
    program = tmp_path / "cxx"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert str(program) in toolchain.compiler_version([str(program)])
    other = tmp_path / "hangs"
    other.write_text("#!/bin/sh\nexec sleep 60\n")
    other.chmod(0o755)
    monkeypatch.setattr(toolchain, "VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(BuildError, match=r"does not answer: .*hangs.* timed out .* CXX"):
        toolchain.compiler_version([str(other)])
