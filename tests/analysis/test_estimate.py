"""What an experiment computes, counted in advance, against a loop over its rounds and clients."""

import pytest
import torch

from fedsieve.analysis.estimate import Estimator, Speed, estimated, measured_speed, work_of
from fedsieve.analysis.reproduce.foretell import estimates_of
from fedsieve.analysis.reproduce.plan import choose, make_plan
from fedsieve.analysis.reproduce.scale import SCALES
from fedsieve.config.experiment_file import load_experiment, parse_experiment
from fedsieve.config.schema import Experiment

SPEED = Speed(trained=0.01, seen=0.003, head_step=0.0001, weights=1000, blocks=12)
FEDERATED = """
data: {name: digits, limit: 1000, validation: 0.2}
clients: {count: 20, fraction: 0.1}
phases:
  - {name: head, train: head, rounds: 6, local: {epochs: 2, batch_size: 10, lr: 0.1}}
  - {name: all, train: all, rounds: 5, local: {steps: 3, batch_size: 16, lr: 0.1}}
"""


def counted(experiment: Experiment, held: int, validation: int, test: int) -> list[tuple[int, int, int]]:
    """Of each phase images trained on, images evaluated, and steps, one by one."""
    phases = []
    for phase in experiment.phases:
        trained = seen = steps = 0
        local = phase.local
        for _ in range(phase.rounds):
            for _ in range(experiment.clients.per_round):
                for _ in range(local.epochs or 0):
                    trained += held
                    steps += len(range(0, held, local.batch_size))
                for _ in range(local.steps or 0):
                    trained += local.batch_size
                    steps += 1
            seen += validation
        phases.append((trained, seen + test, steps))
    return phases


def test_work_is_what_a_loop_counts() -> None:
    experiment = parse_experiment(FEDERATED)
    work = work_of(experiment)
    in_all = [
        (
            phase.images * phase.replies * len(phase.seen),
            sum(phase.seen) + phase.test,
            phase.steps * phase.replies * len(phase.seen),
        )
        for phase in work
    ]
    expected = counted(experiment, 40, 200, 359)
    last = expected[-1]
    assert in_all == [expected[0], (last[0], last[1] + 200, last[2])]  # the validation set once more at the end
    assert [phase.is_on_features for phase in work] == [True, False]
    assert work[0].computed_once == 1000 + 359


def test_masks_and_mixing_are_counted() -> None:
    def scored(mask: str, *more: str) -> tuple[float, ...]:
        changes = [f"phases.1.mask={{sparsity: 0.9, {mask}}}", *more]
        return work_of(parse_experiment(FEDERATED, "f", changes))[1].scored

    assert scored("rule: random") == (0,) * 6
    assert scored("scope: server, calibration_rounds: 3, fisher: {samples: 64}") == (3 * 64, 0, 0, 0, 0, 0)
    assert scored("scope: federated, calibration_rounds: 2") == (2 * 20 * 40, 0, 0, 0, 0, 0)
    assert scored("refresh: round, calibration_rounds: 1") == (0, *(5 * [2 * 40]))
    new = [2 * 0.9**before for before in range(5)]  # clients that are drawn for the first time, on average
    assert scored("calibration_rounds: 1") == pytest.approx((0, *(40 * one for one in new)))
    mixing = scored("rule: random", "phases.*.method={fisher_mixing: {fisher: {samples: 16}}}")
    assert mixing == (20 * 16, 0, 0, 0, 0, 0)


def test_rounds_without_evaluation_are_shorter() -> None:
    work = work_of(parse_experiment(FEDERATED, "f", ["evaluate.every=2", "evaluate.sample=50"]))[1]
    assert work.seen == (0, 50, 0, 50, 50)
    rounds = estimated(work, SPEED, 1).rounds
    assert rounds[0] == rounds[2] and rounds[1] - rounds[0] == pytest.approx(50 * SPEED.seen)


def test_augmented_images_are_features_only_for_evaluation() -> None:
    head, _ = work_of(parse_experiment(FEDERATED, "f", ["data.augment=[horizontal_flip]"]))
    assert not head.is_on_features and head.images == 80
    phase = estimated(head, SPEED, 1)
    assert phase.rounds[0] == pytest.approx(2 * 80 * SPEED.seen, rel=0.1) and phase.features > 0


def test_few_images_of_a_class_are_few_to_train_on() -> None:
    own, full = (work_of(load_experiment(f"004-table1-noniid-random{end}"))[-1] for end in ("", "-full-split"))
    assert own.images == 4 * 8 and full.images == 4 * 400


def test_blocks_that_stand_still_are_computed_once() -> None:
    whole, last = (
        estimated(work_of(parse_experiment(FEDERATED, "f", [f"phases.1.train={part}"]))[1], SPEED, 1)
        for part in ("all", "{blocks: [-1, -2, -3]}")
    )
    assert whole.features == 0 and last.features == pytest.approx(1359 * 0.75 * SPEED.seen)
    assert last.rounds[0] == pytest.approx(whole.rounds[0] / 4, rel=0.1)


def test_workers_share_clients_but_not_one_client() -> None:
    work = work_of(parse_experiment(FEDERATED))[1]
    one, two, many = (sum(estimated(work, SPEED, workers).rounds) for workers in (1, 2, 16))
    assert two == pytest.approx(one / 2, rel=0.1)
    assert many > two - 5 * 200 * SPEED.seen / 2  # two clients a round: only evaluation gets quicker


def test_features_are_counted_in_the_first_phase_that_needs_them() -> None:
    trained = ("head", "head", "all", "head")  # after the ridge head
    phases = [f"{{name: p{n}, train: {part}, rounds: 1, local: {{steps: 1, lr: 1}}}}" for n, part in enumerate(trained)]
    settings = load_experiment("digits-iid", [f"phases=[{', '.join(phases)}]", "model.head=ridge"])
    assert [phase.features > 0 for phase in Estimator().phases(settings)] == [True, False, False, False, True]


def test_speed_is_measured_without_weights_at_hand_and_changes_nothing() -> None:
    """The reported backbone cannot be downloaded here, but its time does not depend on its weights."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    speed = measured_speed("facebook/dino-vits16", 32, "cpu", threads=1)
    assert min(speed.seen, speed.trained, speed.head_step) > 0 and speed.blocks == 12
    assert 21e6 < speed.weights < 23e6
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)


def test_features_are_counted_once() -> None:
    plan = make_plan("003", choose("003", None, ["table1-fedavg-nc1", "table1-fedavg-nc50"]), SCALES["smoke"], seeds=1)
    first, second = estimates_of(plan).values()
    assert first.left == second.left == 1 and first.seconds > second.seconds
