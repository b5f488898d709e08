"""The normative operations, in torch, for any device: every other backend must match them."""
