"""Registers, spills and the width of memory accesses, read from what ptxas and nvdisasm print."""

import json
import struct
from pathlib import Path

import pytest
from environments import ROOT

from ci import costs, evidence, ptxas, sass
from ci.workspace import tomllib

DATA = Path(__file__).parent / "data"
# Of ptxas 13.0 for two ops, and of a kernel `crowded` with launch bounds that leave it too few
# registers, in place of one of the second op's. Lines for sm_80 are repeated with other figures.
LOGS = dict(
    zip(
        ("multi_tensor_scale", "fused_layer_norm"),
        (DATA / "ptxas.log").read_text().split("\n[2/3]"),
        strict=True,
    )
)
# Of multi_tensor_scale in float32; most of its narrow accesses, for tails, are cut out.
SASS = (DATA / "wide.sass").read_text()
SCALE = "foreach_kernel<Scale<float>, 4, Scale<float>, In<float>, Out<float>>"


def resources(op, arch="sm_90"):
    return [vars(each) for each in ptxas.parse(LOGS[op].splitlines(), arch)]


def test_resources_of_one_architecture():
    single, double = resources("multi_tensor_scale")
    assert single["kernel"] == SCALE
    assert (single["registers"], single["shared_bytes"]) == (36, 16)
    assert double["kernel"].startswith("foreach_kernel<Scale<double>, 8, Scale<double>, In<Half>")
    assert double["registers"] == 90
    merge, crowded = resources("fused_layer_norm")
    assert merge["kernel"] == "colwise_merge<LayerNormBackward<Half, Half, true>, float>"
    assert (merge["registers"], merge["shared_bytes"]) == (32, 0)
    assert crowded["kernel"] == "crowded"
    assert (crowded["spill_store_bytes"], crowded["spill_load_bytes"]) == (1044, 1268)
    (old,) = resources("multi_tensor_scale", "sm_80")
    assert old["registers"] == 40


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("void a::b::k<a::F<float>, 4>(a::F<float>, int)", "k<F<float>, 4>"),
        ("void k<(a::Decay)1, a::X<a::Y<int> > >(long)", "k<(Decay)1, X<Y<int>>>"),
        ("void (anonymous namespace)::k<a::(anonymous namespace)::F>(int)", "k<F>"),
        ("crowded(float const*, float*, int)", "crowded"),
    ],
)
def test_short_names(demangled, short):
    assert ptxas.shorten(demangled) == short


def test_spills_pass_only_by_name_and_up_to_their_bytes():
    crowded = resources("fused_layer_norm")
    (complaint,) = ptxas.unaccepted_spills("fused_layer_norm", crowded, [])
    assert "fused_layer_norm: crowded spills 2312 bytes" in complaint
    entry = {"op": "fused_layer_norm", "kernel": "crow*", "bytes": 2312}
    assert ptxas.unaccepted_spills("fused_layer_norm", crowded, [entry]) == []
    for other in ({"op": "xentropy"}, {"kernel": "crow"}, {"bytes": 2311}):
        assert ptxas.unaccepted_spills("fused_layer_norm", crowded, [entry | other])


def test_accesses_are_counted():
    (accesses,) = sass.accesses([(SCALE, SASS)])
    # Shared (LDS, STS) and constant (LDC) memory do not count; predicated instructions do.
    assert accesses == sass.Accesses(SCALE, 4, 2, 3, 5)


@pytest.mark.parametrize(("letter", "what"), [("LDG", "loads"), ("STG", "stores")])
def test_narrow_kernels_pass_only_by_name(letter, what):
    code = [(SCALE, SASS.replace(f"{letter}.E.128", f"{letter}.E.64"))]
    kernel = vars(sass.accesses(code)[0])
    (complaint,) = sass.narrow_kernels("scale", [kernel], [])
    assert f"scale: {SCALE} has no 128-bit {what}" in complaint
    entry = {"op": "scale", "kernel": "foreach_kernel<Scale<*>, 4, *>", "what": what}
    assert sass.narrow_kernels("scale", [kernel], [entry]) == []
    other = {"loads": "stores", "stores": "loads"}[what]
    assert sass.narrow_kernels("scale", [kernel], [entry | {"what": other}])
    assert sass.narrow_kernels("scale", [kernel | {"kernel": "colwise_merge<X>"}], []) == []


def op_found(name, **accesses):
    counts = {"wide_loads": 4, "narrow_loads": 1, "wide_stores": 4, "narrow_stores": 1}
    return {
        "op": name,
        "resources": resources(name),
        "accesses": [{"kernel": SCALE, **counts, **accesses}],
        "costs": [],
    }


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Return a function that judges ops with a file of acceptances in place of ours."""
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(evidence, "MACHINE_CODE", tmp_path / "costs.json")
    monkeypatch.setattr(costs, "check_kernels", lambda figures, ops, nvrtc: figures)
    (tmp_path / "ci").mkdir()

    def run(accepted, *ops, uncompiled=()):
        (tmp_path / "ci" / "accepted_kernels.toml").write_text(accepted)
        found = {f"package/{op['op']}": op for op in ops}
        listed = {(op["op"], each["kernel"]) for op in ops for each in op["resources"]}
        names = [op["op"] for op in ops]
        complaints = evidence.judge(found, names, {*listed, *uncompiled}, "13.2")
        assert json.loads((tmp_path / "kernels.json").read_text()) == found
        return complaints

    return run


def test_table_and_verdict(judge, capsys):
    ops = op_found("multi_tensor_scale"), op_found("fused_layer_norm", wide_loads=0)
    complaints = judge("", *ops)
    assert [c.split()[1] for c in complaints] == ["crowded", "foreach_kernel<Scale<float>,"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert rows == [
        ["package/multi_tensor_scale", "2", "90", "16", "0", "1", "1"],
        ["package/fused_layer_norm", "2", "32", "0", "2312", "0", "1"],
    ]


def test_acceptances_need_a_kernel_and_a_reason(judge):
    entry = '[[spill]]\nop = "fused_layer_norm"\nkernel = "{}"\nbytes = 9999\nreason = "{}"\n'
    assert judge(entry.format("crowded", "It is a test."), op_found("fused_layer_norm")) == []
    (complaint,) = judge(entry.format("crowded", ""), op_found("fused_layer_norm"))
    assert "crowded has no reason" in complaint
    gone = entry.format("crowded", "Yes.") + entry.format("old_kernel", "Yes.")
    (complaint,) = judge(gone, op_found("fused_layer_norm"))
    assert "there is no kernel old_kernel" in complaint
    # It may be one that CI did not compile this time, or one of an op that it did not.
    assert (
        judge(gone, op_found("fused_layer_norm"), uncompiled=[("fused_layer_norm", "old_kernel")])
        == []
    )
    assert (
        judge(
            gone.replace('"fused_layer_norm"\nkernel = "old', '"other"\nkernel = "old'),
            op_found("fused_layer_norm"),
        )
        == []
    )


def test_our_acceptances_are_whole():
    accepted = tomllib.loads((ROOT / "ci" / "accepted_kernels.toml").read_text())
    for entry in [*accepted["spill"], *accepted["narrow"]]:
        assert {"op", "kernel", "reason"} < set(entry)
        assert list(ROOT.glob(f"packages/*/src/apex/**/{entry['op']}/{entry['op']}.cpp"))


def test_a_number_of_the_table_that_differs_is_a_complaint(judge, monkeypatch):
    op = op_found("multi_tensor_scale") | {"costs": ["registers: 32 in gpu_costs.toml, 36 now"]}
    wrong, advice = judge("", dict(op))
    assert wrong.startswith("registers: 32")
    assert "nox -s costs" in advice
    monkeypatch.setenv(costs.WRITES, "1")
    assert judge("", dict(op)) == []
    assert json.loads(evidence.MACHINE_CODE.read_text()) == op["costs"]


def elf(section, content):
    """Return an ELF file of two sections: names, and another one."""
    names = f"\0.shstrtab\0{section}\0".encode()
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<QIHHHHHH", 64, 0, 64, 0, 0, 64, 3, 1)
    places = [(0, 0, 0), (1, 256, len(names)), (11, 256 + len(names), len(content))]
    sections = [
        struct.pack("<IIQQQQ", n, 1, 0, 0, at, size).ljust(64, b"\0") for n, at, size in places
    ]
    return header + b"".join(sections) + names + content


def test_instructions_are_a_section_of_the_machine_code():
    image = elf(".text.kernel", b"instructions")
    assert sass.code_of(image, "kernel") == b"instructions"
    with pytest.raises(ValueError, match=r"no \.text\.kern$"):
        sass.code_of(image, "kern")


def test_bytes_of_parameters_are_an_attribute_of_the_machine_code():
    register_count = bytes([4, 0x2F, 8, 0]) + struct.pack("<IBBH", 7, 3, 0x19, 999)
    size = struct.pack("<BBH", 3, 0x19, 3728)
    image = elf(".nv.info.kernel", register_count + size)
    assert sass.parameter_bytes(image, "kernel") == 3728
    with pytest.raises(ValueError, match="does not say what parameters kernel has"):
        sass.parameter_bytes(elf(".nv.info.kernel", register_count), "kernel")


NVDISASM = """#!/bin/sh
printf '\\t.headerflags\\n'
for at in 0000 0010 0020; do printf '        /*%s*/     MOV R1, c[0x0][0x28] ;\\n' $at; done
"""


@pytest.fixture
def nvdisasm(tmp_path, monkeypatch):
    """Put one on PATH that shows three instructions, whatever it is given."""
    program = tmp_path / "nvdisasm"
    program.write_text(NVDISASM)
    program.chmod(0o755)
    monkeypatch.setattr(sass.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("nvdisasm")
def test_each_kernel_has_its_instructions():
    first, second = sass.disassemble([b"i" * 16, b"i" * 32], "sm_90")
    assert first.count("MOV") == 1
    assert [line.split()[0] for line in second.splitlines()] == ["/*0010*/", "/*0020*/"]
    with pytest.raises(RuntimeError, match=r"nvdisasm -b SM90 .* did not show all instructions"):
        sass.disassemble([b"i" * 64], "sm_90")


def test_without_nvdisasm(monkeypatch):
    monkeypatch.setattr(sass.shutil, "which", lambda name, path: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        sass.disassemble([], "sm_90")


def test_what_the_kernels_of_a_source_take(monkeypatch):
    """A library lists a kernel for one op; the table may name another one that launches it."""
    symbols = [each["symbol"] for each in resources("multi_tensor_scale")]
    monkeypatch.setattr(sass, "disassemble", lambda codes, arch: [SASS for _ in codes])
    launched = {("other", SCALE): {"block": 256, "shared": 0}}
    said = LOGS["multi_tensor_scale"]
    compiled = [
        (symbols[0], elf(f".text.{symbols[0]}", b""), said),
        (symbols[1], elf(f".text.{symbols[1]}", b""), ""),
    ]
    found = evidence.of_unit(
        "multi_tensor_scale", compiled, ["multi_tensor_scale", "other"], launched
    )
    assert found["op"] == "multi_tensor_scale"
    assert [each["registers"] for each in found["resources"]] == [36, 90]
    assert [each["wide_loads"] for each in found["accesses"]] == [4, 4]
    (kernel,) = found["costs"]
    assert (kernel["op"], kernel["kernel"], kernel["registers"]) == ("other", SCALE, 36)
