"""How much of a training step the transforms take: ViT-S at 56 px, batches of 64 CIFAR-sized images.

python bench/transform.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from fedsieve.config import DataSettings
from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform
from fedsieve.model.vit import ViT, ViTShape, initialize

VIT_S = ViTShape(image_size=56, patch_size=14, width=384, depth=12, heads=6, hidden=1536, layer_scale=True)


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 100, (64,), generator=generator)
    network = torch.nn.Sequential(ViT(VIT_S), torch.nn.Linear(384, 100))
    initialize(network, generator)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(64, 3, 56, 56, generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(batch), labels).backward()
        optimizer.step()

    step_seconds = median_seconds(step, 5)
    print(f"{torch.get_num_threads()} threads, training step: {1000 * step_seconds:.0f} ms")
    for name, augment in (("resize", []), ("crop and flip", ["horizontal_flip", "random_resized_crop"])):
        settings = DataSettings.model_validate({"image_size": 56, "augment": augment})
        transform = Transform(settings, Samples(images, labels))
        seconds = median_seconds(lambda: transform.training(images, generator), 50)  # noqa: B023 (called at once)
        print(f"{name}: {1000 * seconds:.1f} ms, {100 * seconds / step_seconds:.2f}% of the step")


if __name__ == "__main__":
    main()
