"""Which random numbers the calls of a step draw."""

import torch

from lightning_hybrid.driver.seed_numbers import StepCalls


def calls() -> StepCalls:
    return StepCalls(7, 0, torch.device("cpu"))


def test_two_calls_of_a_step_that_stages_do_not_run_draw_other_numbers() -> None:
    def uses_rng() -> list[float]:
        made = calls()
        made.begin(3)
        found = []
        for _ in range(2):
            with made.one_stream():
                found.append(torch.rand(()).item())
        return found

    before = torch.get_rng_state()
    first, second = uses_rng()
    assert first != second
    assert uses_rng() == [first, second]  # of the same step, resumed
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_without_gradients_never_draw_what_training_draws() -> None:
    made = calls()
    training, evaluation = set(), set()
    for batch in range(3):
        made.begin(batch)
        for _ in range(4):
            training.add(made.take_seed_number(grad=True))
            made.count += 1
            evaluation.add(made.take_seed_number(grad=False))
    assert len(training) == len(evaluation) == 12
    assert training.isdisjoint(evaluation)
