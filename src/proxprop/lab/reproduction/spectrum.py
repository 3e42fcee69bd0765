"""Section 4.1: the largest and smallest eigenvalue of CIFAR-10's XXᵀ, over the ways in which X can be read.

The paper gives 6.7e6 and "seven orders of magnitude larger than the smallest" but neither how pixels were scaled nor
how many images were taken. So every *reading* (how pixels become numbers) is measured on every *sample* of images.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from proxprop.lab.data import Dataset, load
from proxprop.lab.reproduction.arguments import parse
from proxprop.lab.reproduction.files import Row, write_csv

COLUMNS = ("reading", "images", "count", "precision", "features", "largest", "smallest", "orders")
CHUNK = 5000
COUNTS = (500, 5000, 9000, 10000, 30000, 45000)

# From images in [0, 1], [samples, channels, height, width], to the numbers whose spectrum is taken.
READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "[0, 1], as released": lambda x: x,
    "[0, 255]": lambda x: 255 * x,
    "[-1, 1]": lambda x: 2 * x - 1,
    "[0, 1] with a column of ones": lambda x: torch.cat([x.flatten(1), torch.ones(len(x), 1).to(x)], 1),
    "minus the mean": lambda x: x - x.mean(),
    "minus each channel's mean": lambda x: x - x.mean((0, 2, 3), keepdim=True),
    "minus each pixel's mean": lambda x: x - x.mean(0),
    "each channel standardised": lambda x: _standardised(x, (0, 2, 3)),
    "each pixel standardised": lambda x: _standardised(x, (0,)),
    "each image standardised": lambda x: _standardised(x, (1, 2, 3)),
    "each image of unit norm": lambda x: x / x.flatten(1).norm(dim=1)[:, None, None, None],
    "grey, [0, 1]": lambda x: torch.einsum("c,nchw->nhw", torch.tensor([0.299, 0.587, 0.114]).to(x), x),
}


def _standardised(x: Tensor, over: tuple[int, ...]) -> Tensor:
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True, correction=0).clamp_min(1e-12)


def samples(dataset: Dataset) -> dict[str, Tensor]:
    """The sets of images: starts of the training part, all of it, the test part.

    500 is a batch, 5,000 the validation set, 10,000 one of CIFAR-10's files, 45,000 the training set. 9,000 and 30,000
    are chosen to fit: there [0, 1] and [-1, 1] come to the paper's largest eigenvalue.

    Args:
        dataset: with nothing held out.

    Returns:
        Name to images; a size the dataset does not reach is left out.
    """
    whole = dataset.train.inputs
    first = {f"first {count}": whole[:count] for count in COUNTS if count < len(whole)}
    return first | {f"all {len(whole)}": whole, f"test {len(dataset.test)}": dataset.test.inputs}


def measure(
    images: Mapping[str, Tensor], precisions: Sequence[str] = ("float64", "float32")
) -> Iterator[Row]:
    """One row per set of images, reading and precision; both ends of the spectrum of XXᵀ, as computed.

    `orders` is log10(largest / |smallest|), None where that is 0. In float32 the smallest eigenvalue is rounding, and
    may be negative.
    """
    for name, pixels in images.items():
        for reading, read in READINGS.items():
            for precision in precisions:
                X = read(pixels.to(getattr(torch, precision))).flatten(1)
                values = torch.linalg.eigvalsh(gram(X))
                low, high = float(values[0]), float(values[-1])
                orders = math.log10(high / abs(low)) if low else None
                yield dict(
                    zip(
                        COLUMNS,
                        (reading, name, len(X), precision, X.shape[1], high, low, orders),
                        strict=True,
                    )
                )


def gram(X: Tensor) -> Tensor:
    """XᵀX with images as rows, which is the paper's XXᵀ with images as columns; features × features.

    >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[1., 2.],
            [2., 5.]])
    """
    total = X.new_zeros(X.shape[1], X.shape[1])
    for chunk in X.split(CHUNK):
        total.addmm_(chunk.T, chunk)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the file, on a machine without the command line's packages."""
    config, out = parse(__doc__, arguments)
    dataset = load(config.data, config.data_dir, validation=0).to(torch.device(config.device))
    write_csv(out, COLUMNS, measure(samples(dataset)))


if __name__ == "__main__":
    main()
