"""One hypothesis profile for all tests: the same examples on every run."""

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")
