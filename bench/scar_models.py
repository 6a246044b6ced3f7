"""Three iterative algorithms whose state is in blocks: logistic regression, matrix factorisation, topic models.

Each is small enough for thousands of runs in minutes. An iteration draws its random numbers from a generator that is
seeded by the run and the iteration: a disturbed run and the undisturbed one see the same, and differ by the failure
alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from regrow.iterative import Blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Algorithm(Protocol):
    """What is needed to run trials of an algorithm."""

    blocks: Blocks
    data: ClassVar[str]
    setting: ClassVar[str]

    def iterate(self, iteration: int) -> None:
        """Run an iteration; they count from 1."""

    def loss(self) -> float:
        """Return what tells that the algorithm has converged."""


class Rows:
    """Blocks of rows of an owner's arrays, found anew each time: a copy of the owner has blocks of its own."""

    def __init__(self, owner: Any, **attributes: tuple[str, ...]) -> None:
        self._owner = owner
        self._rows = {
            f"{label}[{row}]": (names, row)
            for label, names in attributes.items()
            for row in range(len(getattr(owner, names[0])))
        }

    def names(self) -> Sequence[str]:
        return list(self._rows)

    def get(self, name: str) -> Sequence[NDArray[Any]]:
        attributes, row = self._rows[name]
        return [getattr(self._owner, attribute)[row : row + 1] for attribute in attributes]

    def put(self, name: str, value: Sequence[Any]) -> None:
        for target, source in zip(self.get(name), value, strict=True):
            target[...] = source


@functools.cache
def digits() -> tuple[Floats, Ints]:
    """Return the images and labels of digits that scikit-learn has in its package: 1797 of 8 x 8, from 0 to 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images, dtype=np.float64) / 16, np.asarray(labels, dtype=np.int64)


@functools.cache
def enlarged_digits() -> tuple[Floats, Ints]:
    """Return the same digits in MNIST's format: 20 x 20, in a field of 28 x 28 around their centre of mass."""
    small, labels = digits()
    at = np.clip((np.arange(20) + 0.5) * 8 / 20 - 0.5, 0, 7)
    between = np.maximum(1 - np.abs(at[:, None] - np.arange(8)), 0)  # linear interpolation
    images = between @ small.reshape(-1, 8, 8) @ between.T
    places = np.arange(20.0)
    mass = images.sum((1, 2))
    down = np.clip(np.rint(13.5 - images.sum(2) @ places / mass), 0, 8).astype(np.int64)
    right = np.clip(np.rint(13.5 - images.sum(1) @ places / mass), 0, 8).astype(np.int64)
    fields = np.zeros((len(images), 28, 28))
    for field, image, row, column in zip(fields, images, down, right, strict=True):
        field[row : row + 20, column : column + 20] = image
    return fields.reshape(len(images), -1), labels


def generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))


class Regression:
    """Multinomial logistic regression. A block is a row of the weights: a pixel's, for all ten digits."""

    data: ClassVar[str] = "scikit-learn's digits, 1797, brought into MNIST's format of 28 x 28"
    setting: ClassVar[str] = "SGD, rate 0.03, batches of 300 (a sixth of the data, as in the paper), L2 0.001"
    rate, decay = 0.03, 1e-3
    batch: int | None = 300
    judged = 600
    """The loss is that of so many images, the same each time: all of them take longer than a step."""

    kind: type[np.floating[Any]] = np.float32

    def __init__(self, seed: int) -> None:
        images, labels = self._images()
        self._seed = seed
        x = np.hstack([images, np.ones((len(images), 1))]).astype(self.kind)
        self._data = SimpleNamespace(x=x, y=np.eye(10, dtype=self.kind)[labels], labels=labels)
        self.weights = generator(seed).normal(0, 0.001, (x.shape[1], 10)).astype(self.kind)
        self.blocks: Blocks = Rows(self, weights=("weights",))

    def _images(self) -> tuple[Floats, Ints]:
        return enlarged_digits()

    def iterate(self, iteration: int) -> None:
        x, y = self._data.x, self._data.y
        if self.batch is not None:
            chosen = generator(self._seed, iteration).integers(0, len(x), self.batch)
            x, y = x[chosen], y[chosen]
        scores = x @ self.weights
        scores -= scores.max(1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(1, keepdims=True)
        chances -= y
        self.weights -= self.rate * (x.T @ chances / len(x) + self.decay * self.weights)

    def loss(self) -> float:
        scores = self._data.x[: self.judged] @ self.weights
        scores -= scores.max(1, keepdims=True)
        fitted = np.take_along_axis(scores, self._data.labels[: self.judged, None], 1)[:, 0]
        surprise = np.log(np.exp(scores).sum(1)) - fitted
        return float(surprise.mean()) + 0.5 * self.decay * float((self.weights**2).sum())


class FullRegression(Regression):
    """The same with the gradient of all data, where each iteration is known to contract."""

    data: ClassVar[str] = "scikit-learn's digits, 1797 of 8 x 8"
    setting: ClassVar[str] = "gradient descent, rate 0.1, all data in each step, L2 0.02"
    rate, decay = 0.1, 0.02
    batch = None
    judged = 1797
    kind = np.float64  # how near it comes to its fixed point is measured

    def _images(self) -> tuple[Floats, Ints]:
        return digits()


class Factorisation:
    """Ratings as a product L R, by alternating least squares. Blocks are the rows of L and the columns of R.

    L follows from R in each iteration: what is lost of L costs nothing. There are many users and few jokes, and so R's
    columns are longer, and move more: a priority by distance finds out what matters.
    """

    data: ClassVar[str] = "generated ratings of Jester's kind: 1600 users, 100 jokes, 56% of all pairs rated, -10 to 10"
    setting: ClassVar[str] = "5 factors, as the paper has them for Jester; ridge 1 on both"
    users, jokes, factors, ridge = 1600, 100, 5, 1.0
    tastes, noise = 8, 1.0

    def __init__(self, seed: int) -> None:
        self._data = self._ratings()
        random = generator(seed)
        self.left = random.normal(0, 0.3, (self.users, self.factors))
        self.right = random.normal(0, 0.3, (self.jokes, self.factors))
        self.blocks: Blocks = Rows(self, left=("left",), right=("right",))

    @classmethod
    @functools.cache
    def _ratings(cls) -> SimpleNamespace:
        """Some tastes, each matters less than the one before; some users have rated all jokes, some few."""
        random = generator(7)
        taste = random.normal(size=(cls.users, cls.tastes)) / (np.arange(cls.tastes) + 1.0)
        rating = taste @ random.normal(size=(cls.jokes, cls.tastes)).T
        rating = np.clip(4 * (rating / rating.std() + random.normal(0, cls.noise, rating.shape)), -10, 10)
        share = np.clip(random.beta(1.2, 1.0, (cls.users, 1)), 0.15, 1.0)
        seen = random.random(rating.shape) < share
        mask = seen.astype(np.float64)
        centred = (rating - rating[seen].mean()) / rating[seen].std() * mask
        return SimpleNamespace(mask=mask, rating=centred, count=mask.sum())

    def iterate(self, iteration: int) -> None:
        mask, rating = self._data.mask, self._data.rating
        self.left[...] = self._solve(mask, rating, self.right)
        self.right[...] = self._solve(mask.T, rating.T, self.left)

    def _solve(self, mask: Floats, rating: Floats, other: Floats) -> Floats:
        k = self.factors
        products = (other[:, :, None] * other[:, None, :]).reshape(len(other), k * k)
        normal = (mask @ products).reshape(-1, k, k) + self.ridge * np.eye(k)
        return np.linalg.solve(normal, (rating @ other)[:, :, None])[:, :, 0]

    def loss(self) -> float:
        """Return what is minimised, of a rating: the squared error and the ridge."""
        wrong = (self.left @ self.right.T - self._data.rating) * self._data.mask
        ridge = self.ridge * float((self.left**2).sum() + (self.right**2).sum())
        return (float(np.vdot(wrong, wrong)) + ridge) / float(self._data.count)
