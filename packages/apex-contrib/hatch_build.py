"""Build hooks of this package: the shared ones, from the sdist's own copy or from the checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PLACES = [*ROOT.glob("src/apex/*/_shared"), ROOT.parent.parent / "shared_csrc"]
FOUND = [place for place in PLACES if (place / "native" / "hatch_hook.py").is_file()]
if not FOUND:
    raise FileNotFoundError(f"{ROOT} has no shared_csrc: build from an sdist or a whole checkout")
sys.path.insert(0, str(FOUND[0]))

from native.hatch_hook import BuildHook, VersionHook  # noqa: E402


def get_build_hook():
    return BuildHook


def get_metadata_hook():
    return VersionHook
