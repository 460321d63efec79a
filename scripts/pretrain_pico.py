"""Pretrain `pico`, the small ViT that fedsieve ships, without labels.

A student of 12 blocks, width 128 and 16 patches of 8 x 8 pixels (32 px images) learns to give the
token features of a larger, pretrained DINOv2-like ViT of 12 blocks whose images are cut into the same
4 x 4 patches (a ViT-S/14 at 56 px), after blocks 3, 6, 9 and 12, on the training images of CIFAR-100.
Only images are used, no label. It starts from every third weight of the teacher (weight selection, Xu et
al., ICLR 2024). The student sees images that are shifted, grey, inverted, blurred or otherwise changed,
the teacher the clean ones and their mirror images; its features are computed once.

    python scripts/pretrain_pico.py --teacher PATH/TO/vit_s14.safetensors --cifar PATH/TO/cifar-100-python \
        --work PATH/TO/SCRATCH

It needs 6 GB of disk, and can be stopped at any time and started again with the same command. The end of
it writes `src/fedsieve/model/pico.safetensors` in float16; `docs/results.md` tells what was learnt.
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
from fedsieve.model.pretrained import read_tensors, resize_positions, shape_of, vit_from_tensors
from fedsieve.model.vit import ViT, ViTShape

PICO = ViTShape(image_size=32, patch_size=8, width=128, depth=12, heads=2, hidden=512)
LAYERS = (2, 5, 8, 11)  # the blocks after which student and teacher are compared, counted from 0
TARGET = Path(__file__).parents[1] / "src/fedsieve/model/pico.safetensors"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEED = 7


def normalized(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images - mean) / std


def tokens_by_layer(network: ViT, images: Tensor) -> list[Tensor]:
    tokens, kept = network.embed(normalized(images)), []
    for number, block in enumerate(network.blocks):
        tokens = block(tokens)
        if number in LAYERS:
            kept.append(network.norm(tokens) if number == LAYERS[-1] else tokens)
    return kept


@torch.no_grad()
def teacher_features(teacher: ViT, images: np.ndarray, path: Path) -> np.ndarray:
    """Tokens of each image and of its mirror image: (N, 2, layers, 17, width) float16."""
    shape = (len(images), 2, len(LAYERS), 17, teacher.width)
    progress = path.with_suffix(".count")
    first = int(progress.read_text(encoding="utf-8")) if progress.exists() else 0
    features = np.lib.format.open_memmap(path, mode="r+" if first else "w+", dtype=np.float16, shape=shape)
    for start in range(first, len(images), 500):
        batch = torch.from_numpy(images[start : start + 500]).float() / 255
        for mirrored in (0, 1):
            view = batch.flip(3) if mirrored else batch
            view = F.interpolate(view, size=(56, 56), mode="bilinear", antialias=True)
            with torch.autocast("cpu", torch.bfloat16):  # twice as fast, and targets need no more
                layers = tokens_by_layer(teacher, view)
            features[start : start + 500, mirrored] = torch.stack([one.half() for one in layers], dim=1).numpy()
        progress.write_text(str(start + 500), encoding="utf-8")
        print(f"teacher: {start + 500:,} of {len(images):,} images", flush=True)
    return features


@torch.no_grad()
def select_weights(student: ViT, teacher: dict[str, Tensor]) -> None:
    """Start the student from every third dimension of the teacher, and every third of its heads.

    Sums over a third of the terms are scaled by sqrt(3) to keep their spread; patch filters are resized
    with the area they cover; LayerScale is multiplied into the layer before it.
    """
    width = torch.arange(0, 384, 3)
    heads = torch.cat([torch.arange(0, 64), torch.arange(192, 256)])
    hidden = torch.arange(0, 1536, 3)
    rows = torch.cat([heads, 384 + heads, 768 + heads])
    scale = math.sqrt(3)
    new = student.state_dict()
    filters = F.interpolate(teacher["patch_embed.proj.weight"][width], size=(8, 8), mode="bilinear", antialias=True)
    new["patch_embed.proj.weight"].copy_(filters * (14 / 8) ** 2)
    new["patch_embed.proj.bias"].copy_(teacher["patch_embed.proj.bias"][width])
    new["pos_embed"].copy_(resize_positions(teacher["pos_embed"], 4, antialias=False)[:, :, width])
    new["cls_token"].copy_(teacher["cls_token"][:, :, width])
    for number in range(PICO.depth):
        block = f"blocks.{number}."
        for name, gamma, out, into in (
            ("attn.qkv", None, rows, width),
            ("attn.proj", "ls1.gamma", width, heads),
            ("mlp.fc1", None, hidden, width),
            ("mlp.fc2", "ls2.gamma", width, hidden),
        ):
            weight, bias = teacher[f"{block}{name}.weight"], teacher[f"{block}{name}.bias"]
            if gamma is not None:
                weight, bias = teacher[block + gamma][:, None] * weight, teacher[block + gamma] * bias
            new[f"{block}{name}.weight"].copy_(weight[out][:, into] * scale)
            new[f"{block}{name}.bias"].copy_(bias[out])
    for name in new:
        if "norm" in name:
            new[name].copy_(teacher[name][width])


def changed(images: Tensor, generator: torch.Generator) -> Tensor:
    """What the student sees: by chance shifted by up to 2 pixels, grey, of other contrast, inverted or blurred."""
    n = len(images)

    def chance(share: float) -> Tensor:
        return (torch.rand(n, generator=generator) < share).view(-1, 1, 1, 1)

    shift = torch.randint(0, 5, (2, n), generator=generator)
    rows = torch.arange(32).view(1, -1) + shift[0].view(-1, 1)
    columns = torch.arange(32).view(1, -1) + shift[1].view(-1, 1)
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    shifted = padded[torch.arange(n).view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
    images = torch.where(chance(0.5), shifted, images)
    grey = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    images = torch.where(chance(0.1), grey, images)
    contrast = 0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=generator)
    brightness = 0.2 * (torch.rand(n, 3, 1, 1, generator=generator) - 0.5)
    images = torch.where(chance(0.3), (images - 0.5) * contrast + 0.5 + brightness, images)
    images = torch.where(chance(0.05), 1 - images, images)
    blurred = F.interpolate(F.avg_pool2d(images, 4), size=(32, 32), mode="bilinear")  # as 8 x 8 pictures look
    images = torch.where(chance(0.08), blurred, images)
    return images.clamp(0, 1)


class Student(nn.Module):
    """The network, and for each compared layer a linear map to the teacher's dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = ViT(PICO)
        self.maps = nn.ModuleList(
            nn.Sequential(
                nn.Identity() if layer == LAYERS[-1] else nn.LayerNorm(PICO.width), nn.Linear(PICO.width, width)
            )
            for layer in LAYERS
        )

    def forward(self, images: Tensor) -> Tensor:
        layers = tokens_by_layer(self.network, images)
        return torch.stack([to(tokens) for to, tokens in zip(self.maps, layers, strict=True)], dim=1)


def distance(guess: Tensor, target: Tensor) -> Tensor:
    """Squared error; the last class token, which users read, weighs as much as all else."""
    error = (guess - target).square()
    return error[:, -1, 0].mean() + 0.5 * error[:, -1, 1:].mean() + 0.5 * error[:, :-1].mean()


def pretrain(
    student: Student, images: np.ndarray, features: np.ndarray, state: Path, settings: argparse.Namespace
) -> None:
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.02)
    sample = torch.from_numpy(np.asarray(features[:: len(features) // 2000])).float()
    mean, std = sample.mean((0, 1)), sample.std((0, 1)) + 1e-4  # of each layer, token and dimension
    first, steps = 0, len(images) // settings.batch_size
    if state.exists():
        saved = torch.load(state, weights_only=True)
        student.load_state_dict(saved["student"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    for epoch in range(first, settings.epochs):
        generator = torch.Generator().manual_seed(SEED * 1000 + epoch)
        order = torch.randperm(len(images), generator=generator).numpy()
        total, start = 0.0, time.time()
        for step in range(steps):
            done = epoch * steps + step
            for group in optimizer.param_groups:
                warm = min(1.0, (done + 1) / 300)
                group["lr"] = settings.lr * warm * 0.5 * (1 + math.cos(math.pi * done / (settings.epochs * steps)))
            chosen = np.sort(order[step * settings.batch_size : (step + 1) * settings.batch_size])
            mirrored = int(torch.randint(0, 2, (1,), generator=generator))
            target = (torch.from_numpy(features[chosen, mirrored]).float() - mean) / std
            batch = torch.from_numpy(images[chosen]).float() / 255
            loss = distance(student(changed(batch.flip(3) if mirrored else batch, generator)), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{settings.epochs}: loss {total / steps:.4f}, {time.time() - start:.0f} s", flush=True)
        saved = {"student": student.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(saved, state.with_suffix(".partial"))
        state.with_suffix(".partial").replace(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for intermediate files")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(SEED)
    settings.work.mkdir(parents=True, exist_ok=True)
    (images, _), _, _ = read_official(settings.cifar)
    tensors = {name: tensor.float() for name, tensor in read_tensors(settings.teacher).items()}
    teacher = vit_from_tensors(tensors, shape_of(tensors, "the teacher"), 56, "the teacher").eval()
    features = teacher_features(teacher, images, settings.work / "teacher.npy")
    student = Student(teacher.width)
    select_weights(student.network, tensors)
    pretrain(student, images, features, settings.work / "student.pt", settings)
    half = {name: tensor.detach().half().contiguous() for name, tensor in student.network.state_dict().items()}
    save_file(half, TARGET, metadata={"made_by": "scripts/pretrain_pico.py"})
    print(f"wrote {TARGET} ({TARGET.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
