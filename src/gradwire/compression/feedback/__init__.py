"""Reducers that remember what compression lost, or move momentum before it.

Each file is one method; `_wrapping.py` holds what they share. Begin with `ef.py`.
"""
