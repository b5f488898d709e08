"""Starts the processes of a run on this machine, watches them, and restarts them if asked to.

`launcher.py` is for ranks of torch.distributed, `role_launcher.py` for scheduler, servers and
workers. No process and no temporary file outlives the launcher, SIGKILL included. Begin with
`launcher.py`.
"""
