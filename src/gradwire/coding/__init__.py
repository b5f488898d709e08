"""Information theory: coders of symbols and indices, and the bounds they are measured by."""
