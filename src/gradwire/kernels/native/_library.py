"""Finds and loads the C library that `setup.py` builds next to this file.

The file carries the name of an extension module so that wheels and editable installs place
it, but there is no Python in it: ctypes loads it and declares what its functions take.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

_VERSION = 5  # GW_VERSION in native.h

_P, _I32, _I64, _U32, _U64 = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_uint32,
    ctypes.c_uint64,
)
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "gw_use_threads": (None, (_I32,)),
    "gw_least_items": (None, (_I64,)),
    "gw_philox_words": (None, (_U64, _U32, _U32, _U32, _U32, _P, _I64)),
    "gw_pack_uints": (_I32, (_P, _I32, _I64, _I32, _P)),
    "gw_unpack_uints": (None, (_P, _I64, _I32, _P)),
    "gw_pack_signs": (None, (_P, _I32, _U64, _I64, _P)),
    "gw_unpack_signs": (None, (_P, _I64, _I32, _U64, _U64, _P)),
    "gw_count_ones": (_I64, (_P, _I64)),
    "gw_ones_positions": (None, (_P, _I64, _I64, _P)),
    "gw_pack_ones": (_I32, (_P, _I64, _I64, _P)),
    "gw_pack_digits": (_I32, (_P, _I64, _I32, _I32, _P)),
    "gw_unpack_digits": (None, (_P, _I64, _I32, _I32, _P)),
    "gw_encode_signs": (_I32, (_P, _P, _I64, _I64, _P, _P, _P, _P)),
    "gw_mean_signs": (None, (_P, _P, _I64, _I64, _I64, _P)),
    "gw_encode_levels": (
        _I32,
        (_P, _P, _I64, _I64, _I32, _I32, _U64, _U32, _U32, _U32, _P, _P, _P),
    ),
    "gw_decode_levels": (_I32, (_P, _P, _I64, _I64, _I32, _I32, _P)),
    "gw_select_above": (_I64, (_P, _P, _I64, _U32, _I64, _P, _P, _P)),
    "gw_select_largest": (None, (_P, _P, _I64, _I64, _I64, _P, _P, _P)),
    "gw_move_above": (
        _I64,
        (
            *(_P, _P, _P, ctypes.c_float, ctypes.c_float, _I32, _I32),
            *(_I64, _U32, _I64, _P, _P, _P, _P),
        ),
    ),
    "gw_move_largest": (
        None,
        (
            *(_P, _P, _P, ctypes.c_float, ctypes.c_float, _I32, _I32),
            *(_I64, _I64, _I64, _P, _P, _P, _P),
        ),
    ),
    "gw_polar_widest": (None, (_I32,)),
    "gw_polar_quantise_lanes": (_I32, (_P, _I64, _I64, _I32, _P, _I32, _P)),
    "gw_polar_quantise_signs": (_I32, (_P, _I32, _I64, _I64, _I32, _P, _I32, _P)),
    "gw_rows_to_lanes": (_I32, (_P, _I64, _I64, _I32, _P)),
    "gw_ratios_to_lanes": (_I32, (_P, _I64, _I64, ctypes.c_float, _P)),
    "gw_lanes_to_rows": (None, (_P, _I64, _I64, _I32, _P)),
    "gw_polar_list": (_I32, (_P, _I64, _I64, _P, _I32, _I32, _P, _P, _I32, _P, _I32, _P)),
    "gw_polar_genie": (_I32, (_P, _I64, _I64, _P, _P)),
    "gw_polar_ratios": (None, (_P, ctypes.c_float, _I64, _P)),
    "gw_polar_lookup": (None, (_P, ctypes.c_float, _I32, _P, _P, _I64, _P)),
    "gw_polar_label": (None, (_P, _I32, _I64, _P)),
    "gw_polar_points": (None, (_P, _P, _I64, _P)),
    "gw_polar_transform_lanes": (None, (_P, _I64, _I64, _I32, _P)),
    "gw_polar_signs": (
        _I32,
        (_P, _I64, ctypes.c_float, _P, _I64, _I64, _I32, _P, _P, _P),
    ),
    "gw_polar_fill": (None, (_P, _I64, _I64, _I64, _I64, _I32, _I32, _P)),
    "gw_join_lanes": (None, (_P, _I64, _I64, _I64, _I32, _P)),
    "gw_cut_lanes": (None, (_P, _I64, _I64, _I64, _I32, _P)),
    "gw_sum_rows": (None, (_P, _I64, _I64)),
    "gw_strata_positions": (None, (_I64, _I64, _U64, _U32, _U32, _U32, _P)),
    "gw_strata_gather": (None, (_P, _I64, _I64, _U64, _U32, _U32, _U32, _I32, _P)),
    "gw_cast_bf16": (_I32, (_P, _I64, _P)),
    "gw_cast_fp16": (_I32, (_P, _I64, _P)),
    "gw_mean_bf16": (_I32, (_P, _I64, _I64, _I64, _P)),
    "gw_mean_fp16": (_I32, (_P, _I64, _I64, _I64, _P)),
    "gw_rans_encode": (_I64, (_P, _I64, _P, _I32, _I32, _I32, _P, _P)),
    "gw_rans_decode": (_I32, (_P, _I64, _P, _P, _I32, _I32, _I32, _I64, _P)),
    "gw_measure_gaps": (_I32, (_P, _I64, _I64, _P, _P, _P)),
    "gw_encode_rice": (_I32, (_P, _I64, _I32, _I64, _I64, _P)),
    "gw_encode_entries": (
        _I64,
        (_P, _P, _P, _I64, _I64, _I32, _U32, _U32, _U32, _P, _P, _I64, _P),
    ),
    "gw_decode_rice": (_I32, (_P, _I64, _I64, _I64, _I32, _I64, _P)),
    "gw_elias_lengths": (_I32, (_P, _P, _I64, _I64, _P)),
    "gw_elias_encode": (_I32, (_P, _I32, _I64, _I64, _I32, _P, _P)),
    "gw_elias_decode": (_I64, (_P, _I64, _I64, _I32, _I64, _I64, _I64, _P)),
    "gw_huffman_lengths": (_I32, (_P, _I32, _P)),
    "gw_huffman_encode": (_I32, (_P, _I32, _I64, _P, _I32, _I64, _I64, _P)),
    "gw_huffman_decode": (_I32, (_P, _I64, _I64, _P, _I32, _I64, _P)),
    "gw_count_symbols": (_I32, (_P, _I32, _I64, _I64, _P, _P)),
    "gw_find_others": (_I64, (_P, _I32, _I64, _I64, _I64, _P, _P)),
    "gw_hadamard": (None, (_P, _I32, _I64, _I64, ctypes.c_double, _P, _P, _P)),
    "gw_rotated_signs": (None, (_P, _I64, _I64, ctypes.c_double, _P, _P, _P, _P, _P, _P)),
    "gw_unrotated_signs": (None, (_P, _P, _I64, _I64, ctypes.c_double, _P, _P)),
    "gw_bucket_maxima": (None, (_P, _I64, _I64, _P)),
    "gw_bucket_extremes": (None, (_P, _I64, _I64, _P, _P)),
    "gw_bucket_squares": (None, (_P, _I64, _I64, _P)),
    "gw_bucket_sides": (None, (_P, _I64, _I64, _P, _P, _P)),
    "gw_cell_products": (None, (_P, _P, _I64, _I64, _P, _I32, _P, _P)),
    "gw_round": (
        None,
        (
            *(_P, _P, _P, _I64, _I64, _I32, _P, _I32, ctypes.c_float, ctypes.c_float),
            *(_U64, _U32, _U32, _U32, _I32, _I32, _I32, _P),
        ),
    ),
    "gw_from_pairs": (None, (_P, _P, _I64, _I64, _P)),
    "gw_shorten": (_I64, (_P, _I64, _I32, _I32, _I32, _P)),
    "gw_lengthen": (_I64, (_P, _I64, _I32, _I32, _P, _I64)),
    "gw_from_table": (_I32, (_P, _P, _P, _I64, _I64, _I32, _I32, _I32, _P, _P)),
    "gw_moments": (None, (_P, _I64, _P, _P)),
    "gw_tails": (None, (_P, _I64, ctypes.c_float, _P, _P, _P, _P)),
    "gw_draw": (_I64, (_P, _I64, ctypes.c_float, _U64, _U32, _U32, _U32, _I64, _P, _P, _P)),
    "gw_sketch": (None, (_P, _I64, _I64, _I64, _P, _P, _P)),
    "gw_sketch_medians": (None, (_P, _I64, _I64, _I64, _P, _P, _P)),
    "gw_trellis_scale": (None, (_P, _I64, _I32, ctypes.c_double, _I32, _P)),
    "gw_trellis_range": (None, (_P, _P, _I64, _P)),
    "gw_trellis_squares": (None, (_P, _P, _P, _I64, _I64, _P, _P)),
    "gw_trellis_search": (_I32, (_P, _P, _I64, _P, _P, _I32, _P)),
    "gw_trellis_contexts": (_I32, (_P, _P, _I64, _P, _I64, _I64, _I32, _P, _P, _P)),
    "gw_trellis_counts": (None, (_P, _P, _P, _I64, _I32, _P, _P)),
    "gw_trellis_tables": (_I32, (_P, _P, _P, _P, _P)),
    "gw_trellis_fit": (
        _I32,
        (
            *(_P, _I64, _P, _I64, _I64, _I32, _I32, _I32, _I32, _I64, _P, _P, _P),
            *(ctypes.c_double, ctypes.c_double, _P, _P, _P, _P, _P, _P),
        ),
    ),
    "gw_trellis_encode": (_I32, (_P, _P, _I64, _I64, _P, _P, _P, _P)),
    "gw_trellis_decode": (_I32, (_P, _P, _I64, _I64, _P, _I64, _P, _P, _P, _I32, _P, _P)),
    "gw_exchanges_new": (_P, (_I32, _P, _P, _P, _P, _P)),
    "gw_exchanges_free": (None, (_P,)),
    "gw_exchanges_clear": (None, (_P,)),
    "gw_exchanges_begin": (_I64, (_P, _I32)),
    "gw_exchanges_post": (
        _I32,
        (_P, _I64, _I32, _P, _I64, _P, ctypes.c_double, _I64, _P, _P),
    ),
    "gw_exchanges_next": (_I32, (_P, _P, _P)),
    "gw_exchanges_run": (_I64, (_P, ctypes.c_double, _I64, _P, _P, _I64)),
    "gw_passes_new": (_P, (_I32, _P, _P, _P, _P, _P, _P)),
    "gw_passes_free": (None, (_P,)),
    "gw_passes_clear": (None, (_P,)),
    "gw_passes_begin": (_I64, (_P, _I32, _P, _I32)),
    "gw_passes_end": (_I64, (_P, _I64)),
    "gw_passes_post": (
        _I32,
        (_P, _I64, _I32, _I64, ctypes.c_double, ctypes.c_double, _P, _P, _P),
    ),
    "gw_passes_next": (_I32, (_P, _P, _P)),
    "gw_passes_run": (_I32, (_P, ctypes.c_double, _I64, _P, _P, _P, _P)),
    "gw_plane_words": (_I32, (_P, _I64)),
    "gw_plane_ratios": (None, (_P, _P, _I64, _P, _P, _P)),
    "gw_plane_choose": (_I32, (_P, _P, _I64, _P, _P, _P, _I64, _I64, _P, _P, _P, _P)),
}


class LibraryError(Exception):
    """Why the native kernels cannot run."""


def _open() -> ctypes.CDLL:
    folder = Path(__file__).parent
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise LibraryError("the C library was not built")
    try:
        library = ctypes.CDLL(str(path))
        version = library.gw_version()
        if version != _VERSION:
            raise LibraryError(f"the C library is of version {version}, not {_VERSION}")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the C library does not load: {error}") from error
    return library


@cache
def _attempt() -> ctypes.CDLL | LibraryError:
    """Loads the library once per process; a failure is kept as well."""
    try:
        return _open()
    except LibraryError as error:
        return error


def load() -> ctypes.CDLL:
    """The library, or a LibraryError that says why there is none."""
    found = _attempt()
    if isinstance(found, LibraryError):
        raise found
    return found


def parallel() -> ctypes.CDLL:
    """The library, for a kernel that may run on as many threads as torch's operations do."""
    library = load()
    library.gw_use_threads(torch.get_num_threads())
    return library


def dense(x: Tensor) -> Tensor:
    """`x` as C may read it: contiguous, and aligned (`torch.frombuffer` promises neither)."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % x.element_size() else x


def pointer(x: Tensor | None) -> int | None:
    """Where a tensor begins, or null."""
    return None if x is None else x.data_ptr()
