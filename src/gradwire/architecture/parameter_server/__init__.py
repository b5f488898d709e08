"""Servers that hold the model or form the mean, and a scheduler that keeps the membership."""
