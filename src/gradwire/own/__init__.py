"""A user's own network, data, loss and metric, as live objects or as names to import.

`reference.py` has the texts that stand for them in a configuration: `my.module:make_model` is
imported, `object:MyNet` was handed over as an object. After `#` comes a fingerprint
(`fingerprint.py`), so that a record says what was trained. `data.py` makes batches of a user's
data set, `network.py` has the module with its loss and metric. Begin with `reference.py`.
"""
