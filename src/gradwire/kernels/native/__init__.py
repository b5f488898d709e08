"""The reference's operations in C, loaded with ctypes; equal file names hold equal operations.

Arguments arrive checked (`gradwire.kernels` does that) and flat, on the CPU. ctypes releases
the interpreter lock during a call.
"""
