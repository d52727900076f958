"""Errors of our own; everything about a call's input is a ValueError or TypeError."""


class UnsupportedModel(ValueError):
    """The model holds no vision tower that can be fused; the message names what is supported."""
