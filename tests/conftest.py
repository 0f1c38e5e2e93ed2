"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four gloo processes."""
    pool = Pool(4)
    yield pool
    pool.close()
