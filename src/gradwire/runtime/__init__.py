"""Engines: what runs the programs of algorithms, in virtual time or on real processes.

All engines answer the same effects (`core/node.py`) by one interpreter (`interpreter/`). `virtual/`
and `network/` are the simulator, `process/`, `zeromq/` and `durable/` run real processes, `replay/`
repeats a real run, `storage/` has files with checksums. Open `interpreter/` first, then `virtual/`.
"""
