"""Our own exceptions. Wrong input to a call raises ValueError or TypeError instead."""


class UnsupportedModel(ValueError):
    """The model contains no supported vision tower; the message names the supported ones."""
