"""A small convolutional network with Adam. Blocks are parts of its parameters, with their moments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import nn

from regrow.iterative import Blocks, ParameterBlocks
from scar_models import digits, generator


class Network:
    """Two convolutions and three fully connected layers, trained on digits."""

    data: ClassVar[str] = "digits of scikit-learn, 1797 images of 8 x 8"
    setting: ClassVar[str] = "2 convolutions, 3 fully connected layers; Adam, rate 0.001, batches of 64"
    pieces, judged = 8, 300

    def __init__(self, seed: int) -> None:
        images, labels = digits()
        self._seed = seed
        pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self._data = SimpleNamespace(images=pixels, labels=torch.tensor(labels))
        torch.manual_seed(seed)
        self._model = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self.blocks: Blocks = ParameterBlocks(self._model.named_parameters(), self._optimizer, pieces=self.pieces)

    def iterate(self, iteration: int) -> None:
        images, labels = self._data.images, self._data.labels
        chosen = torch.from_numpy(generator(self._seed, iteration).integers(0, len(labels), 64))
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(images[chosen]), labels[chosen]).backward()
        self._optimizer.step()

    def loss(self) -> float:
        """Return the loss of the same few hundred images each time: all of them take longer than a step."""
        images, labels = self._data.images[: self.judged], self._data.labels[: self.judged]
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self._model(images), labels))
