"""Session-wide set-up: warm ranks end with the session, and no test waits for a name server."""

import os

from tests.harness import close_pools

# torch asks for the names of both ends of every connection, and ::ffff:127.0.0.1 is in no hosts file. Where the name
# server does not answer each of these questions takes five seconds, unless somebody says how long to wait.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_sessionfinish() -> None:
    close_pools()
