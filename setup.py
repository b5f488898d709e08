"""Builds the native kernels. They are optional: without a C compiler the install still succeeds.

The library has no Python in it (it is loaded with ctypes), so one build serves every
interpreter; `py_limited_api` gives it the abi3 name that says so. Free-threaded interpreters
do not accept that name and get one of their own.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

native = Path("src/gradwire/kernels/native")
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=[
        Extension(
            "gradwire.kernels.native._native",
            sources=sorted(path.as_posix() for path in native.glob("*.c")),
            depends=sorted(path.as_posix() for path in native.glob("*.h")),
            # Same bits as the torch reference: no fused multiply-add, no reordering.
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=limited,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {},
)
