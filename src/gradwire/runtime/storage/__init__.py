"""Files that a run writes and reads back.

They are replaced atomically (`files.py`) and carry a checksum: binary ones in a header
(`sealed.py`), text in a comment, under a key or at the end of each line (`text.py`). What is read
is what was written, or there is an error that names the file.
"""
