"""Loggers of apex.transformer."""

from __future__ import annotations

import logging
import os

__all__ = ["get_transformer_logger", "set_logging_level"]


def get_transformer_logger(name: str) -> logging.Logger:
    """The logger called ``name`` without its extension, so that ``__file__`` works as a name."""
    return logging.getLogger(os.path.splitext(name)[0])


def set_logging_level(verbosity: int | str) -> None:
    """Set the level of the logger ``apex``, above all loggers of this library."""
    logging.getLogger("apex").setLevel(verbosity)
