"""Servers and a scheduler for training loops that users wrote (`gradwire launch`).

They know nothing of the model when they start: workers order means from them, or have them hold a
model. `job.py` says who takes part and where, `node.py` runs a server or the scheduler,
`models.py` is a server that holds models. What a worker does is in `gradwire.integration`.
"""
