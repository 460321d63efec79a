"""What messages cost: bytes beside the entropy of masks, and seconds beside a copy and a checksum.

python bench/wire.py            # on one thread; writes "wire" in bench/results.json, and docs/wire.png

Vectors are as long as a ViT-S, with random values; masks are random and of single weights.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from common import ratio, report, side_by_side, timed
from matplotlib import pyplot as plt
from torch import Tensor

from fedsieve.analysis.report.palette import COLOURS, in_page_colours
from fedsieve.analysis.report.plots import save_figure, without_frame
from fedsieve.wire import Encoded, Extent, Layout, Message, Vector, decode, encode
from fedsieve.wire.positions import encode_positions

WEIGHTS = 21_600_000
TURNS = 9
SPARSITIES = [round(0.05 * step, 2) for step in range(1, 20)]
BLUE, RED, GREEN, PURPLE, ORANGE = COLOURS[:5]
SIZES = Path(__file__).parent.parent / "docs" / "wire.png"


def main() -> None:
    torch.set_num_threads(1)
    sizes = {sparsity: message_sizes(sparsity) for sparsity in SPARSITIES}
    rows = [*position_sizes(), *smaller_than_dense(sizes), *speed_of_a_sparse_update(), *speed_of_a_dense_message()]
    report("wire", rows)
    draw(sizes)
    print(f"written to docs/{SIZES.name}")


def random_bits(sparsity: float, weights: int = WEIGHTS) -> tuple[Tensor, int]:
    """A mask, and how many weights are active in it."""
    active = np.random.default_rng(0).random(weights, dtype=np.float32) >= sparsity
    return torch.from_numpy(np.packbits(active, bitorder="little")), int(np.count_nonzero(active))


def random_values(count: int) -> Tensor:
    return 1e-3 * torch.randn(count, generator=torch.Generator().manual_seed(0))


def entropy(density: float) -> float:
    """Bits that a weight of a random mask takes at least."""
    return -density * math.log2(density) - (1 - density) * math.log2(1 - density)


def encoded_vector(vector: Vector, weights: int, values: str = "float32") -> Encoded:
    layout = Layout(bytes(16), {"delta": Extent(weights, weights)})
    return encode(Message("update", {}, {"delta": vector}), layout, values, generator=torch.Generator().manual_seed(0))


def position_sizes() -> list[dict[str, Any]]:
    rows = []
    for sparsity in (0.2, 0.5, 0.9, 0.99):
        bits, count = random_bits(sparsity)
        encoding, payload = encode_positions(Vector(bits=bits), Extent(WEIGHTS, WEIGHTS))
        bound = WEIGHTS * entropy(count / WEIGHTS) / 8
        what = f"positions at {sparsity:.0%} ({encoding})"
        to = f"entropy of the mask ({bound / 1e6:.2f} MB)"
        rows.append({"what": what, "to": to, "ratio": len(payload) / bound, "at_most": 1.05})
    return rows


def message_sizes(sparsity: float) -> dict[str, float]:
    """Bytes a weight of messages, and of the positions in them; measured on a tenth of the weights."""
    weights = WEIGHTS // 10
    bits, count = random_bits(sparsity, weights)
    vector = Vector(random_values(count), bits)
    sizes = {kind: len(encoded_vector(vector, weights, kind).data) for kind in ("float32", "float16", "int8")}
    positions = len(encode_positions(vector, Extent(weights, weights))[1])
    return {kind: size / weights for kind, size in sizes.items()} | {"positions": positions / weights}


def smaller_than_dense(sizes: dict[float, dict[str, float]]) -> list[dict[str, Any]]:
    """The largest of the sparse messages beside the dense one."""
    rows = []
    for kind, dense in (("float32", 4.0), ("float16", 2.0), ("int8", 1 + 4 / 512)):
        worst = max(SPARSITIES, key=lambda sparsity: sizes[sparsity][kind])
        what = f"{kind} at 5% to 95%, largest at {worst:.0%}"
        share = sizes[worst][kind] / dense
        rows.append({"what": what, "to": f"dense {kind} message", "ratio": share, "at_most": 1.0})
    return rows


def speed_of_a_sparse_update() -> list[dict[str, Any]]:
    bits, count = random_bits(0.9)
    vector, layout = Vector(random_values(count), bits), Layout(bytes(16), {"delta": Extent(WEIGHTS, WEIGHTS)})

    def there_and_back() -> None:
        decode(encoded_vector(vector, WEIGHTS).data, layout, "update")

    seconds = side_by_side({"ours": timed(there_and_back)}, TURNS)["ours"]
    low, middle, high = np.quantile([4 * WEIGHTS / one / 200e6 for one in seconds], [0.25, 0.5, 0.75]).tolist()
    what = f"encode + decode at 90% ({200 * middle:.0f} MB/s)"
    found = {"ratio": middle, "low": low, "high": high, "seconds": float(np.median(seconds))}
    return [{"what": what, "to": "200 MB/s of dense float32", **found, "at_least": 1.0}]


def speed_of_a_dense_message() -> list[dict[str, Any]]:
    vector, layout = Vector(random_values(WEIGHTS)), Layout(bytes(16), {"delta": Extent(WEIGHTS, WEIGHTS)})
    plain = vector.values.numpy().data.cast("B")
    data = encoded_vector(vector, WEIGHTS).data
    calls = {
        "encode": timed(lambda: encoded_vector(vector, WEIGHTS)),
        "copy": timed(lambda: xxhash.xxh3_64_intdigest(bytearray(plain))),
        "decode": timed(lambda: decode(data, layout, "update")),
    }
    seconds = side_by_side(calls, 2 * TURNS)
    to = f"a copy and its checksum ({1e3 * float(np.median(seconds['copy'])):.0f} ms)"
    return [
        {"what": f"{name}, dense", "to": to, **ratio(seconds, name, "copy"), "at_most": 1.1}
        for name in ("encode", "decode")
    ]


@in_page_colours
def draw(sizes: dict[float, dict[str, float]]) -> None:
    """Sizes of messages relative to dense float32, and of the positions in them, against sparsity."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sparsity = np.array(SPARSITIES)
    left.axhline(1, color="black", linewidth=0.8)
    left.text(0.02, 1.02, "dense float32")
    left.plot(sparsity, 5 * (1 - sparsity), "--", color=RED, label="report 001: 4 + 16 bytes")
    for kind, color in (("float32", BLUE), ("float16", GREEN), ("int8", PURPLE)):
        left.plot(sparsity, [sizes[one][kind] / 4 for one in SPARSITIES], ".-", color=color, label=kind)
    left.set(xlim=(0, 1), ylim=(0, 1.6), xlabel="sparsity", ylabel="size of a message / dense float32")
    left.legend(frameon=False, loc="upper left")
    positions = np.array([sizes[one]["positions"] for one in SPARSITIES])
    fine = np.linspace(0.01, 0.99, 99)
    bound = np.array([entropy(1 - one) for one in fine])
    right.plot(fine, 0 * fine + 16, "--", color=RED, label="report 001: two int64 indices")
    right.plot(fine, 1 / 8 / (1 - fine), color=ORANGE, label="bitmap")
    right.plot(fine, bound / 8 / (1 - fine), color="black", linewidth=0.8, label="entropy of the mask")
    right.plot(sparsity, positions / (1 - sparsity), ".", color=BLUE, label="ours")
    right.set(xlim=(0, 1), yscale="log", xlabel="sparsity", ylabel="bytes per position")
    right.legend(frameon=False)
    for axis in (left, right):
        without_frame(axis)
    save_figure(figure, SIZES)


if __name__ == "__main__":
    main()
