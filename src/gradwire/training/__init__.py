"""Training: what workers and servers do in a step, whatever engine runs them.

Here the four dimensions meet. A plan holds what all nodes share; worker and server do what the
synchronization algorithm asks for. Results do not depend on the engine. Open `plan.py` first, then
`worker.py` and `server.py`.
"""
