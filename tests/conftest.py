from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test module defines a kernel; tests/triton runs them so

torch.set_num_threads(1)  # tests run in several processes; the tensors are tiny

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=100, **COMMON)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole grids (tens of minutes)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.getoption("--full"):
        settings.register_profile("full", max_examples=1000, **COMMON)
        settings.load_profile("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="the whole grid; run with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
