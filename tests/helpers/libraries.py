"""Which libraries a test needs, and why it is skipped without them."""

from importlib.util import find_spec

import pytest


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips tests where one of these packages is missing."""
    missing = [name for name in names if find_spec(name) is None]
    reason = f"needs {', '.join(missing)}, which make real or make newest installs"
    return pytest.mark.skipif(bool(missing), reason=reason)
