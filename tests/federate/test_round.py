"""Rounds as a whole: what is sent, what becomes of clients that fail, who takes part, what is analyzed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.federate.methods import METHODS
from fedsieve.federate.methods.fedavg import FedAvg
from fedsieve.federate.selection import SELECTIONS
from fedsieve.federate.selection.uniform import Uniform
from fedsieve.federate.transport import Transport
from fedsieve.federate.types import State, Task, Update
from fedsieve.model.flat import FlatModel
from fedsieve.observe.callbacks import Callback
from fedsieve.runs.model_file import load_classifier
from fedsieve.runs.read import read_metrics, read_result
from fedsieve.sieve.mask import Mask
from fedsieve.wire import Message, Vector, decode, encode
from listeners import Listener

Maker = Callable[..., Experiment]
ADAMW = "phases.*.local.optimizer=adamw"
HEADERS = 1000  # more bytes than the headers of one client's messages take


def edit(mask: str, rounds: int = 2) -> str:
    mask = mask if "file" in mask else f"sparsity: 0.9, calibration_rounds: 1, fisher: {{samples: 40}}, {mask}"
    local = "local: {epochs: 1, batch_size: 16, lr: 0.02}"
    return f"phases=[{{name: edit, train: backbone, rounds: {rounds}, {local}, mask: {{{mask}}}}}]"


def weights(folder: Path) -> Tensor:
    return FlatModel(load_classifier(folder)).vector


def without_seconds(folder: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read_metrics(folder)]


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("way", ["full", "delta"])
def test_bytes_are_those_of_the_messages(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Every message is counted, up once, and down once for each client that gets it; and nothing else is."""
    up, down = 0, {}
    encode_update, bring = Transport.encode_update, Transport.bring_up_to_date

    def counted_up(self, *arguments):
        nonlocal up
        encoded, residual = encode_update(self, *arguments)
        up += len(encoded.data)
        return encoded, residual

    def counted_down(self, clients, weights, traffic):
        nonlocal up
        for client in clients:
            seen = self.versions.last_seen(client)
            request = Message("request", {"client": float(client), "seen": float(seen)}, {})
            up += len(encode(request, self.layout).data) if way == "delta" else 0
            down[self.versions.now, seen] = len(self.broadcast(seen, weights).data)
        bring(self, clients, weights, traffic)

    monkeypatch.setattr(Transport, "encode_update", counted_up)
    monkeypatch.setattr(Transport, "bring_up_to_date", counted_down)
    settings = experiment(f"wire.broadcast={way}")
    result = run(settings, tmp_path / "run")
    lines, seen = read_metrics(tmp_path / "run"), {}
    assert result["bytes_up"] == up == sum(line["bytes_up"] for line in lines)
    context = RunContext(settings.resolved(), Callback())
    scopes = [context.model.scope(part).size for part in ("head", "head", "head", "all", "all")]
    for version, (line, size) in enumerate(zip(lines, scopes, strict=True)):  # each round makes one
        assert line["bytes_down"] == sum(down[version, seen.get(client, -1)] for client in line["clients"])
        assert way == "delta" or 3 * 4 * size < line["bytes_down"] < 3 * (4 * size + HEADERS)
        assert line["encodings"] == {"dense float32": 3}
        seen |= dict.fromkeys(line["clients"], version)


def test_masks_make_messages_small(experiment: Maker, tmp_path: Path) -> None:
    runs = {
        "own": "rule: smallest_magnitude",
        "shared": "scope: server",
        "seed": "rule: random",
        "union": "rule: random, refresh: epoch",
    }
    for name, mask in runs.items():
        local = "phases.0.local={epochs: 3, batch_size: 16, lr: 0.02}" if name == "union" else "seed=7"
        run(experiment(edit(mask), local), tmp_path / name)
    lines = {name: read_metrics(tmp_path / name) for name in runs}
    mask = Mask.load(tmp_path / "shared/masks/edit/shared.safetensors")
    values = 3 * 4 * mask.active
    for name in ("shared", "seed"):  # values and next to nothing else
        assert all(values < line["bytes_up"] < values + 3 * HEADERS for line in lines[name])
    assert lines["shared"][0]["encodings"] == {"known float32": 3}
    assert lines["seed"][0]["encodings"] == {"seed float32": 3}
    assert all("seed" not in name and "known" not in name for name in lines["own"][0]["encodings"])
    assert values + 3 * 1000 < lines["own"][0]["bytes_up"] < values + 3 * (mask.bits.numel() + HEADERS)
    assert lines["union"][0]["density"] == pytest.approx(1 - 0.9**3, abs=0.01)
    assert lines["union"][0]["bytes_up"] > 2.5 * values
    first = lines["shared"][0]["bytes_down"]
    assert first > 3 * mask.bits.numel() / 8  # the mask comes first, and the head with it


def test_making_a_federated_mask_is_counted(experiment: Maker, tmp_path: Path) -> None:
    run(
        experiment(edit("scope: federated").replace("calibration_rounds: 1", "calibration_rounds: 2")), tmp_path / "run"
    )
    first, second = read_metrics(tmp_path / "run")
    mask = Mask.load(tmp_path / "run/masks/edit/shared.safetensors")
    scores = 6 * 2 * 4 * mask.size  # all six clients, twice
    assert scores < first["bytes_up"] - second["bytes_up"] < scores + 20 * HEADERS
    assert first["mask_overlap"] == second["mask_overlap"] == 1.0
    assert second["bytes_down"] < 3 * (4 * mask.active + HEADERS)  # everybody has the rest


@pytest.mark.parametrize(
    ("scope", "method"),
    [
        ("server", "fedavg"),
        ("federated", "fedavg"),
        ("federated, refresh: round", "fedavg"),
        ("federated", "{fisher_mixing: {fisher: {samples: 5}}}"),
    ],
)
def test_who_failed_gets_everything_again(
    experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, method: str
) -> None:
    """A client that trusts only messages can decode each broadcast, and all that it needs for that is counted."""
    holders = set(range(6)) if "federated" in scope else set()  # of the mask, and the sum of scores
    again, costs, bring, extra = [], [], Transport.bring_up_to_date, Transport.send_extra
    totals: dict[str, Tensor] = {}

    def remembered(self, clients, name, values, traffic):
        totals[name] = values
        extra(self, clients, name, values, traffic)

    def checked(self, clients, weights, traffic):
        before = traffic.down
        bring_costs = sum(len(self.broadcast(self.versions.last_seen(client), weights).data) for client in clients)
        shared = self.masks.shared
        if shared is not None and len(clients) < 6:  # a round's, not what calibration or mixing sends to all
            line = read_metrics(tmp_path / "run")[-1:]
            holders.difference_update(int(one) for last in line for one in last["failed"])
            if "round" in scope:
                holders.update(clients)  # all made the new mask
            lacking = [client for client in clients if client not in holders]
            vectors = [("mask", "mask", Vector(bits=shared.bits))]
            vectors += [("scores", name, Vector(total)) for name, total in totals.items()]
            expected = 0
            for kind, name, vector in vectors if lacking else []:
                expected += len(lacking) * len(encode(Message(kind, {}, {name: vector}), self.layout).data)
            again.extend(lacking)
            holders.update(lacking)
            for client in clients:
                data = self.broadcast(self.versions.last_seen(client), weights).data
                decode(data, self.layout, "broadcast", {"weights": shared.bits})  # which it has by now
            costs.append(expected + bring_costs)
        bring(self, clients, weights, traffic)
        assert traffic.down - before == bring_costs

    monkeypatch.setattr(Transport, "send_extra", remembered)
    monkeypatch.setattr(Transport, "bring_up_to_date", checked)
    failures = ["clients.fail_rate=0.4", f"phases.*.method={method}", "clients.fraction=0.67", "evaluate.test=never"]
    run(experiment(edit(f"scope: {scope}", rounds=4).replace("40", "5"), *failures), tmp_path / "run")
    assert "round" in scope or len(again) > (len(set(again)) if scope == "server" else 0)
    if "round" not in scope:  # else calibration is part of each round
        assert [line["bytes_down"] for line in read_metrics(tmp_path / "run")][1:] == costs[1:]


@pytest.mark.parametrize("mask", [None, "rule: smallest_magnitude", "scope: server"])
def test_only_bytes_depend_on_how_weights_are_broadcast(experiment: Maker, tmp_path: Path, mask: str | None) -> None:
    changes = [] if mask is None else [edit(mask, rounds=3)]
    ways = {"full": ["wire.broadcast=full"], "delta": [], "packed": ["wire.compress=true"]}
    ways["bare"] = ["clients.have_backbone=false"]
    results = {name: run(experiment(*changes, *way), tmp_path / name) for name, way in ways.items()}
    assert len({result["model_sha256"] for result in results.values()}) == 1
    assert results["packed"]["bytes_down"] < results["delta"]["bytes_down"] <= results["full"]["bytes_down"]
    assert results["packed"]["bytes_up"] < results["delta"]["bytes_up"]
    context = RunContext(experiment().resolved(), Callback())
    met = set().union(*(line["clients"] for line in read_metrics(tmp_path / "bare")))
    backbone = context.model.scope("backbone").size
    more = results["bare"]["bytes_down"] - results["delta"]["bytes_down"]
    whole = 4 * backbone * len(met)  # but for what had changed before a client came, which the others get, too
    assert (0.4 if mask is None else 0.9) * whole < more <= whole + HEADERS


def test_rounded_values_have_their_true_effect(experiment: Maker, tmp_path: Path) -> None:
    """One client, one round: the server's weights move by the rounded difference, not by the difference."""
    one = ["clients.count=1", "clients.fraction=1.0", "phases.0.rounds=1", "phases.1.rounds=1", "phases.1.local.lr=0.0"]
    start = FlatModel(RunContext(experiment(*one).resolved(), Callback()).classifier).vector
    for values in ("float32", "float16", "bfloat16"):
        run(experiment(*one, f"wire.values={values}"), tmp_path / values)
    delta = weights(tmp_path / "float32") - start
    assert delta.abs().max() > 1e-3
    for values in ("float16", "bfloat16"):
        rounded = delta.to(getattr(torch, values)).float()
        assert (weights(tmp_path / values) - start - rounded).abs().max() < 1e-7 < (delta - rounded).abs().max()
        assert read_result(tmp_path / values)["bytes_up"] < 0.6 * read_result(tmp_path / "float32")["bytes_up"]


# ------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    "changes",
    [
        ["wire.values=int8"],
        ["phases.*.method={fisher_mixing: {fisher: {samples: 20}}}"],
        ["phases.1.optimizer_state=carry", "phases.0.optimizer_state=carry"],
        [edit("rule: random, refresh: round, momentum: carry", rounds=5), ADAMW, "phases.*.optimizer_state=carry"],
        [edit("scope: federated", rounds=5)],
        [edit("scope: federated, refresh: round", rounds=5)],
        [edit("scope: server", rounds=5), "clients.secure=zero_sum"],
        [edit("scope: server", rounds=5), "phases.*.method={fisher_mixing: {fisher: {samples: 20}}}"],
        [edit("rule: random, refresh: epoch, momentum: leak", rounds=5), "wire.values=int8", "clients.holdout=0.2"],
        ["clients.fail_rate=0.3"],
        ["evaluate.keep=best", "clients.select={high_loss: {candidates: 5}}"],
    ],
)
@pytest.mark.parametrize("stop_after", [1, 4])
def test_interrupted_and_resumed(experiment: Maker, tmp_path: Path, changes: list[str], stop_after: int) -> None:
    """The same model and the same metrics, whatever clients have to remember."""
    settings = experiment(*changes)
    whole = run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "parts", callback=Listener(stop_after))
    resumed = run(settings, tmp_path / "parts", resume=True)
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert without_seconds(tmp_path / "parts") == without_seconds(tmp_path / "whole")
    assert not (tmp_path / "parts/clients").exists()


def test_clients_that_remember_say_how_much(experiment: Maker, tmp_path: Path) -> None:
    listener = Listener()
    run(experiment("wire.values=int8"), tmp_path / "run", callback=listener)
    head, everything = 4 * (64 * 4 + 4), 4 * len(weights(tmp_path / "run"))
    said = [note for note in listener.notes if "remembers" in note]
    assert len(said) == 2 and f"{head / 1000:.1f} kB on disk" in said[0]
    assert f"all of them up to {(5 + 3 * 3) * everything / 1e6:.1f} MB" in said[1]
    for mask, numbers in (("null", 2), ("{sparsity: 0.5, rule: random, refresh: round, momentum: carry}", 3)):
        listener = Listener()
        changes = ["phases.1.optimizer_state=carry", "phases.1.train=head", f"phases.1.mask={mask}"]
        run(experiment(ADAMW, *changes), tmp_path / f"adamw-{numbers}", callback=listener)
        (note,) = (note for note in listener.notes if "remembers" in note)
        assert f"remembers {numbers * head / 1000:.1f} kB on disk" in note
    plain = Listener()
    run(experiment(), tmp_path / "plain", callback=plain)
    assert not [note for note in plain.notes if "remembers" in note]


# ---------------------------------------------------------------------------------------- failures


def test_clients_that_fail_are_left_out(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out is what the others alone would have made; all three kinds of failure occur."""
    listener, settings = Listener(), experiment("clients.fail_rate=0.4", "clients.fraction=1.0")
    run(settings, tmp_path / "failing", callback=listener)
    lines = read_metrics(tmp_path / "failing")
    failed = [set(map(int, line["failed"])) for line in lines]
    reasons = " ".join(reason for line in lines for reason in line["failed"].values())
    assert all(word in reasons for word in ("fail_rate", "checksum", "not finite"))
    assert len(listener.warnings) == sum(map(len, failed)) and "was left out" in listener.warnings[0]
    assert all(0 < len(one) < 6 for one in failed if one) and sum(map(len, failed)) >= 5

    remaining = iter([sorted(set(range(6)) - one) for one in failed])

    class TheOthers(Uniform):
        def among(self, losses: dict[int, float]) -> list[int]:
            return next(remaining)

    monkeypatch.setitem(SELECTIONS, "others", TheOthers)
    run(experiment("clients.fraction=1.0", "clients.select=others"), tmp_path / "others")
    assert torch.equal(weights(tmp_path / "failing"), weights(tmp_path / "others"))


@pytest.mark.parametrize("head", ["linear", "ridge"])
def test_too_few_replies_end_the_run(experiment: Maker, tmp_path: Path, head: str) -> None:
    settings = experiment("clients.fail_rate=0.5", "clients.minimum=3", f"model.head={head}", "clients.fraction=0.5")
    with pytest.raises(RunError, match=r"of [36] clients replied, fewer than clients\.minimum 3; client \d") as error:
        run(settings, tmp_path / "run")
    assert "phase " in str(error.value)
    lines = read_metrics(tmp_path / "run")
    saved = sorted((tmp_path / "run/checkpoints").iterdir())
    assert [path.stem for path in saved][-1] == f"{len(lines):08d}"  # the last good one
    assert not (tmp_path / "run/result.json").exists()


def test_a_client_that_raises_anything(experiment: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = read_first_clients(experiment, tmp_path)[0]

    class Broken(FedAvg):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            if task.data.client == client:
                raise ZeroDivisionError("no such thing")
            return super().train(task, mine)

    class Interrupted(FedAvg):
        def train(self, task: Task, mine: State) -> tuple[Update, State]:
            raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "broken", Broken)
    monkeypatch.setitem(METHODS, "interrupted", Interrupted)
    run(experiment("phases.0.method=broken"), tmp_path / "run")
    assert read_metrics(tmp_path / "run")[0]["failed"] == {str(client): "ZeroDivisionError: no such thing"}
    with pytest.raises(KeyboardInterrupt):  # a person's wish is no failure
        run(experiment("phases.0.method=interrupted"), tmp_path / "stopped")


def read_first_clients(experiment: Maker, tmp_path: Path) -> list[int]:
    run(experiment(), tmp_path / "first")
    return read_metrics(tmp_path / "first")[0]["clients"]


def test_weights_that_are_not_numbers_end_a_run_with_advice(experiment: Maker, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss became nan|became inf|not finite") as error:
        run(experiment("phases.0.local.lr=1e30", "phases.0.local.momentum=0.99"), tmp_path / "run")
    assert "lower phases.*.local.lr" in str(error.value)


@pytest.mark.parametrize("scope", ["server", "client"])
def test_an_exploded_loss_is_named_by_the_error_that_it_causes(experiment: Maker, tmp_path: Path, scope: str) -> None:
    """A head with outputs of 1e12 predicts one class for sure, so that no weight of the backbone matters."""
    listener = Listener()
    local = "local: {epochs: 1, batch_size: 16, weight_decay: 0.0, lr: %s}"
    mask = f"mask: {{sparsity: 0.9, calibration_rounds: 1, fisher: {{samples: 20}}, scope: {scope}}}"
    head = f"{{name: head, train: head, rounds: 2, {local % '1.0e+12'}}}"
    phases = f"phases=[{head}, {{name: edit, train: backbone, rounds: 1, {local % '0.02'}, {mask}}}]"
    with pytest.raises(RunError, match=r"phase edit.*cannot be told apart; the validation loss exploded to") as error:
        run(experiment(phases), tmp_path / "run", callback=listener)
    loss = read_metrics(tmp_path / "run")[1]["val_loss"]
    assert loss > 1e9 and f"{loss:.3g} in phase head, round 2: lower phases.*.local.lr" in str(error.value)
    assert "fisher.samples" not in str(error.value) and "\n" not in str(error.value)
    said = [note for note in listener.notes if "exploded" in note]
    assert len(said) == 1 and "lower phases.*.local.lr" in said[0]  # when it happens, and only once
    with pytest.raises(RunError, match="cannot be told apart; the validation loss exploded to"):
        run(experiment(phases), tmp_path / "run", resume=True)


def test_states_of_refused_replies_are_not_kept(experiment: Maker, tmp_path: Path) -> None:
    left: list[Path] = []

    class Look(Callback):
        def round(self, line: dict) -> None:
            left.extend((tmp_path / "run" / "clients").rglob(".*"))

    settings = experiment("clients.fail_rate=0.5", "clients.fraction=1.0", "wire.values=int8", "seed=9")
    run(settings, tmp_path / "run", callback=Look())
    assert any(line["failed"] for line in read_metrics(tmp_path / "run")) and not left


# --------------------------------------------------------------------------------------- selection


def test_high_loss_takes_the_candidates_that_do_worst(experiment: Maker, tmp_path: Path) -> None:
    settings = experiment(
        "clients.select={high_loss: {candidates: 4}}",
        "clients.split={kind: classes, per_client: 2}",
        "clients.fraction=0.34",
        "phases.1.rounds=1",
    )
    run(settings, tmp_path / "run")
    context = RunContext(settings.resolved(), Callback())
    lines = read_metrics(tmp_path / "run")
    first = lines[0]
    assert len(first["candidates"]) == 4 and len(first["clients"]) == 2
    losses = {}
    for client in map(int, first["candidates"]):
        own = context.training[context.partition.clients[client]]
        inputs = context.transform.evaluation(context.data.train.images[own])
        with torch.no_grad():
            scores = context.classifier.eval()(inputs)
        losses[client] = float(nn.functional.cross_entropy(scores, context.data.train.labels[own]))
        assert first["candidates"][str(client)] == pytest.approx(losses[client], rel=1e-4)
    assert first["clients"] == sorted(sorted(losses, key=losses.__getitem__)[-2:])
    assert first["samples_scored"] == sum(len(context.partition.clients[client]) for client in losses)
    plain = run(experiment("clients.fraction=0.34", "phases.1.rounds=1"), tmp_path / "plain")
    assert read_result(tmp_path / "run")["bytes_down"] > 1.5 * plain["bytes_down"]
    assert len({tuple(line["clients"]) for line in lines}) > 1


def test_by_size_prefers_who_has_more(experiment: Maker, tmp_path: Path) -> None:
    split = "clients.split={kind: dirichlet, alpha: 0.3, balanced: false}"
    settings = experiment(split, "clients.select=by_size", "clients.fraction=0.17", "phases.0.rounds=40")
    run(settings, tmp_path / "run")
    sizes = np.array([len(own) for own in RunContext(settings.resolved(), Callback()).partition.clients])
    drawn = [line["clients"][0] for line in read_metrics(tmp_path / "run")[:40]]
    assert sizes[drawn].mean() > 1.1 * sizes.mean()


# ---------------------------------------------------------------------------------------- analysis


def test_levels_of_analysis(experiment: Maker, tmp_path: Path) -> None:
    results = {
        level: run(experiment(f"analyze.level={level}"), tmp_path / level) for level in ("none", "basic", "blocks")
    }
    assert len({result["model_sha256"] for result in results.values()}) == 1
    none, basic, blocks = (read_metrics(tmp_path / level)[-1] for level in results)
    assert "cosine" not in none and none["drift_mean"] == basic["drift_mean"]
    assert basic["drift_max"] == max(basic["drift"].values()) and set(map(int, basic["drift"])) == set(basic["clients"])
    assert -1 <= basic["cosine"] <= 1 and 0 <= basic["opposed"] <= 1 and 0 <= basic["agreement"] <= 1
    assert set(blocks["blocks"]) == {"0", "1", "2", "rest"}
    assert {key: value for key, value in blocks.items() if key not in ("blocks", "seconds")} == {
        key: value for key, value in basic.items() if key != "seconds"
    }
