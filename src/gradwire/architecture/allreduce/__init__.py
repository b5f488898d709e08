"""Architectures in which every rank ends with the mean of all, by messages between workers only."""
