"""Coverage of every interval that a test prints: ``python benchmarks/interval_coverage.py``.

Shares and balanced accuracy exactly, from all tables that can occur; the others by simulation. The
coverage for one true share jumps with it, since counts are whole numbers: the mean over shares
within 0.05 of it is what is shown. Areas are simulated with three kinds of scores: normal ones of
equal spread, normal ones of which the positive have twice the spread, and exponential ones. Numbers
are ages told with normal errors or with some far off, and scores of which most are near the best.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np
from scipy import stats
from scipy.special import expit

from models import intervals as of
from models import numbers
from models.calibration import calibration_intervals
from models.metrics import Array, brier, mcc

AREAS = (0.6, 0.7, 0.8, 0.9, 0.95, 0.97)
SHARES = np.linspace(0.5, 0.99, 50)
_AROUND = 11  # shares of 0.01 that one mean is of


def shares(people: int) -> tuple[float, float]:
    """Least and greatest local mean of the coverage of Wilson's interval, for 0.55 to 0.94."""
    counts = np.arange(people + 1)
    ends = np.array([of.wilson(count / people, people) for count in counts])
    inside = (ends[:, :1] <= SHARES) & (ends[:, 1:] >= SHARES)
    covered = (stats.binom.pmf(counts[:, None], people, SHARES) * inside).sum(axis=0)
    local = np.convolve(covered, np.ones(_AROUND) / _AROUND, "valid")
    return float(local.min()), float(local.max())


def balanced_accuracy(first: int, second: int) -> tuple[float, float]:
    """Least and greatest local mean over pairs of recalls from 0.55 to 0.97."""
    grid = np.linspace(0.55, 0.97, 15)
    counts = [np.arange(people + 1) for people in (first, second)]
    bounds = [[of.wilson(c / n, n) for c in own] for own, n in zip(counts, (first, second))]
    lows, highs = np.empty((2, first + 1, second + 1))
    for i in counts[0]:
        for j in counts[1]:
            recalls = [i / first, j / second]
            lows[i, j], highs[i, j] = of.mean_of(recalls, [bounds[0][i], bounds[1][j]])
    chances = [stats.binom.pmf(c[:, None], n, grid) for c, n in zip(counts, (first, second))]
    covered = np.empty((len(grid), len(grid)))
    for a, one in enumerate(grid):
        for b, other in enumerate(grid):
            inside = (lows <= (one + other) / 2) & (highs >= (one + other) / 2)
            covered[a, b] = chances[0][:, a] @ inside @ chances[1][:, b]
    local = np.lib.stride_tricks.sliding_window_view(covered, (3, 3)).mean(axis=(2, 3))
    return float(local.min()), float(local.max())


def mean_of_three(people: int, recalls: tuple[float, ...], runs: int) -> float:
    """Coverage for three classes, blurred by 0.02."""
    random = np.random.default_rng(people)
    hits = []
    for _ in range(runs):
        true = np.array(recalls) + random.uniform(-0.02, 0.02, 3)
        found = (random.binomial(people, true) / people).tolist()
        low, high = of.mean_of(found, [of.wilson(share, people) for share in found])
        hits.append(low <= true.mean() <= high)
    return float(np.mean(hits))


def _normal(random: np.random.Generator, area: float, positive: Array) -> Array:
    return random.normal(stats.norm.ppf(area) * 2**0.5 * positive)


def _wide(random: np.random.Generator, area: float, positive: Array) -> Array:
    return random.normal(stats.norm.ppf(area) * 5**0.5 * positive, 1.0 + positive)


def _exponential(random: np.random.Generator, area: float, positive: Array) -> Array:
    return random.exponential(np.where(positive, area / (1 - area), 1.0))


SCORES: dict[str, Callable[[np.random.Generator, float, Array], Array]] = {
    "normal": _normal,
    "twice as wide": _wide,
    "exponential": _exponential,
}


def area_under_roc(positives: int, negatives: int, kind: str, area: float, runs: int) -> float:
    """Coverage of the AUROC's interval; NaN where there is none."""
    random = np.random.default_rng([positives, negatives, int(1000 * area)])
    positive = np.arange(positives + negatives) < positives
    names = np.arange(len(positive))
    found = [
        of.auroc_interval(SCORES[kind](random, area, positive), positive, names)
        for _ in range(runs)
    ]
    return float(np.mean([low <= area <= high for low, high in filter(None, found)] or [np.nan]))


def of_scores(
    metric: Callable[[Array, Array], float], people: int, area: float, runs: int
) -> float:
    """Coverage of the bootstrap of a metric of probabilities that are honest."""
    random = np.random.default_rng([people, int(1000 * area)])
    distance = stats.norm.ppf(area) * 2**0.5

    def drawn(size: int) -> tuple[Array, Array]:
        labels = random.permutation(np.arange(size) % 2)
        one = 1 / (1 + np.exp(-distance * random.normal(distance * (labels - 0.5))))
        return np.stack([1 - one, one], axis=1), labels

    true = metric(*drawn(2_000_000))
    hits = []
    for run in range(runs):
        probabilities, labels = drawn(people)
        low, high = of.bca(lambda c: metric(probabilities[c], labels[c]), people, run)  # noqa: B023
        hits.append(low <= true <= high)
    return float(np.mean(hits))


def calibration(people: int, stretch: float, spread: float, runs: int) -> tuple[float, float]:
    """Coverage of the intervals of a slope and of an intercept of 0."""
    random = np.random.default_rng([people, int(100 * stretch), int(spread)])
    slopes, intercepts = [], []
    for _ in range(runs):
        logits = random.normal(0, spread, people)
        labels = (random.random(people) < expit(logits)).astype(int)
        bounds = calibration_intervals(expit(logits / stretch), labels)
        if "slope" in bounds:  # classes that do not overlap have none
            slopes.append(bounds["slope"][0] <= stretch <= bounds["slope"][1])
        low, high = calibration_intervals(expit(logits), labels).get("intercept", (-1.0, 1.0))
        intercepts.append(low <= 0 <= high)
    return float(np.mean(slopes)), float(np.mean(intercepts))


def _ages(random: np.random.Generator, people: int) -> tuple[Array, Array]:
    true = random.normal(70, 8, people)
    return 70 + 0.7 * (true - 70) + random.normal(0, 5, people), true


def _ages_some_far_off(random: np.random.Generator, people: int) -> tuple[Array, Array]:
    true = random.normal(70, 8, people)
    return 70 + 0.7 * (true - 70) + 4 * random.standard_t(4, people), true


def _mmse(random: np.random.Generator, people: int) -> tuple[Array, Array]:
    true = 30 - np.minimum(random.exponential(4, people), 30)
    return 26 + 0.5 * (true - 26) + random.normal(0, 2.5, people), true


NUMBERS = {"ages": _ages, "ages, some far off": _ages_some_far_off, "MMSE": _mmse}


def of_numbers(kind: str, people: int, runs: int) -> dict[str, float]:
    """Coverage of each interval of told numbers that so many people have, one scan a person."""
    drawn, random = NUMBERS[kind], np.random.default_rng(people)
    true = numbers.evaluate(*drawn(np.random.default_rng(0), 2_000_000))
    names, hits = [str(number) for number in range(people)], dict[str, list[bool]]()
    for run in range(runs):
        for name, (low, high) in numbers.intervals(*drawn(random, people), names, run).items():
            hits.setdefault(name, []).append(low <= true[name] <= high)
    return {name: float(np.mean(own)) for name, own in hits.items()}


def report(runs: int) -> Iterator[str]:
    """Lines of a table: what, of how many people, coverage in percent."""
    for people in (6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200):
        low, high = shares(people)
        yield f"share {people}: {100 * low:.1f} to {100 * high:.1f}"
    for pair in ((3, 3), (4, 4), (5, 5), (8, 8), (4, 12), (15, 15), (10, 40), (50, 50), (100, 100)):
        low, high = balanced_accuracy(*pair)
        yield f"balanced accuracy {pair[0]} and {pair[1]}: {100 * low:.1f} to {100 * high:.1f}"
    for people in (15, 30, 60):
        chosen = ((0.55, 0.6, 0.7), (0.7, 0.7, 0.7), (0.9, 0.9, 0.9), (0.95, 0.5, 0.95))
        found = [mean_of_three(people, recalls, 4 * runs) for recalls in chosen]
        yield f"three recalls {people}: " + " ".join(f"{100 * value:.1f}" for value in found)
    sizes = (7, 7), (8, 10), (10, 8), (15, 15), (25, 25), (40, 50), (50, 40)
    for pair in (*sizes, (50, 50), (80, 100), (100, 80), (100, 100)):
        for kind in SCORES:
            found = [area_under_roc(*pair, kind, area, runs) for area in AREAS]
            yield f"AUROC {pair[0]} and {pair[1]}, {kind}: " + " ".join(
                f"{area:g}:{100 * value:.1f}" for area, value in zip(AREAS, found)
            )
    for people in (30, 40, 60, 100, 200):
        for spread in (1.0, 2.0, 3.0):
            found = [calibration(people, stretch, spread, runs) for stretch in (0.6, 1.0, 1.6)]
            yield f"calibration slope, intercept {people}, logits +- {spread:g}: " + " ".join(
                f"{100 * slope:.1f} {100 * intercept:.1f}" for slope, intercept in found
            )
    for name, metric in (("brier", brier), ("mcc", mcc)):
        for people in (80, 120, 160, 200):
            found = [of_scores(metric, people, area, max(runs // 4, 1)) for area in (0.7, 0.8, 0.9)]
            yield f"{name} {people}: " + " ".join(f"{100 * value:.1f}" for value in found)
    yield from report_of_numbers(runs)


def report_of_numbers(runs: int) -> Iterator[str]:
    """Likewise, of numbers that are told."""
    for kind in NUMBERS:
        for people in (50, 100, 200):
            covered = of_numbers(kind, people, runs)
            yield f"{kind} {people}: " + " ".join(
                f"{name}:{100 * value:.1f}" for name, value in covered.items()
            )


if __name__ == "__main__":
    for line in report(int(sys.argv[1]) if len(sys.argv) > 1 else 2000):
        print(line, flush=True)
