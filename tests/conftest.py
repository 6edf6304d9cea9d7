"""One hypothesis profile for all tests: the same examples on every run. `make test DEEP=1` draws ten times as many."""

import os

import hypothesis

DEEP = bool(os.environ.get("DDTREE_DEEP"))
DEEPER = 10  # times as many examples

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("deep", derandomize=False, deadline=None, print_blob=True)
hypothesis.settings.load_profile("deep" if DEEP else "ci")


def deepen(settings):
    """A test's settings with more examples, drawn anew on every run; a test says how many it has in CI."""
    return hypothesis.settings(settings, max_examples=DEEPER * settings.max_examples, derandomize=False)


def pytest_collection_modifyitems(items):
    tests = {getattr(item, "function", None) for item in items} if DEEP else set()
    for test in tests:
        if hasattr(test, "hypothesis"):
            test._hypothesis_internal_use_settings = deepen(test._hypothesis_internal_use_settings)
