"""Session-wide set-up: what a plain `pytest` leaves out, warm ranks that end with the session, no waits for a name server."""

import os

import pytest

from tests.harness import close_pools

# torch asks for the names of both ends of every connection, and ::ffff:127.0.0.1 is in no hosts file. Where the name
# server does not answer each of these questions takes five seconds, unless somebody says how long to wait.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Worlds of one and two ranks are for a plain `pytest`; three and four are part of the whole suite (`scripts/test`)."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        limit = item.get_closest_marker("slow_from")
        if params.get("world_size", 1) >= (3 if limit is None else limit.args[0]):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish() -> None:
    close_pools()
