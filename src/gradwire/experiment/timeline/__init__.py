"""Timelines: what each worker and each network card did when, in simulated and in real runs."""
