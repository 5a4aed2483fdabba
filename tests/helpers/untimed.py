"""Captures without a measurement of torch's own, for a line in a log that nobody reads here."""

from torch._dynamo import guards


def leave_guards_untimed() -> None:
    """For as long as the process lives: it takes 20 ms of each capture, and empties all caches."""
    if "profile_guard_manager" in vars(guards):  # a private name
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
