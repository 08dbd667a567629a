"""The one exception users are meant to read."""


class WhiFlashError(ValueError):
    """Bad input, told in a sentence: what was wrong, what was expected, what to do next."""
