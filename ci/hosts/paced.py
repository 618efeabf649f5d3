"""Runs a training at a pace that can be changed while it runs: paced.py FILE SCRIPT ARGUMENTS...

FILE holds the seconds to wait after every optimizer step. So a host has the time to start again,
on a busy machine too, before the others are done.
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    pace, sys.argv = Path(sys.argv[1]), sys.argv[2:]
    register_optimizer_step_post_hook(lambda *_: time.sleep(float(pace.read_text())))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
