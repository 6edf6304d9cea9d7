"""More generated cases for `make test DEEP=1`."""

import os

import hypothesis

DEEP = bool(os.environ.get("DDTREE_DEEP"))
DEEPER = 10  # times as many examples


def deepen(settings):
    """A test's settings with more examples, drawn anew on every run; a test says how many it has in CI."""
    return hypothesis.settings(settings, max_examples=DEEPER * settings.max_examples, derandomize=False)
