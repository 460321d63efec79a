"""Clients that lie: messages in perfect form whose content is not true. Who tells them is left out, and named."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from fedsieve.config.schema import Experiment
from fedsieve.context import RunContext
from fedsieve.engine.client_runtime import ClientRuntime
from fedsieve.engine.kept import KeptInFolder
from fedsieve.engine.serial import Serial
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import RunError
from fedsieve.experiment import run
from fedsieve.experiment.prepare import prepare
from fedsieve.federate.norm_limit import WINDOW, NormLimit, Reply
from fedsieve.federate.secure_round import SecureUpdates
from fedsieve.federate.types import Answer, Job, Update
from fedsieve.federate.versions import Versions
from fedsieve.observe.callbacks import Callback
from fedsieve.phase import plan
from fedsieve.runs.checkpoint import Checkpoint, Progress
from fedsieve.runs.folder import RunFolder
from fedsieve.runs.read import read_metrics
from fedsieve.sieve.mask import Mask, packed
from fedsieve.wire import Message, Vector, WireError, decode, encode

Maker = Callable[..., Experiment]
Lie = Callable[[Message], Message]
LOCAL = "local: {steps: 2, batch_size: 16, lr: 0.02}"
SHARED = f"phases=[{{name: edit, train: backbone, rounds: 3, {LOCAL}, mask: {{sparsity: 0.9, rule: random, %s}}}}]"


class Liars(Serial):
    """An engine whose clients may lie: `lie` gives what arrives in the place of an answer."""

    def __init__(self, runtime: ClientRuntime, lie: Callable[[Job, Answer], Answer]) -> None:
        super().__init__(runtime)
        self.lie = lie
        self.told: list[Answer] = []  # of the clients that trained
        self.script: list[Answer] | None = None  # what they tell instead, one after another

    def map(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        for number, job in enumerate(jobs):
            if self.script is not None and job.do == "train":
                yield self.script[number]
                continue
            answer = self.lie(job, self.runtime.do(job))
            if job.do == "train":
                self.told.append(Answer(answer.about, bytes(answer.data)))
            yield answer


class Rounds:
    """The first round of a phase, to be done again and again, with what one of its clients sends altered."""

    def __init__(
        self, experiment: Experiment, folder: Path, lie: Callable[[Job, Answer], Answer] = lambda _, answer: answer
    ) -> None:
        experiment = experiment.resolved()
        configure_torch(experiment)
        context = RunContext(experiment, Callback())
        self.folder = RunFolder(folder, experiment, resume=False)
        self.folder.start()
        versions = Versions.at_start(context.model, experiment.clients.count, have_backbone=True)
        state, phases = Checkpoint(Progress(), context.model.vector.clone(), None, versions), plan(experiment, context)
        self.engine = Liars(ClientRuntime(context, phases, KeptInFolder(folder)), lie)
        self.server, _ = prepare(context, phases[0], state, self.folder, self.engine)
        self.transport, self.scope, self.sizes = self.server.transport, self.server.scope, self.server.sizes
        self.values = self.transport.settings.values
        self.before, self.seen, self.changed = self.now(), versions.seen.clone(), versions.changed.clone()
        self.warnings: list[str] = []
        self.server.warn = self.warnings.append
        self.line = self.server.round(1, 0)
        self.told, self.honest = self.engine.told, self.now()
        self.order = sorted(self.line["clients"], key=lambda client: -self.sizes[client])

    def now(self) -> Tensor:
        """The server's weights."""
        return self.scope.of(self.server.vector).clone()

    def again(self, lies: dict[int, Callable[[bytes], bytes]]) -> dict:
        """The round once more; the replies with these places in the order of arrival are others. Its line."""
        told = [Answer(one.about, bytearray(lies.get(n, bytes)(one.data))) for n, one in enumerate(self.told)]
        self.engine.script = told
        versions = self.transport.versions
        self.scope.put(self.server.vector, self.before)
        versions.seen, versions.changed, versions.now = self.seen.clone(), self.changed.clone(), 0
        self.warnings.clear()
        self.server.norms.clear()
        return self.server.round(1, 0)

    def altered(self, lie: Lie, values: str | None = None) -> Callable[[bytes], bytes]:
        """A true message decoded, altered in one thing, and encoded again."""

        def alter(data: bytes) -> bytes:
            message = decode(data, self.transport.layout, "update", self.transport.known(), self.transport.redraw)
            generator = torch.Generator().manual_seed(0)  # to round to 8 bits
            return bytes(encode(lie(message), self.transport.layout, values or self.values, generator=generator).data)

        return alter


def told(name: str, number: float) -> Lie:
    return lambda message: replace(message, numbers={**message.numbers, name: number})


def sent(change: Callable[[Vector], Vector], name: str = "delta") -> Lie:
    return lambda message: replace(message, vectors={**message.vectors, name: change(message.vectors[name])})


def without_client(rounds: Rounds, place: int) -> Tensor:
    """The average of all replies but one, by a plain loop over plain tensors."""
    total, weight = torch.zeros(len(rounds.before), dtype=torch.float64), 0.0
    for number, (client, answer) in enumerate(zip(rounds.order, rounds.told, strict=True)):
        if number != place:
            update = rounds.transport.decode_update(bytearray(answer.data), client, 1)
            where = update.positions(len(total))
            samples = float(rounds.sizes[client])
            total[slice(None) if where is None else where] += samples * update.vectors["delta"].double()
            weight += samples
    return (rounds.before.double() + total / weight).float()


def moved(vector: Vector, size: int) -> Vector:
    """As many values at other positions."""
    active = torch.zeros(size, dtype=torch.bool)
    active[: int(sum(int(byte).bit_count() for byte in vector.bits))] = True
    return Vector(vector.values, packed(active))


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("mask", ["scope: server", "scope: server, refresh: round", "scope: client"])
def test_nobody_changes_what_its_mask_freezes(experiment: Maker, tmp_path: Path, mask: str) -> None:
    """Other positions, all positions, or a few more: the others go on, and what is frozen keeps its bits."""
    rounds = Rounds(experiment(SHARED % mask), tmp_path / "run")
    size = rounds.scope.weights
    everything = torch.ones(size)
    masks = rounds.transport.masks
    own = masks.known(rounds.order[1], 1)
    more = Mask.pack(own.shapes, own.unpack() | (torch.arange(size) < 9))
    lies = {
        "other positions": sent(lambda vector: moved(vector, size)),
        "dense": sent(lambda _: Vector(everything)),
        "all positions": sent(lambda _: Vector(everything, Mask.full(own.shapes).bits)),
        "a few more": sent(lambda _: Vector(torch.ones(more.active), more.bits)),
        "none": sent(lambda _: Vector(torch.ones(0), Mask.empty(own.shapes).bits)),
    }
    if "client" in mask:
        seed = masks.seed_of(rounds.order[0], 1)
        lies["another client's seed"] = sent(lambda vector: Vector(vector.values, masks.drawn(seed).bits, seed=seed))
    expected = without_client(rounds, 1)
    for name, lie in lies.items():
        line = rounds.again({1: rounds.altered(lie)})
        assert list(line["failed"]) == [rounds.order[1]], name
        assert "mask" in line["failed"][rounds.order[1]] and "was left out" in rounds.warnings[0]
        torch.testing.assert_close(rounds.now(), expected, rtol=0, atol=1e-7)
    written_out = rounds.again({1: rounds.altered(sent(lambda vector: Vector(vector.values, vector.bits)))})
    assert not written_out["failed"] and torch.equal(rounds.now(), rounds.honest)  # the same in other words


def test_own_masks_have_the_number_of_weights_that_the_settings_allow(experiment: Maker, tmp_path: Path) -> None:
    """The server cannot know a mask made from a client's own data, but it knows how many weights are active."""
    mask = "rule: smallest_magnitude, draw: exact"
    rounds = Rounds(experiment((SHARED % mask).replace("rule: random, ", "")), tmp_path / "run")
    size = rounds.scope.weights
    allowed = round(0.1 * size)
    for count in (1, allowed - 1, allowed + 1, size):
        bits = packed(torch.arange(size) < count)
        line = rounds.again({0: rounds.altered(sent(lambda _, n=count, b=bits: Vector(torch.ones(n), b)))})
        assert f"changes {count} weights, and its mask leaves {allowed} active" in line["failed"][rounds.order[0]]


# ----------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("number", [1e300, 1.7e308, 1.0, 0.0, -3.0, 10.5, float("nan")])
def test_nobody_has_more_samples_than_it_was_dealt(experiment: Maker, tmp_path: Path, number: float) -> None:
    rounds = Rounds(experiment("clients.holdout=0.2"), tmp_path / "run")
    line = rounds.again({1: rounds.altered(told("samples", number))})
    assert "samples" in line["failed"][rounds.order[1]]
    torch.testing.assert_close(rounds.now(), without_client(rounds, 1), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("samples", "weight", "reason"),
    [(0, 1, "report 0 samples in total"), (1, 1, "report .* in total but have"), (None, -1, "positive")],
)
def test_hidden_sums_are_checked(
    experiment: Maker, tmp_path: Path, samples: int | None, weight: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients together report no samples, or another number than they have: one line, and nothing is aggregated."""
    encode_hidden = SecureUpdates.encode

    def lying(self, update, participant):
        self.weight_of = lambda _: weight
        return encode_hidden(self, replace(update, samples=update.samples if samples is None else samples), participant)

    monkeypatch.setattr(SecureUpdates, "encode", lying)
    with pytest.raises(RunError, match=f"phase head, round 1: .*{reason}.*nothing was aggregated"):
        Rounds(experiment("clients.secure=zero_sum"), tmp_path / "run")


# ------------------------------------------------------------------------------- numbers and values


def without(name: str) -> Lie:
    return lambda message: replace(message, numbers={k: v for k, v in message.numbers.items() if k != name})


def values(change: Callable[[Tensor], Tensor], name: str = "delta") -> Lie:
    return sent(lambda vector: replace(vector, values=change(vector.values)), name)


NUMBERS = {
    "a huge loss": told("train_loss", 1e308),
    "a negative loss": told("train_loss", -1.0),
    "a huge drift": told("drift", 1e308),
    "a drift far beyond the others": told("drift", 1e30),
    "no drift": without("drift"),
    "no loss": without("train_loss"),
    "another density": told("density", 0.5),
    "a huge density": told("density", 1e308),
    "a number nobody asked for": told("accuracy", 1.0),
    "integers": values(lambda delta: torch.full(delta.shape, 2**62)),
    "double precision": values(lambda delta: delta.double()),
    "values of 1e30": values(lambda delta: torch.full_like(delta, 1e30)),
    "values of 3e38": values(lambda delta: torch.full_like(delta, 3.4e38)),
    "one value of 1e9": values(lambda delta: delta.index_fill(0, torch.tensor([0]), 1e9)),
    "nothing": sent(lambda vector: Vector(bits=vector.bits)),
}


def test_whoever_lies_is_left_out_whenever_it_comes(experiment: Maker, tmp_path: Path) -> None:
    """First, between the others or last, in the first round of a phase, when nothing is known of its updates."""
    rounds = Rounds(experiment(SHARED % "scope: server"), tmp_path / "run")
    expected = [without_client(rounds, place) for place in range(3)]
    for number, (name, lie) in enumerate(NUMBERS.items()):
        for place in range(3) if name == "values of 1e30" else [number % 3]:
            line = rounds.again({place: rounds.altered(lie)})
            assert list(line["failed"]) == [rounds.order[place]], (name, place, line["failed"])
            torch.testing.assert_close(rounds.now(), expected[place], rtol=0, atol=1e-7)
            json.dumps(line, allow_nan=False)
    assert "norm" in rounds.again({0: rounds.altered(NUMBERS["values of 1e30"])})["failed"][rounds.order[0]]
    rounded = rounds.again({1: rounds.altered(lambda message: message, "bfloat16")})
    assert "bfloat16 instead of float32" in rounded["failed"][rounds.order[1]]
    assert torch.equal(rounds.again({}) and rounds.now(), rounds.honest)


def test_without_a_limit_weights_stay_finite(experiment: Maker, tmp_path: Path) -> None:
    rounds = Rounds(experiment("clients.norm_limit=null"), tmp_path / "run")
    with torch.no_grad():
        rounds.before[:5] = 1e38
    line = rounds.again({0: rounds.altered(values(lambda delta: torch.full_like(delta, 3e38)))})
    assert line["failed"] == {rounds.order[0]: "its weights are not finite"}
    line = rounds.again({0: rounds.altered(values(lambda delta: torch.full_like(delta, 2e38)))})
    assert not line["failed"] and torch.isfinite(rounds.now()).all()  # nobody asked for a limit
    assert rounds.server.norms == []


def test_the_limit_is_that_times_the_median() -> None:
    """Against sorting all norms so far; the first three are judged together, zeros never count."""

    def reply(norm: float) -> Reply:
        return Reply(Update(0, 1, {"delta": torch.tensor([norm])}, {"drift": norm}), norm, None)

    def taken(norms: list[float], before: list[float] = ()) -> list[float]:
        limit = NormLimit(10.0, before)
        return [one.norm for one, reason in limit.judged(map(reply, norms)) if reason is None]

    assert taken([1e9, 1.0, 2.0, 0.0, 21.0, 9.0]) == [1.0, 2.0, 0.0, 9.0]
    assert taken([1.0, 1e9]) == [1.0] and taken([1e9, 1.0]) == [1.0] and taken([1e9]) == [1e9]
    assert taken([0.0] * 5) == [0.0] * 5 and taken([0.0, 5.0, 0.0, 5.0]) == [0.0, 5.0, 0.0, 5.0]
    assert taken([11.0, 1e9], before=[1.0]) == [11.0] and taken([9.0, 11.0], before=[1.0]) == [9.0, 11.0]
    torch.manual_seed(0)
    norms = (torch.randn(900) * 2).exp().tolist()
    expected = list(norms[:0])
    for number, norm in enumerate(norms):
        usual = sorted(expected[-WINDOW:]) if len(expected) >= 3 else sorted(norms[:3])
        if number < 3 or norm <= 10 * usual[(len(usual) - 1) // 2]:
            expected.append(norm)
    assert max(norms[:3]) < 10 * sorted(norms[:3])[1] and len(expected) < 900
    assert taken(norms) == expected
    first, then = NormLimit(10.0, []), expected[:500]
    list(first.judged(map(reply, then)))
    assert len(first.norms) == WINDOW and taken(norms[600:], first.norms) == taken(norms[600:], then[-WINDOW:])


def test_who_is_left_out_does_not_depend_on_an_interruption(experiment: Maker, tmp_path: Path) -> None:
    class Stop(Callback):
        def round(self, line: dict) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

    settings = experiment("clients.norm_limit=1.05", "phases.0.local.schedule=constant", "evaluate.test=never")
    run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "parts", callback=Stop())
    run(settings, tmp_path / "parts", resume=True)
    whole, parts = ([line["failed"] for line in read_metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts and any(whole[2:])


def test_sums_that_no_samples_have(experiment: Maker, tmp_path: Path) -> None:
    rounds = Rounds(experiment("model.head=ridge", "phases=[]"), tmp_path / "run")
    classes, width = 4, 64
    lies = {
        "other labels": values(lambda sums: sums + 1, "targets"),
        "half a label": values(lambda sums: sums + torch.tensor([0.5, -0.5, 0, 0]), "targets"),
        "no squares": values(lambda gram: -gram, "gram"),
        "huge squares": values(lambda gram: gram * 1e300, "gram"),
        "one huge product": values(lambda gram: gram.index_fill(0, torch.tensor([1]), 1e30), "gram"),
        "one side": values(lambda gram: gram.view(width, width).triu().flatten(), "gram"),
        "huge sums": values(lambda sums: sums * 1e6, "features"),
        "huge products": values(lambda cross: cross * 1e6, "cross"),
        "float32": values(lambda gram: gram.float(), "gram"),
        "a metric": told("drift", 1.0),
    }
    for name, lie in lies.items():
        line = rounds.again({0: rounds.altered(lie)})
        assert list(line["failed"]) == [rounds.order[0]], name
        assert torch.isfinite(rounds.now()).all()

    def larger(message: Message) -> Message:
        """Features that are 1e4 times as large: possible, but not what others have."""
        powers = {"gram": 2, "cross": 1, "features": 1, "targets": 0}
        scaled = {n: replace(v, values=v.values * 1e4 ** powers[n]) for n, v in message.vectors.items()}
        return replace(message, vectors=scaled)

    line = rounds.again({0: rounds.altered(larger)})
    assert "the norm of its sums per sample is" in line["failed"][rounds.order[0]]
    assert rounds.scope.size == classes * (width + 1)


# -------------------------------------------------------------------------------- losses and scores


def test_losses_that_cannot_be(experiment: Maker, tmp_path: Path) -> None:
    """The highest of the candidates' losses count, unless they are none."""
    for wrong in (-1.0, 1e308, float("nan"), float("inf")):

        def lie(job: Job, answer: Answer, wrong: float = wrong) -> Answer:
            client = job.about.get("client")
            return Answer({"loss": wrong if client == 2 else 1.0 + client}) if job.do == "loss" else answer

        settings = experiment("clients.select={high_loss: {candidates: 6}}", "clients.fraction=0.34")
        rounds = Rounds(settings, tmp_path / f"run{wrong}", lie)
        assert list(rounds.line["failed"]) == [2] and rounds.line["clients"] == [4, 5]
        json.dumps(rounds.line, allow_nan=False)


def test_impossible_losses_do_not_lay_a_hidden_update_open(experiment: Maker, tmp_path: Path) -> None:
    """Where fewer than three clients are left, the sum over them would show what single ones sent."""

    def lie(job: Job, answer: Answer) -> Answer:
        return Answer({"loss": float("nan") if job.about["client"] < 2 else 1.0}) if job.do == "loss" else answer

    changes = ["clients.count=4", "clients.fraction=0.75", "clients.select={high_loss: {candidates: 4}}"]
    with pytest.raises(RunError, match=r"2 clients are left, and clients\.secure: zero_sum needs 3"):
        Rounds(experiment(*changes, "clients.secure=zero_sum"), tmp_path / "run", lie)


@pytest.mark.parametrize("wrong", [-1.0, 1e38, float("nan"), float("inf")])
def test_scores_that_cannot_be_end_the_run_with_one_line(experiment: Maker, tmp_path: Path, wrong: float) -> None:
    """All clients take part in scoring, so there are no others to go on with."""

    def lie(job: Job, answer: Answer) -> Answer:
        if job.do not in ("scores", "contribute") or job.about["client"] != 2:
            return answer
        scores = torch.frombuffer(bytearray(answer.data), dtype=torch.float32)
        scores[3] = wrong
        return Answer(answer.about, scores.view(torch.uint8).numpy())

    mask = (SHARED % "scope: federated, fisher: {samples: 5}").replace("rule: random", "calibration_rounds: 1")
    mixing = "phases.*.method={fisher_mixing: {dtype: float32, fisher: {samples: 5}}}"
    for number, changes in enumerate(([mask], [mixing], [mixing, "wire.values=float16"])):
        with pytest.raises(RunError, match="client 2 sent sensitivity scores that are negative, not finite or too"):
            Rounds(experiment(*changes), tmp_path / f"run{number}", lie)


# -------------------------------------------------------------------------------------- any lie at all

EXTREMES = (0.0, -1.0, 0.5, 1e-300, 2.0**53, 1e30, 3.4e38, 3.5e38, 1e308, 1.7e308, math.inf, -math.inf, math.nan)
HEAD = f"phases=[{{name: head, train: head, rounds: 3, {LOCAL}%s}}]"
KINDS = {
    "dense": [HEAD % ""],
    "one mask": [HEAD % ", mask: {sparsity: 0.9, rule: random, scope: server}"],
    "own masks": [HEAD % ", mask: {sparsity: 0.5, rule: smallest_magnitude}", "wire.values=float16"],
    "seeds": [HEAD % ", mask: {sparsity: 0.5, rule: random}", "clients.norm_limit=null"],
    "epochs": [HEAD % ", mask: {sparsity: 0.9, rule: random, refresh: epoch}", "wire.values=bfloat16"],
    "sums": ["model.head=ridge", "phases=[]", "clients.count=3"],
}


def any_number(random: Random, message: Message) -> Message:
    numbers = dict(message.numbers)
    name = random.choice([*numbers, "accuracy", ""])
    if random.random() < 0.2:
        numbers.pop(name, None)
    else:
        numbers[name] = random.choice([*EXTREMES, numbers.get(name, 0.0) + 1, numbers.get(name, 1.0) * 1e5])
    return replace(message, numbers=numbers)


def any_values(random: Random, message: Message) -> Message:
    name = random.choice(list(message.vectors))
    old = message.vectors[name].values
    one, extreme = torch.tensor([random.randrange(len(old))]), torch.tensor(random.choice(EXTREMES)).to(old.dtype)
    new = random.choice(
        [
            old * 10.0 ** random.uniform(-40, 40),
            old.index_fill(0, one, extreme),
            extreme.repeat(len(old)),
            -old,
            old.flip(0),
            torch.randint(-(2**62), 2**62, old.shape),
            old.double(),
            old.float(),
            old[:0],
        ]
    )
    return sent(lambda vector: replace(vector, values=new), name)(message)


def any_positions(random: Random, message: Message, rounds: Rounds) -> Message:
    """Other positions of the first vector, which it may have none of."""
    name, vector = next(iter(message.vectors.items()))
    weights = rounds.transport.layout.vectors[name].weights
    count = random.choice([0, 1, weights // 2, weights - 1, weights, round(0.1 * weights), round(0.5 * weights)])
    active = torch.zeros(weights, dtype=torch.bool)
    active[random.sample(range(weights), count)] = True
    bits = random.choice([packed(active), packed(active), vector.bits, None])
    length = weights if bits is None else sum(int(byte).bit_count() for byte in bits)
    seed = random.choice([None, None, random.randrange(2**63)]) if bits is not None else None
    return sent(lambda _: Vector(torch.full((length,), 0.01), bits, seed=seed), name)(message)


def any_vectors(random: Random, message: Message, rounds: Rounds) -> Message:
    name = random.choice(list(rounds.transport.layout.vectors))
    other = {name: Vector(torch.randn(rounds.transport.layout.vectors[name].size))}
    return replace(message, vectors=random.choice([other, {**message.vectors, **other}, {}]))


def any_lie(random: Random, rounds: Rounds) -> Callable[[bytes], bytes]:
    kind, values = random.choice(["update"] * 9 + ["scores", "broadcast"]), rounds.values
    if random.random() < 0.1:
        values = random.choice(["float32", "float16", "bfloat16", "int8"])
    lie = random.choice([any_number, any_values, any_values, any_positions, any_vectors])

    def tell(message: Message) -> Message:
        about = (rounds,) if lie in (any_positions, any_vectors) else ()
        return replace(lie(random, message, *about), kind=kind)

    return rounds.altered(tell, values)


def tell_lies(rounds: Rounds, count: int, seed: int) -> Counter[str]:
    """So many lies, one a round, by any of its clients; what became of them."""
    random, outcomes = Random(seed), Counter()
    others = [without_client(rounds, place) for place in range(3)] if "delta" in rounds.transport.replies else None
    shared = rounds.transport.masks.shared if rounds.transport.masks is not None else None
    while outcomes.total() < count:
        place, lie = random.randrange(3), any_lie(random, rounds)
        try:
            told = lie(rounds.told[place].data)
        except WireError:  # such a message cannot be made
            continue
        line = rounds.again({place: lambda _, told=told: told})
        after, liar = rounds.now(), rounds.order[place]
        assert set(line["failed"]) <= {liar} and torch.isfinite(after).all()
        json.dumps(line, allow_nan=False)
        if shared is not None:
            assert torch.equal(after[~shared.unpack()], rounds.before[~shared.unpack()])
        if line["failed"] and others is not None:
            torch.testing.assert_close(after, others[place], rtol=0, atol=1e-6)
        assert len(rounds.warnings) == len(line["failed"])
        changed = "taken, as it changes nothing" if torch.equal(after, rounds.honest) else "taken"
        reason = re.sub(r"[-\d.]+(e[+-]?\d+)?|\b(nan|inf)\b", "#", line["failed"].get(liar, changed))
        outcomes[f"left out: {reason}" if line["failed"] else changed] += 1
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_any_lie_is_left_out_or_harmless(experiment: Maker, tmp_path: Path, kind: str) -> None:
    """No lie ends the round, nor changes what is frozen, nor keeps the others' updates from being averaged."""
    outcomes = tell_lies(Rounds(experiment(*KINDS[kind], "clients.minimum=2"), tmp_path / "run"), 17, seed=1)
    assert sum(count for what, count in outcomes.items() if what.startswith("left out")) > 5


# ----------------------------------------------------------------------------------------- honesty

CARRIED = "phases.0.optimizer_state=carry"
MIXED = "phases.*.method={fisher_mixing: {fisher: {samples: 10}}}"


@pytest.mark.parametrize(
    "changes",
    [
        [SHARED % "scope: server, refresh: round, momentum: leak", CARRIED],
        [SHARED % "refresh: round, momentum: leak", CARRIED, "wire.values=float16"],
        [SHARED % "refresh: epoch, momentum: leak", CARRIED, "phases.0.local.steps=9"],
        [SHARED % "refresh: epoch, draw: bernoulli", "phases.0.local.steps=9"],
        [SHARED % "scope: server, refresh: round", MIXED],
        [(SHARED % "scope: server, dense: [head]").replace("train: backbone", "train: all"), MIXED],
        [SHARED % "refresh: once", MIXED],
        [SHARED % "unit: row, across: tensor, keep_alive: 3", "wire.values=int8"],
        [(SHARED % "unit: tensor").replace("rule: random", "rule: largest_magnitude")],
    ],
)
def test_honest_clients_are_never_left_out(experiment: Maker, tmp_path: Path, changes: list[str]) -> None:
    """Momentum that leaks and Fisher mixing change more weights than the mask of the round leaves active."""
    run(experiment(*changes, "clients.count=3", "clients.fraction=1.0", "evaluate.test=never"), tmp_path / "run")
    assert [line["failed"] for line in read_metrics(tmp_path / "run")] == [{}] * 3
