"""Every planted bug is reported with kernel, block and thread; its correct twin passes.

The list of verdicts is what the emulated GPU claims to find.
"""

import os
import re
import subprocess

import pytest

PLACE = r"kernel: (\w+).*\n  block (\(\d+, \d+, \d+\)), thread (\(\d+, \d+, \d+\))"

# bug: (what the report says, kernel, block, thread)
FOUND_IN_THREADS = {
    "off_by_one_at_the_tail": (
        "out of bounds: read of 4 bytes 0 bytes behind the end of `x` (100 elements of 4 bytes)",
        ("scale_kernel", "(1, 0, 0)", "(36, 0, 0)"),
    ),
    "misaligned_vector_load": (
        "misaligned vector access: the address is no multiple of 16 bytes",
        ("copy_packs", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "shared_memory_overflow": (
        "out of bounds: write of 4 bytes 0 bytes behind the end of shared memory `tile`",
        ("shared_tile", "(0, 0, 0)", "(63, 0, 0)"),
    ),
    "dynamic_shared_memory_overflow": (
        "behind the end of shared memory `dynamic shared memory`",
        ("dynamic_tile", "(0, 0, 0)", "(3, 0, 0)"),
    ),
    "int32_index_overflow": (
        "integer overflow in a multiplication",
        ("row_starts", "(0, 0, 0)", "(22, 0, 0)"),
    ),
    "use_after_free": (
        "use after free: read of 4 bytes of `temporary`, which was released",
        ("scale_kernel", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "host_pointer": (
        "access to memory that belongs to no operand: read of 4 bytes",
        ("scale_kernel", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "local_array_overflow": (
        "index beyond the end of an array",
        ("local_array", "(0, 0, 0)", "(5, 0, 0)"),
    ),
    "memcpy_too_long": (
        "out of bounds: read of 257 bytes",
        ("memcpy_too_long", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "missing_barrier": (
        "race: shared memory `sums`, element 1 of 64 was read by",
        ("tree_sum", "(0, 0, 0)", "(1, 0, 0)"),
    ),
    "missing_second_barrier": (
        "race: shared memory `part`, element 0 of 1 was written by thread (0, 0, 0)",
        ("two_rounds", "(0, 0, 0)", "(1, 0, 0)"),
    ),
    "missing_warp_barrier": (
        "read of memory that nothing was written to: shared memory `row`, element 31 of 32",
        ("pass_within_warp", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "divergent_barrier": (
        "divergent barrier: this thread waits at __syncthreads(), thread (16, 0, 0) does not",
        ("barrier_in_branch", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "barriers_at_two_places": (
        "divergent barrier: this thread waits at __syncthreads(), thread (1, 0, 0) does not",
        ("two_barriers", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "race_between_blocks_on_one_output": (
        "race: operand `y`, element 0 of 1 was written by another block",
        ("add_to_one", "(1, 0, 0)", "(0, 0, 0)"),
    ),
    "blocks_that_overlap": (
        "race: operand `y`, element 32 of 65 was written by another block",
        ("halo", "(1, 0, 0)", "(0, 0, 0)"),
    ),
    "read_of_what_another_block_writes": (
        "race: operand `x`, element 63 of 128 was written by another block",
        ("in_place_reverse", "(1, 0, 0)", "(0, 0, 0)"),
    ),
    "flag_with_different_values": (
        "race: operand `flag`, element 0 of 1 was written by thread (4, 0, 0)",
        ("set_flag", "(0, 0, 0)", "(5, 0, 0)"),
    ),
    "uninitialized_accumulator": (
        "read of memory that nothing was written to: shared memory `bins`, element 0 of 8",
        ("histogram", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "uninitialized_output": (
        "read of memory that nothing was written to: operand `y`, element 0 of 32",
        ("add_in_place", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "wrong_warp_mask": (
        "__shfl_xor_sync: the mask names lane 16, which does not take part: it has returned",
        ("half_of_mask", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "shuffle_wider_than_the_warp": (
        "a shuffle of width 128 in a warp of ",
        ("wide_shuffle", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "shuffle_from_an_inactive_lane": (
        "__shfl reads from lane 31, which does not take part: it has returned",
        ("shuffle_in_loop", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "vote_without_all_lanes": (
        "a vote: the mask names lane 1, which does not take part: it has returned",
        ("votes", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "too_much_static_shared_memory": (
        "more shared memory than GPUs grant: 49156 bytes of variables and 0 dynamic bytes",
        ("large_tile", "(0, 0, 0)", "(0, 0, 0)"),
    ),
    "shuffle_and_barrier_in_two_orders": (
        "lane 5, which does not take part: it waits at the __syncthreads() of warps.cpp",
        ("shuffle_or_barrier", "(0, 0, 0)", None),  # the thread depends on the width
    ),
}

# Found when a launch begins, or after it: there is a kernel, but no thread.
FOUND_IN_LAUNCHES = {
    "missing_tail_in_a_vectorized_loop": (
        "output that no kernel wrote: operand `y`, element 100 of 103",
        "copy_packs",
    ),
    "too_many_threads": ("block.x is 2048, expected 1 to 1024", "fill"),
    "block_too_large_in_all": ("2048 threads per block, expected at most 1024", "fill"),
    "empty_grid": ("grid.x is 0, expected 1 to 2147483647", "fill"),
    "grid_too_high": ("grid.y is 65536, expected 1 to 65535", "fill"),
    "too_much_dynamic_shared_memory": ("49153 bytes of dynamic shared memory", "fill"),
    "too_many_parameters": ("bytes of parameters, expected at most", "with_table"),
    "sum_that_depends_on_the_order": ("the result depends on the order of threads", "float_sum"),
}

# Wrong on warps of 64 lanes alone.
FOUND_ON_64 = {
    "mask_of_32_lanes_on_64": "lane 32 calls a collective whose mask does not name it",
    "wrong_reduction_width": "wrong result: the sum over the warp",
}

# Right, but too dear: test_counts.py.
COSTLY = {"one_launch_more", "re_read", "two_byte_lane", "scattered_lanes", "idle_threads"}

ALL = {*FOUND_IN_THREADS, *FOUND_IN_LAUNCHES, *FOUND_ON_64, *COSTLY}
widths = pytest.mark.parametrize("width", ["32", "64"])


def run(program, name, variant, width, seed="0"):
    environment = {"APEX_EMULATE": width, "APEX_EMULATE_SEED": seed, "APEX_EMULATE_ORDERS": "2"}
    command = [str(program), name, variant]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result.stdout


@pytest.mark.builds
def test_every_bug_has_a_verdict(planted):
    result = subprocess.run([str(planted), "list"], capture_output=True, text=True, timeout=60)
    assert set(result.stdout.split()) == ALL


@pytest.mark.builds
@widths
@pytest.mark.parametrize("bug", FOUND_IN_THREADS)
def test_found_with_kernel_block_and_thread(planted, bug, width):
    message, place = FOUND_IN_THREADS[bug]
    report = run(planted, bug, "broken", width)
    assert message in report, report
    assert f"{width} lanes per warp" in report
    found = re.search(PLACE, report)
    assert found is not None, report
    for actual, expected in zip(found.groups(), place, strict=True):
        assert expected is None or actual == expected, report
    # Where in the source: but for launches' own limits there is always a line.
    assert re.search(r"\n  at: \w+\.(cpp|h):\d+", report) or bug.startswith("too_"), report


@pytest.mark.builds
@widths
@pytest.mark.parametrize("bug", FOUND_IN_LAUNCHES)
def test_found_with_kernel(planted, bug, width):
    message, kernel = FOUND_IN_LAUNCHES[bug]
    report = run(planted, bug, "broken", width)
    assert message in report, report
    assert f"kernel: {kernel}" in report, report


@pytest.mark.builds
@pytest.mark.parametrize("bug", FOUND_ON_64)
def test_found_on_wide_warps(planted, bug):
    assert FOUND_ON_64[bug] in run(planted, bug, "broken", "64")
    assert run(planted, bug, "broken", "32") == "passed\n"


@pytest.mark.builds
@widths
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("bug", sorted(ALL))
def test_correct_twin_passes(planted, bug, width, seed):
    assert run(planted, bug, "correct", width, seed) == "passed\n"


@pytest.mark.builds
@widths
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("bug", sorted({*FOUND_IN_THREADS, *FOUND_IN_LAUNCHES}))
def test_found_in_any_order(planted, bug, width, seed):
    """Another thread may be the one that is caught."""
    report = run(planted, bug, "broken", width, seed)
    assert report.startswith("emulated GPU: "), report
