"""Servers that hold the model or form the mean, and a scheduler that knows who is there."""
