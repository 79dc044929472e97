"""The error of a measurement that cannot be made here."""


class BenchError(Exception):
    """A measurement cannot be made, for a reason that is known."""
