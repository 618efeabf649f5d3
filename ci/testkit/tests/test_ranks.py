"""Checks run on ranks from the file that a test is in, also where another has its name."""

import importlib.util


def check_of(folder, body):
    folder.mkdir()
    file = folder / "test_of_one_name.py"
    file.write_text(f"def check(rank, world):\n    {body}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


def test_two_files_of_one_name(two_ranks, tmp_path):
    first = check_of(tmp_path / "first", "global seen; seen = world")
    second = check_of(tmp_path / "second", "raise ArithmeticError(f'{world} ranks')")
    two_ranks(first)
    reports = two_ranks.failures(second)
    assert reports
    assert all(r.endswith("ArithmeticError: 2 ranks\n") for r in reports.values())
    two_ranks(first)


COUNTS = []


def check_counts(rank, world, expected):
    COUNTS.append(rank)
    assert len(COUNTS) == expected


def test_a_file_is_loaded_once(two_ranks):
    two_ranks(check_counts, expected=1)
    two_ranks(check_counts, expected=2)
