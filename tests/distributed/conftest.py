"""One server of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    opened = Worlds(tmp_path_factory.mktemp("worlds"))
    yield opened
    opened.close()
