"""Triton kernels for CUDA tensors, one file per operation as in `reference/` and `native/`.

They give the bits of the torch reference; a file says where it cannot. A module is imported when
its first operation is picked (`kernels/_dispatch.py`), since Triton may not be installed. Begin
reading with `signs.py`. CI has no GPU and interprets them (TRITON_INTERPRET=1).
"""
