"""Servers that survive a crash: arrivals are on disk before the program gets them.

Promises: a server that is killed continues where it was; nothing that was acknowledged is lost, and
nothing counts twice. With `is_durable` that holds for a loss of power, too. Not promised: that a
job survives its scheduler, or a disk that says that it has synced and has not.
Open first: transport.py (between engine and transport), then write_ahead.py, journal.py and
checkpoint.py (what is on disk), recovery.py (what happens after a restart).
"""
