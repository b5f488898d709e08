"""Triton kernels for CUDA tensors, one file per operation as in `reference/` and `native/`.

They give the bits of the torch reference; a file says where it cannot. A module is imported when
its first operation is picked (`kernels/_dispatch.py`), since Triton may not be installed. Begin
reading with `_common.py`, which says what keeps the bits, and `signs.py`. CI has no GPU: it
interprets kernels (TRITON_INTERPRET=1), and compiles them (tests/kernels/compile_triton.py).
"""
