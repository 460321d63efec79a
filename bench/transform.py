"""How much of a training step the transforms take: ViT-S at 56 px, batches of 64 CIFAR-sized images.

python bench/transform.py
"""

import statistics

import torch
from common import side_by_side, timed, vit_s_classifier
from torch.nn import functional as F

from fedsieve.config.data_settings import DataSettings
from fedsieve.data.load import Samples
from fedsieve.data.transform import Transform


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 100, (64,), generator=generator)
    network = vit_s_classifier()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(64, 3, 56, 56, generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(batch), labels).backward()
        optimizer.step()

    step_seconds = statistics.median(side_by_side({"step": timed(step)}, 5)["step"])
    print(f"{torch.get_num_threads()} threads, training step: {1000 * step_seconds:.0f} ms")
    for name, augment in (("resize", []), ("crop and flip", ["horizontal_flip", "random_resized_crop"])):
        settings = DataSettings.model_validate({"image_size": 56, "augment": augment})
        transform = Transform(settings, Samples(images, labels))
        call = timed(lambda: transform.training(images, generator))  # noqa: B023 (called at once)
        seconds = statistics.median(side_by_side({"call": call}, 50)["call"])
        print(f"{name}: {1000 * seconds:.1f} ms, {100 * seconds / step_seconds:.2f}% of the step")


if __name__ == "__main__":
    main()
