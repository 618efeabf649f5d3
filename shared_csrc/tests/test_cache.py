"""What is loaded from the cache, what is said of a build, and what a failed build leaves."""

import logging
import os
import shutil
import subprocess
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


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1770, 0o1777], ids=oct)
@pytest.mark.parametrize("is_built", [False, True])
def test_folders_above_that_others_can_write(op, cache, builds, mode, is_built, monkeypatch):
    """Whoever can write above the cache can put another cache there, unless the bit forbids it."""
    monkeypatch.setattr(trust, "_is_private_group", lambda group_id: False)
    cache.parent.mkdir(0o700)
    if is_built:
        built(op)
    cache.parent.chmod(mode)
    if mode & 0o1000:
        assert built(op).read_bytes() == b"a library"
        return
    said = f"folder {cache.parent}, above the cache folder {cache}, can be written by .*nothing is "
    said += f"loaded from it. Run `chmod go-w {cache.parent}`.* or set APEX_CACHE_DIR"
    with pytest.raises(BuildError, match=said):
        built(op)
    assert builds.count == is_built
    assert cache.exists() == is_built
    cache.parent.chmod(0o700)
    assert built(op).read_bytes() == b"a library"


def needs_root():
    if os.geteuid() != 0:
        pytest.skip("only root can make folders of others")


@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=oct)
def test_folders_above_that_belong_to_another_user(op, cache, builds, mode, monkeypatch):
    needs_root()
    built(op)
    cache.parent.chmod(mode)
    os.chown(cache.parent, 12345, -1)
    with pytest.raises(BuildError, match=f"{cache.parent}, above .* belongs to user 12345.* Set A"):
        built(op)
    # In a container of a user without rights, root of the host looks like nobody.
    monkeypatch.setattr(trust, "_is_unmapped", lambda user_id: user_id == 12345)
    built(op)
    assert builds.count == 1


@pytest.mark.parametrize(
    ("maps", "unmapped"),
    [("0 0 4294967295", False), ("0 1000 1", True), ("0 1000 1 1 100000 65536", True)],
)
def test_nobody_in_a_container(monkeypatch, maps, unmapped):
    texts = {"/proc/self/uid_map": maps, "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert trust._is_unmapped(65534) is unmapped
    assert not trust._is_unmapped(1000)


@pytest.mark.parametrize("kind", ["absolute", "relative", "of another user", "to itself", "open"])
def test_links_on_the_way(op, cache, builds, kind, tmp_path, monkeypatch):
    """Each folder that has a link of the way is checked, and who made the link."""
    real, links = tmp_path / "real", tmp_path / "links"
    for folder in (real, links):
        folder.mkdir(0o700)
    link = links / "link"
    link.symlink_to({"relative": "../real", "to itself": "link"}.get(kind, real))
    monkeypatch.setenv("APEX_CACHE_DIR", str(link / "cache"))
    if kind == "of another user":
        needs_root()
        links.chmod(0o1777)
        os.lchown(link, 12345, -1)
    if kind == "open":
        links.chmod(0o777)
    said = {"of another user": f"link {link}, above", "open": f"folder {links}, above"}
    said["to itself"] = "Too many levels of symbolic links"
    if kind in said:
        with pytest.raises(BuildError, match=said[kind]):
            built(op)
        assert builds.count == 0
    else:
        assert built(op).samefile(next(real.glob("cache/*/*.so")))


MARKS = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void) { close(creat("%s", 0600)); }
"""


@pytest.fixture
def real_builds(monkeypatch, tmp_path):
    """Builds of libraries that, when they are loaded, leave a file of the name of their build."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    names = iter(("first", "second", "third"))

    def real_build(ops, targets, folder, *, package, log):
        name = next(names)
        (folder / "mark.c").write_text(MARKS % (tmp_path / name))
        command = [compiler, "-shared", "-fPIC", "-o", folder / "cpu.so", folder / "mark.c"]
        subprocess.run(command, check=True, timeout=60)
        return {CPU: folder / "cpu.so"}

    monkeypatch.setattr(jit, "build", real_build)
    return lambda: {name for name in ("first", "second", "third") if (tmp_path / name).exists()}


@pytest.fixture
def opener(tmp_path):
    """Loads as operators' first calls do."""
    from shared_csrc.native import library

    return library.OpLibrary(f"apex_cache_{os.urandom(4).hex()}", str(tmp_path / "_ops.py"))._open


def exchanged(op, tmp_path):
    """A checked library in whose place another one lies, with a seal of its own."""
    checked = built(op)
    op.source.write_text("// other kernels\n")
    other = built(op)
    os.replace(trust.seal_path(other), trust.seal_path(checked))
    os.replace(other, checked)
    return checked


def test_what_was_checked_is_what_is_loaded(op, cache, real_builds, opener, tmp_path):
    opener(exchanged(op, tmp_path))
    assert real_builds() == {"first"}


def test_an_exchange_is_refused_where_open_files_have_no_names(
    op, cache, real_builds, opener, tmp_path, monkeypatch
):
    checked, exists = exchanged(op, tmp_path), os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: not str(p).startswith("/proc") and exists(p))
    with pytest.raises(BuildError, match=r"cpu.*\.so was exchanged after"):
        opener(checked)
    assert real_builds() == set()
    opener(built(op))  # the checked file by its path
    assert real_builds() <= {"second", "third"}
    assert len(real_builds()) == 1


def test_libraries_of_one_file_number_are_all_loaded(op, cache, real_builds, opener):
    """The loader takes names for libraries, and the name of an open file has its number alone."""
    numbers = []
    for name in ("first", "second", "third"):
        op.source.write_text(f"// {name}\n")
        checked = built(op)
        numbers.append(checked.descriptor)
        opener(checked)
        assert name in real_builds()
        del checked
    assert len(set(numbers)) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(numbers[0])  # nothing stays open


def test_what_is_no_file_is_built_anew(op, cache, builds):
    library = built(op)
    os.unlink(library)
    os.mkfifo(library)  # opening it must not wait for a writer
    assert built(op).read_bytes() == b"a library"
    assert builds.count == 2


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
