"""FedProx: what mu does. (Its steps are compared with plain torch in test_against_a_notebook.py.)"""

from collections.abc import Callable
from pathlib import Path

from fedsieve.config.schema import Experiment
from fedsieve.experiment import run
from fedsieve.runs.read import read_metrics

Maker = Callable[..., Experiment]
MASK = "phases.1.mask={sparsity: 0.5, rule: random}"


def test_without_mu_it_is_fedavg_to_the_bit(experiment: Maker, tmp_path: Path) -> None:
    results = [
        run(experiment(MASK, f"phases.*.method={method}"), tmp_path / str(number))
        for number, method in enumerate(("fedavg", "{fedprox: {mu: 0.0}}"))
    ]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]


def test_the_larger_mu_the_less_clients_drift(experiment: Maker, tmp_path: Path) -> None:
    drifts = []
    for mu in (0.0, 10.0, 60.0):
        run(experiment(MASK, f"phases.*.method={{fedprox: {{mu: {mu}}}}}"), tmp_path / str(mu))
        drifts.append(read_metrics(tmp_path / str(mu))[3]["drift_mean"])
    assert drifts[0] > 1.02 * drifts[1] and drifts[1] > 1.02 * drifts[2]
