"""What a captured forward logs is logged once, in its order, when the call is over."""

from typing import Any

import pytest
from torch import nn

from lightning_hybrid.driver.captured_calls import LoggingLater


class OwnLog(nn.Module):
    """Has a ``log`` of its own; keeps what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log(self, name: str, value: float, **keywords: Any) -> None:
        self.logged.append((name, value, keywords))

    def log_dict(self, values: dict[str, float], **keywords: Any) -> None:
        self.logged.append((values, keywords))


class Logging(OwnLog):
    """Stands for a LightningModule."""

    @property
    def trainer(self) -> None:
        return None


def test_a_module_that_is_none_of_lightnings_keeps_its_own_log() -> None:
    module = OwnLog()
    with LoggingLater(module)():
        module.log("a", 1.0)
        assert module.logged == [("a", 1.0, {})]


def test_calls_reach_lightning_in_their_order_when_the_network_is_done() -> None:
    module = Logging()
    later = LoggingLater(module)
    for _ in range(2):  # the second call of the network finds nothing of the first
        with later():
            module.log("a", 1.0, on_epoch=True)
            module.log_dict({"b": 2.0})
            module.log("a", value=3.0)
            assert module.logged == []
        assert module.logged == [
            ("a", 1.0, {"on_epoch": True}),
            ({"b": 2.0}, {}),
            ("a", 3.0, {}),
        ]
        module.logged.clear()
    module.log("c", 4.0)
    assert module.logged == [("c", 4.0, {})]


def test_what_a_call_that_fails_has_logged_is_dropped() -> None:
    module = Logging()
    later = LoggingLater(module)

    def call() -> None:
        with later():
            module.log("a", 1.0)
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        call()
    with later():
        module.log("b", 2.0)
    assert module.logged == [("b", 2.0, {})]
    assert vars(module).keys().isdisjoint({"log", "log_dict"})


def test_a_method_that_the_user_has_put_on_the_instance_is_called_and_stays() -> None:
    module = Logging()
    seen: list[Any] = []
    module.log = own = lambda *arguments: seen.append(arguments)  # type: ignore[method-assign,assignment]
    with LoggingLater(module)():
        module.log("a", 1.0)
    assert seen == [("a", 1.0)]
    assert vars(module)["log"] is own
