"""Every combination of parts is either allowed, or refused in one line that says what would work."""

from collections.abc import Callable

import pytest

from fedsieve.config.schema import Experiment
from fedsieve.errors import InputError
from matrix import CHOICES, all_combinations, covering, pairs_of, refusal, settings_of

BASE = {
    "clients": {"count": 6, "fraction": 0.5},
    "phases": [{"name": "one", "train": "all", "rounds": 2, "local": {"steps": 2, "lr": 0.1}}],
}
Maker = Callable[..., Experiment]


def test_all_combinations() -> None:
    found = {one: refusal(settings_of(one, BASE)) for one in all_combinations()}
    for one, why in found.items():
        assert why is None or ("\n" not in why and ("; use " in why or "; set " in why)), (one, why)
    allowed = [one for one, why in found.items() if why is None]
    assert len(allowed) > len(found) / 4
    for place, names in enumerate(CHOICES.values()):  # nothing is refused in all its combinations
        assert {one[place] for one in allowed} == set(names)


def test_the_covering_has_every_allowed_pair() -> None:
    allowed = [one for one in all_combinations() if refusal(settings_of(one, BASE)) is None]
    few = covering(allowed)
    assert set().union(*map(pairs_of, few)) == set().union(*map(pairs_of, allowed))
    assert len(few) < len(allowed) / 20


ZERO_SUM = "clients.secure=zero_sum"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["phases.0.method=fedpro"], "method is 'fedpro'; use fedavg or fedprox or scaffold or fednova or"),
        (
            ["phases.0.method={fedprox: {mu: -0.1}}"],
            "method.fedprox.mu is -0.1; it should be greater than or equal to 0",
        ),
        (["phases.0.aggregate={trimmed_mean: {share: 0.5}}"], "share is 0.5; it should be less than 0.5"),
        (["phases.0.aggregate={trimmed_mean: {share: -0.1}}"], "share is -0.1; it should be greater than or equal to"),
        (["phases.0.method=scaffold"], "scaffold does not go with local.momentum above 0: .* set local.mom"),
        (["phases.0.server_optimizer={sgd: {lr: 0}}"], "server_optimizer.sgd.lr is 0; it should be greater than 0"),
        (["phases.0.server_optimizer={adam: {lr: 0.0}}"], "server_optimizer.adam.lr is 0.0; it should be greater"),
        (["phases.0.server_optimizer={adam: {beta2: 1.0}}"], "beta2 is 1.0; it should be less than 1"),
        (["phases.0.server_optimizer=momentum"], "is 'momentum'; use sgd or adam or yogi or adagrad"),
        ([ZERO_SUM, "phases.0.aggregate=median"], "median does not go with clients.secure: zero_sum: it needs single"),
        ([ZERO_SUM, "phases.0.method=fisher_mixing"], "fisher_mixing does not go with clients.secure: zero_sum: it"),
        (["phases.0.method=fednova", "phases.0.optimizer_state=carry"], "go with optimizer_state: carry: .*reset"),
        (
            ["phases.0.method=fednova", "phases.0.aggregate=active", "phases.0.mask={sparsity: 0.5, rule: random}"],
            "fednova does not go with an aggregate other than mean under clients' own masks: tau would differ",
        ),
        (["phases.0.stop={}"], "phases.0.stop: give target .* or patience"),
        (["phases.0.stop={target: 1.2}"], "phases.0.stop.target is 1.2; it should be less than or equal to 1"),
        (["phases.0.stop={patience: 3}", "data.validation=0.0"], "stop goes by validation accuracy; set data.valid"),
    ],
)
def test_bad_input(changes: list[str], message: str, experiment: Maker) -> None:
    with pytest.raises(InputError, match=message) as caught:
        experiment(*changes)
    assert "\n" not in str(caught.value)


def test_settings_that_are_the_default_are_written_as_the_name(experiment: Maker) -> None:
    for same in ("sgd", "{sgd: {}}", "{sgd: {lr: 1.0, momentum: 0.0}}", "{sgd: {lr: 1}}"):
        assert experiment(f"phases.0.server_optimizer={same}").phases[0].server_optimizer == "sgd"
    changed = experiment("phases.0.server_optimizer={sgd: {momentum: 0.9}}").phases[0].server_optimizer
    assert changed.model_dump() == {"sgd": {"lr": 1.0, "momentum": 0.9}}
