"""Convolutional models that the tests train: ResNets and a U-Net."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions with batch norm, and a shortcut (He et al., 2015); `width` is the
    inner number of channels (Zagoruyko and Komodakis, 2016, double it)."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if channels != out or stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A ResNet of bottlenecks: `layers` a stage, `stem` channels first, `width` the inner channels
    of the first stage (64: ResNet, 128: wide)."""

    def __init__(self, layers: tuple[int, ...], stem: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 7, 2, 3, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = stem
        stages = []
        for stage, count in enumerate(layers):
            out = stem * 4 * 2**stage
            blocks = []
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, out, stride))
                channels = out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images [batch, 3, height, width]."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return scores


def classification_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy against the classes `y`."""
    return F.cross_entropy(outputs, batch["y"])


class DoubleConvolution(nn.Module):
    """Two 3×3 convolutions, each with group norm and SiLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width]."""
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down, across and up again, with skip connections (Ronneberger et al., 2015)."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(zip((3, *channels), channels, strict=False))
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in pairs)
        turned = list(zip(channels[::-1], channels[-2::-1], strict=False))
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in turned)
        self.up = nn.ModuleList(DoubleConvolution(2 * b, b) for _, b in turned)
        self.head = nn.Conv2d(channels[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image [batch, 3, height, width] of an image."""
        skipped = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        for raise_, block, skip in zip(self.raise_, self.up, skipped[-2::-1], strict=True):
            x = block(torch.cat([skip, raise_(x)], dim=1))
        out: Tensor = self.head(x)
        return out


def pixel_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error against the image `y`."""
    return F.mse_loss(outputs, batch["y"])
