"""Settings and fixtures for the whole suite."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import proxprop
from compatibility import Claims

# Timings vary between machines, and a run on CI should be the same every time.
settings.register_profile("proxprop", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("proxprop")

CLAIMS = Claims()

collect_ignore = ["distributed"]  # run by torchrun, see test_distributed.py


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CLAIMS)


@pytest.fixture
def claims() -> Claims:
    """What all tests that were collected claim for docs/compatibility.md."""
    return CLAIMS


@pytest.fixture
def registry() -> Iterator[None]:
    """Registrations made in a test end with it."""
    table = dict(proxprop.nn.TABLE)
    yield
    proxprop.nn.TABLE.clear()
    proxprop.nn.TABLE.update(table)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiled must not be found, or count as a recompilation, in the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
