"""Where Apex's older tests of transformers look whether the backend UCC is there."""

from ..distributed_testing._ucc_util import HAS_UCC

__all__ = ["HAS_UCC"]
