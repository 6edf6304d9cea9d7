"""One hypothesis profile for all tests: the same examples on every run. `make test DEEP=1` draws ten times as many."""

import hypothesis

from deep import DEEP, deepen

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("deep", derandomize=False, deadline=None, print_blob=True)
hypothesis.settings.load_profile("deep" if DEEP else "ci")


def pytest_collection_modifyitems(items):
    tests = {getattr(item, "function", None) for item in items} if DEEP else set()
    for test in tests:
        if hasattr(test, "hypothesis"):
            test._hypothesis_internal_use_settings = deepen(test._hypothesis_internal_use_settings)
