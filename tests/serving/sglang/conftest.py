"""One process of SGLang's for all tests of this folder."""

import pytest

from tests.serving.sglang.support import start


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    start()
