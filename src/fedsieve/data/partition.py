"""Who holds which samples.

Most splits here decide one matrix, how many samples each client gets of each class, and leave the
rest to `_deal`. To add a split, write a function with the signature of `split_iid` and a docstring
that names its paper, and name it in `SPLITS` (`data/__init__.py`).
"""

import difflib
import inspect
import io
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from fedsieve.data import SPLITS
from fedsieve.data.parts import Parts
from fedsieve.errors import InputError
from fedsieve.randomness import numpy_generator

if TYPE_CHECKING:
    from fedsieve.config.partition_settings import ClassesSplit, DirichletSplit, FlwrSplit, IidSplit

AT_A_TIME = 4096  # clients whose random numbers, one for each class, are held at once


@dataclass(frozen=True)
class Split:
    """The sorted positions of each client's samples, and what a person should be told about them."""

    clients: Parts
    notes: list[str]


def split_clients(labels: np.ndarray, classes: int, count: int, settings: Any, seed: int) -> Split:
    """Divide samples with these `labels` among `count` clients: no sample twice, no client empty.

    `settings` is one of the splits of an experiment file, such as `ClassesSplit`. Only classes that have
    samples take part: nobody is given a class with nothing in it.
    """
    n = len(labels)
    if count > n:
        raise InputError(f"clients.count is {count:,}, but there are only {n:,} samples; use at most {n:,}")
    present = np.flatnonzero(np.bincount(labels, minlength=classes))
    labels = np.searchsorted(present, labels)  # renumbered 0, 1, … without gaps
    if settings.kind not in SPLITS:
        raise InputError(f"clients.split: '{settings.kind}' is a plugin's, and no plugin that has it is loaded here")
    split = SPLITS[settings.kind](labels, len(present), count, settings, numpy_generator(seed, "split"))
    if not isinstance(split, Split):
        split = _users_split(split, n, count, settings.kind)
    if empty := int((split.clients.sizes == 0).sum()):
        left = f"clients.count is {count:,}, which leaves {_many(empty, 'client')} without samples"
        raise InputError(f"{left}; use fewer clients or other settings in clients.split")
    return split


def _users_split(found: Sequence[Any], samples: int, count: int, kind: str) -> Split:
    """The split that a user's function gives, an array of positions for each client; checked."""
    try:
        parts = [np.asarray(one).reshape(-1) for one in found]
    except (TypeError, ValueError):
        raise InputError(f"clients.split: {kind} gives {type(found).__name__}; expected a list of arrays") from None
    if len(parts) != count:
        raise InputError(f"clients.split: {kind} gives {len(parts)} arrays; expected one for each of {count:,} clients")
    if any(len(one) and one.dtype.kind not in "iu" for one in parts):
        raise InputError(f"clients.split: {kind} gives numbers that are not whole; expected positions of samples")
    clients = Parts.of(np.sort(one.astype(np.int64)) for one in parts)
    positions = clients.positions
    if len(positions) and not (positions.min() >= 0 and positions.max() < samples):
        raise InputError(f"clients.split: {kind} gives positions outside of 0 to {samples - 1:,}")
    holders = np.bincount(positions, minlength=samples)
    if holders.max() > 1:
        raise InputError(f"clients.split: {kind} gives sample {holders.argmax()} to two clients; expected at most one")
    left = int((holders == 0).sum())
    return Split(clients, [f"left out: {_many(left, 'sample')} that {kind} gives to nobody"] if left else [])


def split_iid(labels: np.ndarray, classes: int, count: int, settings: "IidSplit", generator: Generator) -> Split:
    """Shuffle, then cut into parts whose sizes differ by at most one (McMahan et al. 2017, arXiv:1602.05629)."""
    return Split(Parts.by_owner(generator.permutation(len(labels)) % count, count), [])


def split_classes(
    labels: np.ndarray, classes: int, count: int, settings: "ClassesSplit", generator: Generator
) -> Split:
    """Each client holds `per_client` distinct classes.

    `assign: even` is the pathological split of McMahan et al. 2017 (arXiv:1602.05629) without its accidents:
    every class is held by as many clients as any other, give or take one, and the clients' sizes are as near
    to each other as the class sizes allow. `assign: random` is the "#C = k" split of Li et al. 2022
    (arXiv:2102.02079): clients draw their classes independently, a class is dealt evenly to those who drew it,
    and classes nobody drew are left out; of a class with fewer samples than holders, some holders get none.
    `per_class_limit` then caps what a client takes of a class; what is above it is left out.
    """
    sizes, per_client, limit = np.bincount(labels), settings.per_client, settings.per_class_limit
    if per_client > classes:
        only = f"clients.split.per_client is {per_client}, but there are only {classes} classes"
        raise InputError(f"{only}; use at most {classes}")
    if settings.assign == "even":
        holds = _hold_evenly(sizes, count, per_client, generator)
        # One sample for each holder comes first, so that balancing cannot take a class away from anyone.
        counts = holds + _round(_balance(holds, sizes - holds.sum(axis=0)))
    else:
        some = (min(AT_A_TIME, count - first) for first in range(0, count, AT_A_TIME))
        holds = np.concatenate([_largest(generator.random((rows, classes)), per_client) for rows in some])
        counts = _round(holds * (sizes / np.maximum(holds.sum(axis=0), 1)))
    notes = []
    undrawn = sizes[~holds.any(axis=0)]
    if undrawn.size:
        notes.append(f"left out: {_many(undrawn.sum(), 'sample')} of {_many(undrawn.size, 'class')} nobody drew")
    if limit is not None and (over := np.maximum(counts - limit, 0)).any():
        notes.append(f"left out: {_many(over.sum(), 'sample')} above clients.split.per_class_limit, {limit:,}")
        counts = counts - over
    return _deal(labels, counts, notes, generator)


def split_dirichlet(
    labels: np.ndarray, classes: int, count: int, settings: "DirichletSplit", generator: Generator
) -> Split:
    """Class proportions from a Dirichlet distribution; a smaller `alpha` or `concentration` makes clients differ more.

    `balanced: true` is Hsu et al. 2019 (arXiv:1909.06335): client i draws q_i ~ Dir(concentration * p) over the classes
    and then samples by q_i without replacement; all clients are equally large. p are the class frequencies. `alpha` is
    concentration over the number of classes: Dir(alpha, …, alpha) if they are equally large. Clients draw one after
    another and the last get what the others left, unless `per_client` leaves plenty for everybody.
    `balanced: false` is Yurochkin et al. 2019 (arXiv:1905.12022), and what Flower, PFLlib and FL-bench do: class c is
    spread over the clients by p_c ~ Dir(alpha, …, alpha), one entry per client, so the sizes vary too.
    """
    sizes = np.bincount(labels)
    given = settings.concentration or 0.0
    if settings.alpha is not None:
        given = settings.alpha * (classes if settings.balanced else 1)
    given = float(np.clip(given, 1e-12, 1e12))  # already at the limits there; beyond, floats give 0/0
    if settings.balanced:
        return _deal(labels, *_draw_by_client(sizes, count, given, settings.per_client, generator), generator)
    if settings.per_client is not None:
        raise InputError(
            "clients.split.per_client needs equal clients; use clients.split.balanced: true, or leave it out"
        )
    return _deal(labels, *_spread_by_class(sizes, count, given, generator), generator)


def split_flwr(labels: np.ndarray, classes: int, count: int, settings: "FlwrSplit", generator: Generator) -> Split:
    """Any partitioner of flwr-datasets, by its class name (Beutel et al. 2020, arXiv:2007.14390).

    Keys besides `partitioner` are its arguments; `num_partitions`, `partition_by` and `seed` need not be given.
    The samples are shuffled first, because some partitioners (Iid, Linear, …) cut the data in its order.
    """
    import datasets
    import flwr_datasets.partitioner as flower

    name = settings.partitioner
    known = {key: getattr(flower, key) for key in flower.__all__ if "Vertical" not in key}  # those divide columns
    names = [key for key, kind in known.items() if not inspect.isabstract(kind)]
    if name not in names:
        names.sort(key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
        raise InputError(f"clients.split.partitioner is {name}, which does not exist; use {', '.join(names)}")
    order = generator.permutation(len(labels))
    offered = {"num_partitions": count, "partition_by": "label", "seed": int(generator.integers(2**31))}
    accepted = inspect.signature(known[name]).parameters
    arguments = {key: value for key, value in offered.items() if key in accepted} | (settings.model_extra or {})
    if "distribution_array" in arguments:  # a list in YAML, but its partitioner insists on an array
        arguments["distribution_array"] = np.array(arguments["distribution_array"])
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            partitioner = known[name](**arguments)
            partitioner.dataset = datasets.Dataset.from_dict({"label": labels[order], "index": order})
            parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    except Exception as error:  # whatever a partitioner raises, its cause is what the experiment asked of it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"clients.split.partitioner {name} refuses: {reason}") from error
    if len(parts) != count:
        wrong = f"clients.count is {count:,}, but {name} makes {_many(len(parts), 'client')}"
        raise InputError(f"{wrong}; set clients.count to {len(parts)}")
    clients = Parts.of(np.sort(np.asarray(part.with_format("numpy")[:]["index"], dtype=np.int64)) for part in parts)
    holders = np.bincount(clients.positions, minlength=len(labels))
    if holders.max() > 1:
        raise InputError(f"clients.split.partitioner {name} gives a sample to two clients; use other arguments for it")
    left = int((holders == 0).sum())
    return Split(clients, [f"left out: {_many(left, 'sample')} that {name} gives to nobody"] if left else [])


def _hold_evenly(sizes: np.ndarray, count: int, per_client: int, generator: Generator) -> np.ndarray:
    """Clients x classes, true where a client holds a class; each class by equally many, give or take one.

    Client after client takes the `per_client` classes that still want the most holders. By the theorem of
    Gale and Ryser (1957) this cannot get stuck, however ties are broken. Which classes have the one holder
    more is random among those with samples enough for it.
    """
    classes, smallest = len(sizes), int(sizes.min())
    most = smallest * classes + int((sizes > smallest).sum())  # holdings that even quotas have samples for
    if count * per_client < classes:
        few = (
            f"clients.split.per_client is {per_client}, too few for {_many(count, 'client')} to hold {classes} classes"
        )
        raise InputError(f"{few}; use at least {-(-classes // count)}, or clients.count {-(-classes // per_client):,}")
    if count * per_client > most:
        many = f"clients.split.per_client is {per_client}, too many holders for a class of {_many(smallest, 'sample')}"
        raise InputError(f"{many}; use clients.count x per_client of at most {most:,}, or clients.split.assign: random")
    base, extra = divmod(count * per_client, classes)
    wanted = np.full(classes, base)
    wanted[generator.choice(np.flatnonzero(sizes > base), extra, replace=False)] += 1
    holds = np.zeros((count, classes), dtype=bool)
    for client in generator.permutation(count):
        holds[client] = _largest(wanted + generator.random(classes), per_client)  # the fraction only breaks ties
        wanted -= holds[client]
    return holds


def _balance(holds: np.ndarray, totals: np.ndarray, sweeps: int = 100) -> np.ndarray:
    """Share each class's total among its holders so that the clients' sums are nearly equal.

    Iterative proportional fitting (Deming and Stephan 1940; Sinkhorn 1967): scale rows to the wanted sum,
    then columns to theirs, and repeat. Columns come last and are exact; rows are as near as `holds` allows.
    """
    target, tiny = totals.sum() / len(holds), 1e-300  # tiny: a row or column of zeros stays zero
    shares = holds.astype(float)
    for _ in range(sweeps):
        shares *= (target / np.maximum(shares.sum(axis=1), tiny))[:, None]
        shares *= totals / np.maximum(shares.sum(axis=0), tiny)
        if np.abs(shares.sum(axis=1) - target).max() < 0.5:
            break
    return shares


def _round(shares: np.ndarray) -> np.ndarray:
    """Whole numbers with the same column sums, each the floor or the ceiling of its share.

    The largest remainder method, class by class, except that a client's rounding errors add up in `owed`:
    who lost a fraction in one class is first in line in the next. So row sums stay near theirs as well.
    """
    counts = shares.astype(np.int32)  # clients x classes: large enough for half the bytes to matter
    owed = np.zeros(len(shares))
    for c in range(shares.shape[1]):
        owed += shares[:, c] - counts[:, c]
        if left := round(shares[:, c].sum()) - int(counts[:, c].sum()):
            eligible = np.flatnonzero(shares[:, c] > counts[:, c])
            winners = eligible[_largest(owed[eligible], left)]
            counts[winners, c] += 1
            owed[winners] -= 1
    return counts


def _draw_by_client(
    sizes: np.ndarray, count: int, concentration: float, per_client: int | None, generator: Generator
) -> tuple[np.ndarray, list[str]]:
    """Samples per client and class, and notes: equal clients draw by q_i ~ Dir(concentration * p), one by one."""
    n = int(sizes.sum())
    if per_client is not None and count * per_client > n:
        short = f"clients.split.per_client is {per_client:,}, but {_many(count, 'client')} share only {n:,} samples"
        raise InputError(f"{short}; use at most {n // count:,}")
    handed = n if per_client is None else count * per_client
    pool = sizes.copy()
    counts, prior = np.zeros((count, len(sizes)), dtype=np.int32), concentration * sizes / n
    for i, q in enumerate(generator.dirichlet(prior, size=count)):
        counts[i] = _draw(pool, handed // count + (i < handed % count), q, prior, generator)
        pool -= counts[i]
    return counts, [f"left out: {_many(n - handed, 'sample')} above clients.split.per_client"] if handed < n else []


def _draw(pool: np.ndarray, want: int, q: np.ndarray, prior: np.ndarray, generator: Generator) -> np.ndarray:
    """Draw `want` samples by class proportions q ~ Dir(prior); a class that has run out is drawn no more.

    Draws that find their class empty are made again by q over the classes that are left, which is the same
    as drawing one at a time. Each turn ends the draw or empties a class, so it ends.
    """
    taken = np.zeros_like(pool)
    while missing := want - int(taken.sum()):
        left = taken < pool
        if q[left].sum() < 1e-200:  # too small for floats: draw q over the classes left anew, from Dir(prior) over them
            q = np.zeros(len(pool))
            q[left] = generator.dirichlet(prior[left])
        weights = np.where(left, q, 0)
        taken = np.minimum(taken + generator.multinomial(missing, weights / weights.sum()), pool)
    return taken


def _spread_by_class(sizes: np.ndarray, count: int, alpha: float, generator: Generator) -> tuple[np.ndarray, list[str]]:
    """Samples per client and class, and notes: each class goes to the clients by p_c ~ Dir(alpha, …, alpha)."""
    shares = generator.dirichlet(np.full(count, alpha), size=len(sizes)).T
    shares *= sizes
    counts = _round(shares)
    held = counts.sum(axis=1)
    empty = np.flatnonzero(held == 0)
    for client in empty:  # there are at least as many samples as clients: while one has none, another has two
        giver = held.argmax()
        given = counts[giver].argmax()
        counts[[giver, client], given] += [-1, 1]
        held[[giver, client]] += [-1, 1]
    note = f"{_many(empty.size, 'client')} drew nothing and got one sample each from the largest client"
    return counts, [note] if empty.size else []


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """True at the k largest values of each row."""
    chosen = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(chosen, np.argpartition(-values, k - 1, axis=-1)[..., :k], True, axis=-1)
    return chosen


def _deal(labels: np.ndarray, counts: np.ndarray, notes: list[str], generator: Generator) -> Split:
    """Hand out random samples: counts[i, c] of class c to client i."""
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner = np.full(len(labels), -1)  # -1: nobody's
    for samples, wanted in zip(np.split(by_class, np.cumsum(np.bincount(labels))[:-1]), counts.T, strict=True):
        owner[samples[: wanted.sum()]] = np.repeat(np.arange(len(counts)), wanted)
    return Split(Parts.by_owner(owner, len(counts)), notes)


def _many(number: int, noun: str) -> str:
    """`1 sample`, `1,200 samples`, `12 classes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
