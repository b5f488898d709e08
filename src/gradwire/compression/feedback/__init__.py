"""Reducers with error feedback or estimates, or with momentum before compression.

Each file is one method; `_wrapping.py` holds what they share. Begin with `ef.py`.
"""
