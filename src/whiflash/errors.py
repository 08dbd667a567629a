"""The exceptions users are meant to read."""


class WhiFlashError(ValueError):
    """Bad input, told in a sentence: what was wrong, what was expected, what to do next."""


class UnsupportedError(WhiFlashError):
    """Sound input that the part at hand was not made for; another may serve it."""
