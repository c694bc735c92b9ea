"""Session-wide set-up: warm ranks end with the session."""

from tests.harness import close_pools


def pytest_sessionfinish() -> None:
    close_pools()
