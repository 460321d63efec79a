"""Networks of a user's own, in a module that worker processes can import."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Convolutions with BatchNorm and dropout; `at_most` pixels a side, and an error that can be switched on."""

    def __init__(self, classes: int = 4, at_most: int = 99) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.conv2, self.drop = nn.Conv2d(8, 12, 3, 2, 1), nn.Dropout(0.1)
        self.fc = nn.Linear(12, classes)
        self.at_most, self.fails_in_training = at_most, False

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2] > self.at_most or (self.fails_in_training and self.conv1.training):
            raise RuntimeError(f"no images of {images.shape[2]} pixels, please\n and more lines")
        tokens = self.conv2(self.bn1(self.conv1(images)).relu()).relu()
        return self.fc(self.drop(tokens.mean(dim=(2, 3))))


class Early(nn.Module):
    """Its Linear layer is not its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.mean(dim=(2, 3))).exp()


def net(classes: int = 4) -> Net:
    torch.manual_seed(3)
    return Net(classes)
