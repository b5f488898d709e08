"""The hot loops, behind one dispatch. Callers import from here, never from a backend.

Every function checks its arguments here, so backends may trust them, and returns a new flat
tensor on the device of its input. Bit streams are little-endian: bit b of a stream is bit
b % 8 of byte b // 8, and padding bits are zero.
"""

from typing import Literal

from gradwire.kernels._bits import (
    ones_positions,
    pack_digits,
    pack_ones,
    pack_signs,
    pack_uints,
    unpack_digits,
    unpack_signs,
    unpack_uints,
)
from gradwire.kernels._checks import fuses
from gradwire.kernels._checksum import checks_there, crc32
from gradwire.kernels._dispatch import cpu_backend
from gradwire.kernels._drawn import draw_candidates
from gradwire.kernels._elias import (
    elias_decode,
    elias_decode_symbols,
    elias_encode,
    elias_lengths,
    elias_sizes,
    elias_symbol_lengths,
)
from gradwire.kernels._entries import EntryPart, codes_entries, encode_entries
from gradwire.kernels._gaps import (
    Gaps,
    decode_rice,
    encode_rice,
    measure_gaps,
    scatter_rice,
    scatters_entries,
    write_entries,
    writes_entries,
)
from gradwire.kernels._hadamard import (
    encode_rotated_signs,
    encodes_rotated_signs,
    hadamard,
    rotated_signs,
    row_norms,
    unrotated_signs,
)
from gradwire.kernels._halves import mean_halves, narrow, narrow_sum
from gradwire.kernels._huffman import huffman_decode, huffman_encode, huffman_lengths
from gradwire.kernels._lanes import (
    bits_from_lanes,
    bits_to_lanes,
    cut_lanes,
    join_lanes,
    polar_fill,
    ratios_to_lanes,
    rows_from_lanes,
    rows_to_lanes,
)
from gradwire.kernels._levels import (
    decode_levels,
    decode_levels_rows,
    encode_levels,
    encode_levels_rows,
)
from gradwire.kernels._moments import Tails, moments, tails
from gradwire.kernels._motion import Motion, Residual, row_of_residual, with_residual
from gradwire.kernels._notes import note, note_more, noted
from gradwire.kernels._philox import philox_words
from gradwire.kernels._plane import Piece as PlanePiece
from gradwire.kernels._plane import plane_choose, plane_ratios, plane_words
from gradwire.kernels._polar import (
    POLAR_FREE,
    POLAR_FROZEN,
    POLAR_LANES,
    POLAR_PARITY,
    POLAR_REPETITION,
    polar_encode_signs,
    polar_genie,
    polar_kinds,
    polar_label,
    polar_list,
    polar_lookup,
    polar_points,
    polar_quantise,
    polar_quantise_bits,
    polar_ratios,
    polar_signs,
    polar_transform,
    polar_width,
)
from gradwire.kernels._pool import empty, from_host, to_host
from gradwire.kernels._rans import rans_decode, rans_encode
from gradwire.kernels._selection import (
    select_above,
    select_largest,
    select_largest_rows,
    select_sampled,
    select_sampled_rows,
)
from gradwire.kernels._signs import (
    encode_signs,
    encode_signs_in,
    encode_signs_rows,
    mean_magnitudes,
    mean_signs,
    mean_signs_in,
)
from gradwire.kernels._sketch import sketch, sketch_medians
from gradwire.kernels._strata import strata_positions, strata_values
from gradwire.kernels._symbols import count_symbols, find_others
from gradwire.kernels._tables import (
    Packing,
    bucket_extremes,
    bucket_maxima,
    bucket_sides,
    bucket_squares,
    cell_products,
    from_pairs,
    from_table,
    lengthen_runs,
    shorten_runs,
    to_cells,
    to_fp8,
    to_levels,
    to_whole,
)
from gradwire.kernels._trellis import (
    trellis_contexts,
    trellis_counts,
    trellis_decode,
    trellis_encode,
    trellis_fit,
    trellis_scale,
    trellis_search,
    trellis_squares,
    trellis_tables,
)
from gradwire.warning import GradwireWarning

__all__ = [
    "POLAR_FREE",
    "POLAR_FROZEN",
    "POLAR_LANES",
    "POLAR_PARITY",
    "POLAR_REPETITION",
    "EntryPart",
    "Gaps",
    "GradwireWarning",
    "Motion",
    "Packing",
    "PlanePiece",
    "Residual",
    "Tails",
    "backend",
    "bits_from_lanes",
    "bits_to_lanes",
    "bucket_extremes",
    "bucket_maxima",
    "bucket_sides",
    "bucket_squares",
    "cell_products",
    "checks_there",
    "codes_entries",
    "count_symbols",
    "crc32",
    "cut_lanes",
    "decode_levels",
    "decode_levels_rows",
    "decode_rice",
    "draw_candidates",
    "elias_decode",
    "elias_decode_symbols",
    "elias_encode",
    "elias_lengths",
    "elias_sizes",
    "elias_symbol_lengths",
    "empty",
    "encode_entries",
    "encode_levels",
    "encode_levels_rows",
    "encode_rice",
    "encode_rotated_signs",
    "encode_signs",
    "encode_signs_in",
    "encode_signs_rows",
    "encodes_rotated_signs",
    "find_others",
    "from_host",
    "from_pairs",
    "from_table",
    "fuses",
    "hadamard",
    "huffman_decode",
    "huffman_encode",
    "huffman_lengths",
    "join_lanes",
    "lengthen_runs",
    "mean_halves",
    "mean_magnitudes",
    "mean_signs",
    "mean_signs_in",
    "measure_gaps",
    "moments",
    "narrow",
    "narrow_sum",
    "note",
    "note_more",
    "noted",
    "ones_positions",
    "pack_digits",
    "pack_ones",
    "pack_signs",
    "pack_uints",
    "philox_words",
    "plane_choose",
    "plane_ratios",
    "plane_words",
    "polar_encode_signs",
    "polar_fill",
    "polar_genie",
    "polar_kinds",
    "polar_label",
    "polar_list",
    "polar_lookup",
    "polar_points",
    "polar_quantise",
    "polar_quantise_bits",
    "polar_ratios",
    "polar_signs",
    "polar_transform",
    "polar_width",
    "rans_decode",
    "rans_encode",
    "ratios_to_lanes",
    "rotated_signs",
    "row_norms",
    "row_of_residual",
    "rows_from_lanes",
    "rows_to_lanes",
    "scatter_rice",
    "scatters_entries",
    "select_above",
    "select_largest",
    "select_largest_rows",
    "select_sampled",
    "select_sampled_rows",
    "shorten_runs",
    "sketch",
    "sketch_medians",
    "strata_positions",
    "strata_values",
    "tails",
    "to_cells",
    "to_fp8",
    "to_host",
    "to_levels",
    "to_whole",
    "trellis_contexts",
    "trellis_counts",
    "trellis_decode",
    "trellis_encode",
    "trellis_fit",
    "trellis_scale",
    "trellis_search",
    "trellis_squares",
    "trellis_tables",
    "unpack_digits",
    "unpack_signs",
    "unpack_uints",
    "unrotated_signs",
    "with_residual",
    "write_entries",
    "writes_entries",
]


def backend() -> Literal["native", "reference"]:
    """What runs on CPU tensors, for reports; on CUDA Triton does where it is installed."""
    return cpu_backend()
