"""Pretrain `pico`, the small ViT that fedsieve ships, without labels.

A student of 12 blocks, width 128 and 16 patches of 8 x 8 pixels (32 px images) learns to give the
token features of a larger, pretrained ViT whose image is cut into the same 4 x 4 patches (for
instance a ViT-S/14 at 56 px) on the training images of CIFAR-100. Only images are used, no label.
The student sees distorted images (shifted, grey, inverted, blurred, noisy, patchy), the teacher the
clean ones and their mirror images; its features are computed once.

    python scripts/pretrain_pico.py --teacher PATH/TO/vit_s14.safetensors --cifar PATH/TO/cifar-100-python \
        --work /tmp/pico --epochs 24

It can be stopped at any time and started again with the same command. The end of it writes
`src/fedsieve/model/pico.safetensors` in float16; `scripts/probe_pico.py` measures what was learnt.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.data.cifar import read_official
from fedsieve.model.checkpoint import read_tensors, shape_of, vit_from_tensors
from fedsieve.model.vit import ViT, ViTShape, initialize

PICO = ViTShape(image_size=32, patch_size=8, width=128, depth=12, heads=2, hidden=512)
TARGET = Path(__file__).parents[1] / "src/fedsieve/model/pico.safetensors"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEED = 7


def normalized(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images - mean) / std


@torch.no_grad()
def teacher_features(teacher: ViT, images: np.ndarray, path: Path) -> np.ndarray:
    """Tokens of each image and of its mirror image, standardised per dimension: (N, 2, 17, width) float16."""
    shape = (len(images), 2, 17, teacher.width)
    progress = path.with_suffix(".count")
    first = int(progress.read_text()) if progress.exists() else 0
    features = np.lib.format.open_memmap(path, mode="r+" if first else "w+", dtype=np.float16, shape=shape)
    for start in range(first, len(images), 500):
        batch = torch.from_numpy(images[start : start + 500]).float() / 255
        for mirrored in (0, 1):
            view = batch.flip(3) if mirrored else batch
            view = F.interpolate(view, size=(56, 56), mode="bilinear", antialias=True)
            with torch.autocast("cpu", torch.bfloat16):  # twice as fast, and targets need no more
                tokens = teacher.tokens(normalized(view))
            features[start : start + 500, mirrored] = tokens.half().numpy()
        features.flush()
        progress.write_text(str(start + 500))
        print(f"teacher: {start + 500:,} of {len(images):,} images", flush=True)
    return features


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """What the student sees: each image shifted by up to 3 pixels and, by chance, changed in colour or hidden in part."""
    n = len(images)

    def chance(share: float) -> Tensor:
        return (torch.rand(n, generator=generator) < share).view(-1, 1, 1, 1)

    shift = torch.randint(0, 7, (2, n), generator=generator)
    rows = torch.arange(32).view(1, -1) + shift[0].view(-1, 1)
    columns = torch.arange(32).view(1, -1) + shift[1].view(-1, 1)
    padded = F.pad(images, (3, 3, 3, 3), mode="reflect")
    images = padded[torch.arange(n).view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)

    grey = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    images = torch.where(chance(0.2), grey, images)
    contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=generator)
    brightness = 0.3 * (torch.rand(n, 3, 1, 1, generator=generator) - 0.5)
    jittered = (images - 0.5) * contrast + 0.5 + brightness
    images = torch.where(chance(0.5), jittered, images)
    images = torch.where(chance(0.1), 1 - images, images)
    blurred = F.interpolate(F.avg_pool2d(images, 4), size=(32, 32), mode="bilinear")  # as 8 x 8 pictures look
    images = torch.where(chance(0.1), blurred, images)
    noise = 0.08 * torch.randn(images.shape, generator=generator)
    images = torch.where(chance(0.1), images + noise, images)
    hidden = F.interpolate((torch.rand(n, 1, 8, 8, generator=generator) < 0.15).float(), size=(32, 32))
    images = torch.where(chance(0.2) & (hidden > 0), torch.full_like(images, 0.5), images)
    return images.clamp(0, 1)


def pretrain(images: np.ndarray, features: np.ndarray, work: Path, epochs: int, batch_size: int, lr: float) -> ViT:
    student = ViT(PICO)
    initialize(student, torch.Generator().manual_seed(SEED))
    torch.manual_seed(SEED)
    to_teacher = nn.Linear(PICO.width, features.shape[-1])
    parameters = [*student.parameters(), *to_teacher.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.05)
    sample = torch.from_numpy(np.asarray(features[::25])).float()
    mean, std = sample.mean((0, 1)), sample.std((0, 1)) + 1e-6  # per token position and dimension
    state, first = work / "student.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        student.load_state_dict(saved["student"])
        to_teacher.load_state_dict(saved["to_teacher"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    steps = len(images) // batch_size
    weight = torch.tensor([4.0] + [0.25] * 16).view(1, -1, 1)  # the class token is what users read
    for epoch in range(first, epochs):
        generator = torch.Generator().manual_seed(SEED * 1000 + epoch)
        order = torch.randperm(len(images), generator=generator)
        total, start = 0.0, time.time()
        for step in range(steps):
            progress = (epoch * steps + step) / (epochs * steps)
            warm = min(1.0, progress * epochs / 2)  # two epochs
            for group in optimizer.param_groups:
                group["lr"] = lr * warm * 0.5 * (1 + math.cos(math.pi * progress))
            chosen = np.sort(order[step * batch_size : (step + 1) * batch_size].numpy())
            mirrored = int(torch.randint(0, 2, (1,), generator=generator))
            target = (torch.from_numpy(features[chosen, mirrored]).float() - mean) / std
            batch = torch.from_numpy(images[chosen]).float() / 255
            batch = distorted(batch.flip(3) if mirrored else batch, generator)
            loss = (weight * F.smooth_l1_loss(to_teacher(student.tokens(normalized(batch))), target, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 3.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{epochs}: loss {total / steps:.4f}, {time.time() - start:.0f} s", flush=True)
        saved = {"student": student.state_dict(), "to_teacher": to_teacher.state_dict()}
        torch.save({**saved, "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, state.with_suffix(".tmp"))
        state.with_suffix(".tmp").replace(state)
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    (images, _), _, _ = read_official(arguments.cifar)
    tensors = read_tensors(arguments.teacher)
    teacher = vit_from_tensors(tensors, shape_of(tensors, "the teacher"), 56, "the teacher").eval()
    features = teacher_features(teacher, images, arguments.work / "teacher.npy")
    student = pretrain(images, features, arguments.work, arguments.epochs, arguments.batch_size, arguments.lr)
    half = {name: tensor.detach().half().contiguous() for name, tensor in student.state_dict().items()}
    save_file(half, TARGET, metadata={"made_by": "scripts/pretrain_pico.py"})
    print(f"wrote {TARGET} ({TARGET.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
