"""What only an NVIDIA GPU can tell: `pytest tests/gpu` is the whole comparison; elsewhere these tests are skipped."""

from pathlib import Path

import pytest

from ddtree.cuda import GpuDevice

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why these tests cannot run here; None if they can."""
    try:
        GpuDevice()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    reason = why_not() if here else None
    for item in here:
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of drivers and torch are not ours
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu():
    return GpuDevice()
