"""The warning of everything here; nothing else, so that every layer can import it."""


class GradwireWarning(UserWarning):
    """Something works, but not as well as it could (for example: no native kernels)."""
