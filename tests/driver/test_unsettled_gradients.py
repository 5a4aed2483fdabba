"""What must be averaged, and brought to its owner, before gradients are final."""

from lightning_hybrid.driver.ownership import Unsettled


def test_only_passes_that_do_not_average_leave_networks_to_be_averaged() -> None:
    unsettled = Unsettled()
    assert (unsettled.networks, unsettled.borrowed) == (set(), False)
    unsettled.note(1, averaged=True)
    assert unsettled.networks == set()
    for network in (2, 0, 2):
        unsettled.note(network, averaged=False)
    unsettled.note(2, averaged=True)  # what an earlier pass has left is still not averaged
    assert unsettled.networks == {0, 2}


def test_every_pass_may_leave_gradients_of_tied_parameters_at_borrowers() -> None:
    for averaged in (False, True):
        unsettled = Unsettled()
        unsettled.note(0, averaged=averaged)
        assert unsettled.borrowed
