"""Registers, spills and the width of memory accesses, read from what nvcc and cuobjdump print."""

import json
from pathlib import Path

import pytest
from environments import ROOT

from ci import kernels, ptxas, sass
from ci.workspace import tomllib

DATA = Path(__file__).parent / "data"
# Of nvcc 13.0 for two ops, and of a kernel `crowded` with launch bounds that leave it too few
# registers, in place of one of the second op's. Lines for sm_80 are repeated with other figures.
LOG = (DATA / "ptxas.log").read_text()
# Of multi_tensor_scale in float32; most of its narrow accesses, for tails, are cut out.
SASS = (DATA / "wide.sass").read_text()
SCALE = "foreach_kernel<Scale<float>, 4, Scale<float>, In<float>, Out<float>>"


def test_resources_by_op():
    found = ptxas.of_ops(LOG, "sm_90")
    assert list(found) == ["multi_tensor_scale", "fused_layer_norm"]
    single, double = found["multi_tensor_scale"]
    assert single["kernel"] == SCALE
    assert (single["registers"], single["shared_bytes"]) == (36, 16)
    assert double["kernel"].startswith("foreach_kernel<Scale<double>, 8, Scale<double>, In<Half>")
    assert double["registers"] == 90
    merge, crowded = found["fused_layer_norm"]
    assert merge["kernel"] == "colwise_merge<LayerNormBackward<Half, Half, true>, float>"
    assert (merge["registers"], merge["shared_bytes"]) == (32, 0)
    assert crowded["kernel"] == "crowded"
    assert (crowded["spill_store_bytes"], crowded["spill_load_bytes"]) == (1044, 1268)
    (old,) = ptxas.of_ops(LOG, "sm_80")["multi_tensor_scale"]
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
    resources = ptxas.of_ops(LOG, "sm_90")["fused_layer_norm"]
    (complaint,) = ptxas.unaccepted_spills("fused_layer_norm", resources, [])
    assert "fused_layer_norm: crowded spills 2312 bytes" in complaint
    entry = {"op": "fused_layer_norm", "kernel": "crow*", "bytes": 2312}
    assert ptxas.unaccepted_spills("fused_layer_norm", resources, [entry]) == []
    for other in ({"op": "xentropy"}, {"kernel": "crow"}, {"bytes": 2311}):
        assert ptxas.unaccepted_spills("fused_layer_norm", resources, [entry | other])


def test_shared_variables_beside_dynamic_memory_are_limited():
    of_rows = ptxas.of_ops(LOG, "sm_90")["fused_layer_norm"][0] | {
        "kernel": "rowwise_kernel<X<float>>",
        "shared_bytes": 1025,
    }
    (complaint,) = ptxas.large_shared_variables("norm", [of_rows], kernels.variable_bytes())
    assert "norm: rowwise_kernel<X<float>> has 1025 bytes of shared variables, at most 1024" in (
        complaint
    )
    for other in ({"shared_bytes": 1024}, {"kernel": "colwise_tiles<X<float>>"}):
        assert not ptxas.large_shared_variables("norm", [of_rows | other], 1024)


def test_accesses_are_counted():
    (accesses,) = sass.parse(SASS)
    # Shared (LDS, STS) and constant (LDC) memory do not count; predicated instructions do.
    assert accesses == sass.Accesses(SCALE, 4, 2, 3, 5)


@pytest.mark.parametrize(("letter", "what"), [("LDG", "loads"), ("STG", "stores")])
def test_narrow_kernels_pass_only_by_name(letter, what):
    (accesses,) = sass.parse(SASS.replace(f"{letter}.E.128", f"{letter}.E.64"))
    kernel = vars(accesses)
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
        "resources": ptxas.of_ops(LOG, "sm_90")[name],
        "accesses": [{"kernel": SCALE, **counts, **accesses}],
    }


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Return a function that judges ops with a file of acceptances in place of ours."""
    monkeypatch.setattr(kernels, "OUTPUT", tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "ci").mkdir()

    def run(accepted, *ops):
        (tmp_path / "ci" / "accepted_kernels.toml").write_text(accepted)
        found = {f"package/{op['op']}": op for op in ops}
        complaints = kernels.judge(found)
        assert json.loads((tmp_path / "cuda" / "kernels.json").read_text()) == found
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
    op = op_found("fused_layer_norm")
    assert judge(entry.format("crowded", "It is a test."), op) == []
    (complaint,) = judge(entry.format("crowded", ""), op)
    assert "crowded has no reason" in complaint
    gone = entry.format("crowded", "Yes.") + entry.format("old_kernel", "Yes.")
    (complaint,) = judge(gone, op)
    assert "there is no kernel old_kernel" in complaint


def test_our_acceptances_are_whole():
    accepted = tomllib.loads((ROOT / "ci" / "accepted_kernels.toml").read_text())
    for entry in [*accepted["spill"], *accepted["narrow"]]:
        assert {"op", "kernel", "reason"} < set(entry)
        assert list(ROOT.glob(f"packages/*/src/apex/**/{entry['op']}/{entry['op']}.cpp"))


def test_an_object_without_figures_is_compiled_again(tmp_path, monkeypatch):
    """A first run that failed, or one before figures were kept, leaves objects but no figures."""
    folder = tmp_path / "package"
    folder.mkdir()
    names = ("multi_tensor_scale", "fused_layer_norm")
    ops = [kernels.Op(name, tmp_path / name) for name in names]
    for op in ops:
        op.folder.mkdir()
        op.source.touch()
        (folder / f"{op.name}.cuda.o").write_text("object")
    (folder / "resources.json").write_text(json.dumps({"fused_layer_norm": [{}]}))

    def fake_build(ops, targets, folder, *, package):
        assert not (folder / "multi_tensor_scale.cuda.o").exists()
        assert (folder / "fused_layer_norm.cuda.o").exists()
        (folder / "build.log").write_text(LOG.partition("[2/3]")[0])

    monkeypatch.setattr(kernels, "build", fake_build)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", ptxas.VERBOSE["NVCC_APPEND_FLAGS"])
    target = kernels.Target("cuda", archs=("sm_90",))
    assert kernels.compile_ops(ops, target, folder, "package") == []
    kept = json.loads((folder / "resources.json").read_text())
    assert {op: len(figures) for op, figures in kept.items()} == {
        "fused_layer_norm": 1,
        "multi_tensor_scale": 2,
    }


NVCC = """#!/bin/sh
for word; do last=$word; done  # -o and the file that is written
printf 'ELF .text._Z7kernel' >"$last"
case "$*" in *broken*) echo "broken.cpp(3): error: expected a ;" >&2; exit 1;; esac
case "$*" in *"-fatbin --no-compress"*) cat '{log}' >&2;; esac
echo "op.h(9): warning #177-D: variable was declared but never referenced" >&2
"""


@pytest.fixture
def device_code(tmp_path, monkeypatch):
    """Return a function that compiles the kernels of an op of this name by a fake nvcc."""
    log, nvcc = tmp_path / "ptxas.log", tmp_path / "nvcc"
    log.write_text(LOG.partition("[2/3]")[0])
    nvcc.write_text(NVCC.format(log=log))
    nvcc.chmod(0o755)
    monkeypatch.setattr(kernels.toolchain, "compiler_for", lambda backend: [str(nvcc)])
    monkeypatch.setenv("MAX_JOBS", "2")

    def compiled(name):
        op = kernels.Op(name, tmp_path / name)
        op.folder.mkdir()
        op.source.touch()
        target = kernels.Target("cuda", archs=(kernels.EVIDENCE_ARCH,))
        return kernels.compile_device_code([op], target, tmp_path / "built", "package")

    return compiled


def test_kernels_alone_give_the_same_figures(device_code, tmp_path):
    (warning,) = device_code("multi_tensor_scale")
    assert "variable was declared" in warning
    kept = json.loads((tmp_path / "built" / "resources.json").read_text())
    assert kept["multi_tensor_scale"] == ptxas.of_ops(LOG, "sm_90")["multi_tensor_scale"]
    compiled = kernels.compiled_unit(tmp_path / "built", "multi_tensor_scale")
    assert compiled.suffix == ".fatbin"
    assert kernels.has_kernels(compiled)
    compiled.write_bytes(b"ELF .nv.info")
    assert not kernels.has_kernels(compiled)


def test_kernels_that_do_not_compile_are_an_error(device_code):
    with pytest.raises(kernels.BuildError, match=r"(?s)package: compiling broken .*expected a ;"):
        device_code("broken")


def test_every_source_of_an_op_is_a_unit(tmp_path):
    for name in ("other", "my_op"):
        (tmp_path / f"{name}.cpp").touch()
    op = kernels.Op("my_op", tmp_path)
    assert kernels.units_of([op]) == [(op, "my_op"), (op, "my_op.other")]


ARCHS = ("sm_80", kernels.EVIDENCE_ARCH, "sm_100", "sm_120")


def test_nvcc_compiles_two_ops_whole_where_ci_samples():
    assert kernels.without_host(None) == set()
    sampled = {"fused_adam", "xentropy", "focal_loss", "syncbn"}
    everything, whole = set(kernels.workspace_ops()), set()
    for commit in range(30):
        halved = kernels.without_host(sampled, seed=str(commit))
        assert len(everything - halved) == kernels.WITH_HOST
        whole |= everything - halved
    assert whole == sampled
    assert kernels.without_host({"syncbn"}, seed="a") == everything - {"syncbn"}


def test_all_architectures_unless_ci_samples(monkeypatch, tmp_path):
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    assert kernels.sample([]) is None
    assert kernels.archs_of(kernels.Op("scale", tmp_path), ARCHS, None) == ARCHS


def test_a_sample_has_the_evidence_and_in_time_every_architecture(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    op, sampled = kernels.Op("scale", tmp_path), kernels.sample(["scale"])
    drawn = [kernels.archs_of(op, ARCHS, sampled, seed=str(commit)) for commit in range(40)]
    assert all(len(archs) == 2 and kernels.EVIDENCE_ARCH in archs for archs in drawn)
    assert {arch for archs in drawn for arch in archs} == set(ARCHS)
    again = kernels.archs_of(op, ARCHS, sampled, seed="a")
    assert again == kernels.archs_of(op, ARCHS, sampled, seed="a")
    amd = ("gfx90a", "gfx1030")
    assert {kernels.archs_of(op, amd, sampled, seed=str(commit)) for commit in range(20)} == {
        ("gfx90a",),
        ("gfx1030",),
    }


def test_ops_outside_the_sample_are_compiled_for_the_evidence_alone(tmp_path):
    op = kernels.Op("scale", tmp_path)
    assert kernels.archs_of(op, ARCHS, {"other"}, seed="a") == (kernels.EVIDENCE_ARCH,)
