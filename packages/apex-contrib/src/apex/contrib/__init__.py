"""Fused kernels that few models need: each subpackage stands alone and is imported by itself."""

from sys import argv as _argv

if _argv[:1] == ["-m"]:  # the doctor may be asked, which answers without torch too
    from ._shared.native.doctor_torch import answer_without_torch as _answer

    _answer(__name__)
