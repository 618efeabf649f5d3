"""One rank of a test: joins the process group, then runs the checks it is sent, until told to stop.

Run by ranks.py through runpy with ``job`` set; a script and not a module, because test files
are not importable by name in another process.
"""

import importlib.util
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def load(path):
    """The test file as a module that pickle, too, finds by name.

    Files of two packages may have one name.
    """
    name = Path(path).stem
    if getattr(sys.modules.get(name), "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def serve(connection, rank, world_size, init_file, timeout_s):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    while (order := connection.recv()) is not None:
        path, function_name, arguments = order
        try:
            torch.manual_seed(1000 + rank)
            getattr(load(path), function_name)(rank, world_size, **arguments)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
            return  # ranks are no longer in step: leave, so that the others fail at once
    dist.destroy_process_group()


serve(**globals()["job"])
