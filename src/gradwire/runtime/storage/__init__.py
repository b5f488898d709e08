"""Files that a run writes and reads back.

Promises: a file is replaced atomically; what is read is what was written, or there is an error
that names the file, also for errors of the operating system. Nothing is unpickled.
Open first: files.py (atomic replacement, errors), then sealed.py (binary files behind a header with
a checksum) and text.py (TOML: checksum in a comment; JSON: under a key; lines: at the end of each,
of all lines so far, so a torn last line is distinguished from damage).
"""
