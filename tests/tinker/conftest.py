"""All tests of a process share one server."""

from collections.abc import Iterator

import pytest

from tests.support.runs.tinker_server import Server
from windfall.tinker import service
from windfall.tinker.accounts import report


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "TIDY_S", 0.1)
        patch.setattr(report, "EVERY_S", 0.1)
        with Server.serving(tmp_path_factory.mktemp("server")) as found:
            yield found
