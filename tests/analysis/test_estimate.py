"""What an experiment computes, counted in advance, against a loop over its rounds and clients."""

import pytest

from fedsieve.analysis.estimate import SENSITIVITY, Speed, measured_speed, seconds_for, work_of
from fedsieve.analysis.reproduce.foretell import estimates_of
from fedsieve.analysis.reproduce.plan import choose, make_plan
from fedsieve.analysis.reproduce.scale import SCALES
from fedsieve.config.experiment_file import load_experiment, parse_experiment
from fedsieve.config.schema import Experiment

FEDERATED = """
data: {name: digits, limit: 1000, validation: 0.2}
clients: {count: 20, fraction: 0.1}
phases:
  - {name: head, train: head, rounds: 6, local: {epochs: 2, batch_size: 10, lr: 0.1}}
  - {name: all, train: all, rounds: 5, local: {steps: 3, batch_size: 16, lr: 0.1}}
"""


def counted(experiment: Experiment, held: int, validation: int, test: int) -> tuple[int, int, int]:
    """Images trained on, images evaluated, and steps of the head, one by one."""
    trained = seen = steps = 0
    for phase in experiment.phases:
        for _ in range(phase.rounds):
            for _ in range(experiment.clients.per_round):
                local = phase.local
                own = sum(held for _ in range(local.epochs or 0)) + sum(
                    local.batch_size for _ in range(local.steps or 0)
                )
                if phase.train == "head":
                    steps += own // local.batch_size
                else:
                    trained += own
            seen += 0 if phase.train == "head" else validation
        seen += 0 if phase.train == "head" else test
    return trained, seen, steps


def test_work_is_what_a_loop_counts() -> None:
    experiment = parse_experiment(FEDERATED)
    work = work_of(experiment)
    trained, seen, steps = counted(experiment, 40, 200, 359)
    assert (work.trained, work.seen, work.head_steps, work.rounds) == (trained, seen, steps, 11)
    assert work.features == 1000 + 359


def test_masks_and_mixing_are_counted() -> None:
    dense = work_of(parse_experiment(FEDERATED)).trained

    def scored(mask: str, *more: str) -> float:
        found = work_of(parse_experiment(FEDERATED, "f", [f"phases.1.mask={{sparsity: 0.9, {mask}}}", *more]))
        return (found.trained - dense) / SENSITIVITY

    assert scored("rule: random") == 0
    assert scored("scope: server, calibration_rounds: 3, fisher: {samples: 64}") == pytest.approx(3 * 64)
    assert scored("scope: federated, calibration_rounds: 2") == pytest.approx(2 * 20 * 40)
    assert scored("refresh: round, calibration_rounds: 1") == pytest.approx(5 * 2 * 40)
    expected = 20 * (1 - 0.9**5) * 40  # clients that are drawn at least once in five rounds, on average
    assert scored("calibration_rounds: 1") == pytest.approx(expected)
    mixing = scored("rule: random", "phases.*.method={fisher_mixing: {fisher: {samples: 16}}}")
    assert mixing == pytest.approx(20 * 16)


def test_augmented_images_are_never_features() -> None:
    work = work_of(parse_experiment(FEDERATED, "f", ["data.augment=[horizontal_flip]"]))
    assert work.features == 0 and work.head_steps == 0 and work.trained == 6 * 2 * 80 + 5 * 2 * 48


def test_few_images_of_a_class_are_few_to_train_on() -> None:
    own, full = (work_of(load_experiment(f"004-table1-noniid-random{end}")) for end in ("", "-full-split"))
    assert own.trained == 100 * 10 * 4 * 8 and full.trained == 100 * 10 * 4 * 400


def test_seconds_grow_with_work_and_shrink_with_threads() -> None:
    work, speed = work_of(parse_experiment(FEDERATED)), Speed(trained=0.01, seen=0.003, head_step=0.0001)
    heavy = work.trained * 0.01 + work.seen * 0.003 + work.head_steps * 0.0001
    assert seconds_for(work, speed, 1) - seconds_for(work, speed, 4) == pytest.approx(0.75 * heavy)


def test_speed_is_measured_without_weights_at_hand() -> None:
    """The reported backbone cannot be downloaded here, but its time does not depend on its weights."""
    speed = measured_speed("facebook/dino-vits16", 32, "cpu")
    assert min(speed.seen, speed.trained, speed.head_step) > 0


def test_features_are_counted_once() -> None:
    plan = make_plan("003", choose("003", None, ["table1-fedavg-nc1", "table1-fedavg-nc50"]), SCALES["smoke"], seeds=1)
    first, second = estimates_of(plan).values()
    assert first.left == second.left == 1 and first.seconds > second.seconds
