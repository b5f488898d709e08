"""Builds the native kernels. They are optional: without a C compiler the install still succeeds.

The library has no Python in it (it is loaded with ctypes), so one build serves every
interpreter; `py_limited_api` gives it the abi3 file name that says so.
"""

from pathlib import Path

from setuptools import Extension, setup

native = Path("src/gradwire/kernels/native")
setup(
    ext_modules=[
        Extension(
            "gradwire.kernels.native._native",
            sources=sorted(str(path) for path in native.glob("*.c")),
            depends=sorted(str(path) for path in native.glob("*.h")),
            # Same bits as the torch reference: no fused multiply-add, no reordering.
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
