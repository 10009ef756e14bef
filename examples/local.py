"""Classify handwritten digits on one machine without Spark: python examples/local.py --workers 2"""

import argparse
import sys
from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from sparkstrom import ParallelWrapper
from sparkstrom.models.torch import TorchModel

ACCURACY_WANTED = 0.95


def make_module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, help="processes; without it one for each core")
    parser.add_argument("--mode", default="SHARED_GRADIENTS", help="or AVERAGING")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    optimizer = partial(torch.optim.Adam, lr=2e-3)
    model = TorchModel(make_module(), nn.CrossEntropyLoss(), optimizer, clip_norm=5.0)
    with ParallelWrapper(model, args.workers, training_mode=args.mode) as wrapper:
        summary = wrapper.fit((features[train], labels[train]), epochs=args.epochs)
        guesses = wrapper.predict(features[held_out]).argmax(1)
    accuracy = float((guesses == labels[held_out]).mean())
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    as_wanted = accuracy >= ACCURACY_WANTED or args.epochs < 10
    return 0 if summary.replicas_equal and as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
