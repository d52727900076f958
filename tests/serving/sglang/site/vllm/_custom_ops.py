"""See the package."""


def rotary_embedding(*args: object) -> None:
    raise NotImplementedError
