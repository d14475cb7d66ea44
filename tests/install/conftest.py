"""Fixtures: the wheels, built once, and a browser."""

from pathlib import Path

import pytest

from tests.install.wheels import build_kernels, build_wheel
from tests.serve.page.conftest import browser

__all__ = ["browser"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def kernels_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels(tmp_path_factory.mktemp("kernels"))
