"""The error of a wrong flag."""


class FlagError(Exception):
    """A flag is wrong. The message names the flag, the expected value, and the nearest flag that exists."""
