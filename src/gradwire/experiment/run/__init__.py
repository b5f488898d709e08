"""What a run is, whichever engine it runs on: configuration, setup, record, outcome.

`config.py` holds the settings as a frozen value. `setup.py` looks up every name before the first
step and gives an `Experiment`. `record.py` writes and checks the folder of a run, and `outcome.py`
is what the caller gets. Nothing here starts an engine. Begin with `config.py`.
"""
