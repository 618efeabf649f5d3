"""Settings of :mod:`apex.contrib.torchsched`; set them, or use ``config.patch(num_streams=4)``.

They are read when a graph is compiled, ``reuse_cuda_event`` when it runs. ``patch`` is a context
manager and a decorator, as in ``torch._inductor.config``.
"""

import os
import sys

from torch.utils._config_module import install_config_module


def _get_num_streams() -> int:
    text = os.environ.get("TORCH_SCHED_NUM_STREAMS", "8")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"TORCH_SCHED_NUM_STREAMS must be an integer of at least 1, got {text!r}.")
    return int(text)


def _get_skip_post_grad_graph_ids() -> set[int]:
    """The numbers in ``TORCH_SCHED_SKIP_GRAPH_IDS``, such as ``1,3-5``."""
    text = os.environ.get("TORCH_SCHED_SKIP_GRAPH_IDS", "")
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(
                f"TORCH_SCHED_SKIP_GRAPH_IDS must be numbers and ranges such as 1,3-5, got {text!r}"
            )
        found.update(range(int(first), int(last or first) + 1))
    return found


def _get_dump_code() -> tuple[list[str], str | None]:
    """Backends and folder of ``TORCH_SCHED_DUMP_CODE``, which is ``[+inductor,]folder``."""
    *more, folder = os.environ.get("TORCH_SCHED_DUMP_CODE", "").split(",")
    if any(name != "+inductor" for name in more):
        raise ValueError(
            f"TORCH_SCHED_DUMP_CODE must be a folder, or +inductor,folder; got {more} before it."
        )
    return ["torchsched", *(name.removeprefix("+") for name in more)], folder or None


debug: bool = os.environ.get("TORCH_SCHED_DEBUG") == "1"
"""Log the schedule of each graph, or why it stays on one stream, as a warning."""

num_streams: int = _get_num_streams()
"""Streams of a graph, the caller's included; 1 is what Inductor does."""

skip_post_grad_graph_ids: set[int] = _get_skip_post_grad_graph_ids()
"""Graphs that stay on one stream, by their number in the order in which they were compiled."""

reuse_cuda_event: bool = os.environ.get("TORCH_SCHED_REUSE_CUDA_EVENT", "1") == "1"
"""Keep the events of a graph for its next call; False where threads share a compiled graph."""

dump_code_backends: list[str] = _get_dump_code()[0]
"""Backends whose graphs are written to files: ``torchsched``, ``inductor``."""

dump_code_dir: str | None = _get_dump_code()[1]
"""Where graphs are written, with their schedules; None: nowhere."""

enable_pre_grad_pass: bool = False
"""Replace what ``pre_grad_pass_options`` names before differentiation."""

pre_grad_pass_options: list[str] = ["cudnn_layer_norm"]
"""Names of patterns, see :mod:`apex.contrib.torchsched.passes`."""

install_config_module(sys.modules[__name__])
