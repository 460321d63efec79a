"""How experiments of reports shrink, against figures worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from fedsieve.analysis.reproduce.plan import at_scale
from fedsieve.analysis.reproduce.scale import SCALES, scale_called, shrunken
from fedsieve.config.data_settings import DataSettings, ResizeCenterCrop
from fedsieve.config.experiment_file import load_experiment, preset_names, report_of
from fedsieve.config.partition_settings import ClassesSplit, IidSplit
from fedsieve.config.settings import option
from fedsieve.data.partition import split_clients
from fedsieve.data.sizes import KNOWN_SIZES, data_sizes
from fedsieve.errors import InputError

BY_HAND = [  # preset, scale, rounds of its phases, clients, clients in a round, classes of each
    ("001-table2-nc10-scenario-2", "full", [50, 100], 100, 10, 10),
    ("001-table2-nc10-scenario-2", "small", [5, 10], 20, 2, 10),
    ("001-table2-nc10-scenario-2", "smoke", [5, 10], 20, 2, 1),
    ("001-table2-nc50-j4", "smoke", [10, 5], 20, 2, 5),
    ("001-table2-nc5-j4", "smoke", [10, 5], 20, 2, 1),
    ("001-table1-baseline", "smoke", [5, 10], 1, 1, None),
    ("001-section4.5-fisher-mixing-nc5", "small", [10, 5], 20, 2, 5),  # a fifth of 50 could not hold 100 classes
    ("003-table1-fedavg-nc1", "small", [2], 100, 10, 1),
    ("002-figure3-noniid-j16", "small", [2], 20, 2, 50),
    ("002-figure3-noniid-j16", "smoke", [2], 20, 2, 5),
    ("003-table1-sparse-centralized", "smoke", [3, 3], 1, 1, None),
    ("003-figure5-secure", "smoke", [2], 30, 3, None),
    ("004-section5.4-fraction-0.5", "smoke", [10], 20, 10, 1),
    ("004-section5.4-fraction-0.2", "small", [10], 20, 4, 2),
]


@pytest.mark.parametrize(("preset", "scale", "rounds", "clients", "per_round", "classes"), BY_HAND)
def test_the_rule(
    preset: str, scale: str, rounds: list[int], clients: int, per_round: int, classes: int | None
) -> None:
    experiment = at_scale(preset, SCALES[scale])
    assert [phase.rounds for phase in experiment.phases] == rounds
    assert (experiment.clients.count, experiment.clients.per_round) == (clients, per_round)
    split = experiment.clients.split
    assert (split.per_client if isinstance(split, ClassesSplit) else None) == classes
    images, size = {"full": (None, 224), "small": (2000, 64), "smoke": (800, 32)}[scale]
    assert experiment.data.limit == images and experiment.data.image_size == min(
        size, load_experiment(preset).data.image_size or 0
    )


def test_what_is_not_shrunken_stays() -> None:
    """Learning rates, batches, local work and masks are compared in reports, so they are as reported at any scale."""
    for preset in ("001-table2-nc5-j4", "002-table4.3-fedavg-iid-edit", "004-table1-noniid-least-sensitive"):
        reported = load_experiment(preset)
        for scale in SCALES.values():
            experiment = at_scale(preset, scale)
            assert [phase.local for phase in experiment.phases] == [phase.local for phase in reported.phases]
            assert [phase.mask for phase in experiment.phases] == [phase.mask for phase in reported.phases]
            assert experiment.clients.weighting == reported.clients.weighting and experiment.expect == reported.expect


def test_full_scale_is_the_preset() -> None:
    for preset in ("000-section3.7-nc5-edit", "001-table2-nc5-j4", "004-section5.6-high-loss"):
        assert at_scale(preset, SCALES["full"]) == load_experiment(preset)


def test_candidates_and_crops_shrink_in_proportion() -> None:
    experiment = at_scale("004-section5.6-high-loss", SCALES["smoke"])
    assert option(experiment.clients.select) == "high_loss" and isinstance(experiment.clients.split, IidSplit)
    assert experiment.clients.select.high_loss.candidates == 4 and experiment.clients.per_round == 2
    crop = at_scale("000-section3.7-iid", SCALES["smoke"]).data.evaluate_crop
    assert isinstance(crop, ResizeCenterCrop) and crop.resize_center_crop.resize == 37  # 256 x 32 / 224 = 36.6


def test_what_a_person_says_wins_over_the_scale(images: Path) -> None:
    experiment = at_scale(
        "001-table2-nc5-j4", SCALES["smoke"], ["phases.1.rounds=40", "clients.count=7", "data.limit=null", "seed=9"]
    )
    assert [phase.rounds for phase in experiment.phases] == [10, 40]
    assert (experiment.clients.count, experiment.data.limit, experiment.seed) == (7, None, 9)
    assert (experiment.data.name, experiment.model.backbone) == ("digits", "pico")
    experiment = at_scale("001-table2-nc50-j4", SCALES["smoke"], ["data.name=npz", f"data.path={images}"])
    split = experiment.clients.split
    assert isinstance(split, ClassesSplit) and split.per_client == 2  # of its 4 classes


@pytest.mark.parametrize("report", sorted({report_of(name) or "" for name in preset_names()} - {""}))
@pytest.mark.parametrize("scale", ["smoke", "small"])
def test_every_preset_resolves_at_every_scale(report: str, scale: str) -> None:
    for name in (name for name in preset_names() if report_of(name) == report):
        assert at_scale(name, SCALES[scale]).resolved().data.limit == SCALES[scale].images


@pytest.mark.parametrize("scale", SCALES)
def test_every_preset_can_deal_its_data_at_every_scale(scale: str) -> None:
    classes, images = (10, 800) if scale == "smoke" else (100, 50_000 if scale == "full" else 2_000)
    labels = np.arange(images) % classes
    dealt = {}
    for name in (name for name in preset_names() if report_of(name)):
        clients = at_scale(name, SCALES[scale]).clients
        dealt[name] = (clients.count, clients.split)
    for name, (count, split) in {str(what): (name, what) for name, what in dealt.items()}.values():
        parts = split_clients(labels, classes, count, split, 42).clients
        assert len(parts.sizes) == count and parts.sizes.min() > 0, name


def test_known_sizes_are_those_of_the_data() -> None:
    from fedsieve.data.load import load

    data = load(DataSettings(name="digits"))
    assert KNOWN_SIZES["digits"] == (len(data.train), len(data.test), len(data.classes))
    assert data_sizes(DataSettings(name="digits", limit=99)) == (99, len(data.test), 10)


def test_shrinking_twice_is_possible_and_limits_only_fall() -> None:
    experiment = shrunken(load_experiment("001-table2-iid-j4", ["data.limit=50"]), SCALES["small"])
    assert experiment.data.limit == 50
    assert shrunken(experiment, SCALES["full"]) == experiment


def test_unknown_scale() -> None:
    with pytest.raises(InputError, match="--scale is 'tiny'; use smoke, small, full"):
        scale_called("tiny")
