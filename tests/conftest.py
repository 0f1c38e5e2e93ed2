"""Fixtures and options of the whole suite."""

from collections.abc import Iterator

import hypothesis
import pytest
from pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden`: what the golden tests find becomes what they expect. Read the diff."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


# The same examples in every run, however long one takes.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four gloo processes."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool8() -> Iterator[Pool]:
    """Eight gloo processes, for the tests of one file."""
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool2() -> Iterator[Pool]:
    """Two gloo processes, for the tests of one file."""
    pool = Pool(2)
    yield pool
    pool.close()
