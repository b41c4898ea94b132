"""The error whose sentence is all that there is to know."""


class CalibrationError(ValueError):
    """Nothing can be measured with this data and memory; a command needs to say no more than the sentence."""
