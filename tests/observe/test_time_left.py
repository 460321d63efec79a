"""The time left, by a clock that the tests set, against synthetic rounds whose durations are known."""

import pytest

from fedsieve.observe.time_left import Others, PhaseEstimate, TimeLeft, trimmed_ratio


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


HEAD, EDIT = PhaseEstimate("head", (0.05,) * 20, 10), PhaseEstimate("edit", (12.0, 12.0, 12.0), 10, end=1.0)


def played(left: TimeLeft, clock: Clock, phase: str, seconds: list[float], clients: int = 10, first: int = 1):
    """Do rounds that take so long; yields what is left after each reply of a client: (claimed, seconds played)."""
    left.enter(phase)
    for number, duration in enumerate(seconds, start=first):
        left.client(0, clients)
        for done in range(1, clients + 1):
            clock.now += duration / clients
            left.client(done, clients)
            yield left.seconds(), clock.now
        left.round(number)
        yield left.seconds(), clock.now


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])  # of the estimate, in the edit rounds
@pytest.mark.parametrize("head", [0.01, 0.05, 0.1])  # seconds of a head round
def test_twenty_head_and_three_edit_rounds_never_claim_a_small_part_of_the_truth(factor: float, head: float) -> None:
    clock = Clock()
    left = TimeLeft([HEAD, EDIT], clock=clock)
    claims = [(left.seconds(), clock.now)]
    claims += played(left, clock, "head", [head] * 20)
    claims += played(left, clock, "edit", [12.0 * factor] * 3)
    end = clock.now + 1.0 * factor  # the test after the last round
    for claimed, now in claims:
        truth = end - now
        assert claimed is not None and 0.5 * truth <= claimed <= 2 * truth + 1


def test_after_the_first_round_only_its_own_rounds_count() -> None:
    clock = Clock()
    left = TimeLeft([PhaseEstimate("all", (1.0,) * 10, 4)], clock=clock)
    assert left.seconds() == pytest.approx(10)
    *_, (claimed, _) = played(left, clock, "all", [3.0, 3.0, 3.0], clients=4)
    assert claimed == pytest.approx(7 * 3.0)
    left.client(0, 4)
    clock.now += 1.5
    left.client(2, 4)
    assert left.seconds() == pytest.approx(6.5 * 3.0)
    clock.now += 100.0  # a round that takes much longer
    assert left.seconds() == pytest.approx(6 * 3.0)


def test_a_round_without_clients() -> None:
    left = TimeLeft([PhaseEstimate("all", (1.0,) * 2, 0)], clock=Clock())
    left.client(0, 0)
    assert left.seconds() == pytest.approx(2)


def test_a_first_round_that_calibrates_masks_does_not_count_for_the_others() -> None:
    clock = Clock()
    left = TimeLeft([PhaseEstimate("edit", (5.0,) + (1.0,) * 9, 2)], clock=clock)
    claims = [claimed for claimed, _ in played(left, clock, "edit", [10.0, 2.0, 2.0], clients=2)]
    after_rounds = claims[2::3]
    assert after_rounds == pytest.approx([9 * 2.0, 8 * 2.0, 7 * 2.0])


def test_one_slow_round_changes_nothing() -> None:
    steady, odd = [(2.0, 1.0)] * 8, [(50.0, 1.0)]
    assert trimmed_ratio([*steady, *odd]) == trimmed_ratio(steady) == 2.0
    assert trimmed_ratio([(9.0, 1.0), (2.0, 1.0), (2.0, 1.0)]) == 2.0  # the first


def test_replies_of_the_first_round_correct_the_estimate() -> None:
    clock = Clock()
    left = TimeLeft([PhaseEstimate("all", (10.0,), 10)], clock=clock)
    claims = [claimed for claimed, _ in played(left, clock, "all", [100.0])][:-1]
    assert claims[0] < 40  # one reply says little
    assert claims[8] == pytest.approx(10, rel=0.2)  # nine of ten have replied


def test_a_phase_that_is_slower_than_estimated_makes_later_ones_longer() -> None:
    clock = Clock()
    phases = [PhaseEstimate("one", (10.0,) * 10, 2), PhaseEstimate("two", (10.0,) * 10, 2)]
    left = TimeLeft(phases, clock=clock)
    *_, (claimed, _) = played(left, clock, "one", [20.0] * 10, clients=2)
    assert 180 < claimed < 200  # 100 as estimated
    short = TimeLeft([PhaseEstimate("one", (0.01,), 2), phases[1]], clock=clock)
    *_, (claimed, _) = played(short, clock, "one", [0.1], clients=2)
    assert claimed == pytest.approx(100, rel=0.01)  # 0.1 seconds say little about 100


def test_a_resumed_run_counts_what_is_left() -> None:
    clock = Clock()
    left = TimeLeft([HEAD, EDIT], done=21, clock=clock)
    assert (left.phase, left.done) == (1, 1) and left.seconds() == pytest.approx(25.0)
    *_, (claimed, _) = played(left, clock, "edit", [24.0], first=2)
    assert claimed == pytest.approx(24.0 + 2.0)


def test_seeds_that_follow_are_counted_without_features() -> None:
    clock = Clock()
    phase = PhaseEstimate("head", (1.0,) * 4, 2, features=6.0)
    others = Others(left=2)
    left = TimeLeft([phase], others=others, clock=clock)
    assert left.seconds() == pytest.approx(10 + 2 * 4)
    clock.now += 6.0
    *_, (claimed, _) = played(left, clock, "head", [1.0, 1.0], clients=2)
    assert claimed == pytest.approx(2 + 2 * 4)
    list(played(left, clock, "head", [1.0, 1.0], clients=2, first=3))
    left.finished()
    others.left = 1
    assert others.took == [10.0]
    assert TimeLeft([phase], others=others, clock=clock).seconds() == pytest.approx(10 + 10)


def test_without_estimates_only_the_phase_is_known() -> None:
    clock = Clock()
    phases = [PhaseEstimate("head", (1.0,) * 5), PhaseEstimate("all", (1.0,) * 2)]
    left = TimeLeft(phases, is_timed=False, clock=clock)
    assert left.seconds() is None and not left.is_whole
    *_, (claimed, _) = played(left, clock, "head", [4.0, 4.0, 4.0])
    assert claimed == pytest.approx(2 * 4.0) and not left.is_whole
    list(played(left, clock, "head", [4.0, 4.0], first=4))
    assert left.seconds() is None and left.is_whole
    *_, (claimed, _) = played(left, clock, "all", [30.0])
    assert claimed == pytest.approx(30.0)


def test_the_test_after_the_last_round_counts_down() -> None:
    clock = Clock()
    left = TimeLeft([PhaseEstimate("all", (10.0,), 1, end=4.0)], clock=clock)
    list(played(left, clock, "all", [20.0], clients=1))
    assert left.seconds() == pytest.approx(8.0)
    clock.now += 6.0
    assert left.seconds() == pytest.approx(2.0)


def test_a_phase_may_end_early() -> None:
    clock = Clock()
    left = TimeLeft([HEAD, EDIT], clock=clock)
    list(played(left, clock, "head", [0.05] * 3))
    *_, (claimed, _) = played(left, clock, "edit", [12.0])
    assert left.phase == 1 and claimed == pytest.approx(25.0, rel=0.1)
