"""One receive is under way while the tensors of the one before are used."""

import pytest
import torch
from torch import Tensor

from lightning_hybrid.stage.forward_pass import Ahead


class Posts:
    """The previous stage: notes what is posted and what is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ahead = Ahead([2, 0, 1], lambda m: Post(self, m))


class Post:
    def __init__(self, posts: Posts, microbatch: int) -> None:
        self._posts, self._microbatch = posts, microbatch
        posts.events.append(f"post {microbatch}")

    def wait(self) -> list[Tensor]:
        self._posts.events.append(f"wait {self._microbatch}")
        return [torch.tensor(self._microbatch)]


def test_the_next_receive_is_posted_before_this_one_is_waited_for_and_no_other() -> None:
    posts = Posts()
    assert posts.events == []
    [first] = posts.ahead.take(2)
    assert first == 2
    assert posts.events == ["post 2", "post 0", "wait 2"]
    posts.ahead.take(0)
    [last] = posts.ahead.take(1)
    assert last == 1
    assert posts.events[3:] == ["post 1", "wait 0", "wait 1"]


def test_tensors_are_taken_in_the_order_of_the_list() -> None:
    posts = Posts()
    with pytest.raises(ValueError, match="micro-batch 0 is taken where the list has 2"):
        posts.ahead.take(0)
