import pytest
from owned_elsewhere import World


@pytest.fixture
def world() -> World:
    """A module on this rank whose tensors live in another one."""
    return World()
