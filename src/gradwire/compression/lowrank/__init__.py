"""Send factors of a matrix instead of the matrix."""
