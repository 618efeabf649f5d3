"""The functions of the legacy module amp_C, a file per kind of kernel.

Every file names in ``KERNELS`` the folders of the operators that its functions call.
"""
