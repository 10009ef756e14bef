"""A program on a machine without Spark that prints its observations as JSON.

``python plain_program.py WHAT``: "fits" trains twice; "interrupted" trains until Ctrl-C and then
again, with checkpoints only at a fit's end; "killed" trains until it is killed; "kept" writes
checkpoints to the directory ``checkpoints``, is killed the first time, and resumes the second time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["pyspark"] = None  # type: ignore[assignment]  # importing it fails

import numpy as np  # noqa: E402

from sparkstrom import ParallelWrapper  # noqa: E402
from sparkstrom.models import Adam, DenseNetwork  # noqa: E402

ROWS = 400


def own_module() -> object:
    """Return a model on torch, which is imported only by the command "fits"."""
    import torch
    from torch import nn

    from sparkstrom.models.torch import TorchModel

    class Net(nn.Module):
        """A module pickled by value, so large that updates need more bytes than joining."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 2))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layers(features)

    return TorchModel(Net(), nn.CrossEntropyLoss(), lambda p: torch.optim.Adam(p, lr=0.01))


class ReadyListener:
    """A listener that prints READY and the workers' process ids once, after 20 minibatches."""

    def __init__(self) -> None:
        self.said = False

    def on_iteration(self, event: object) -> None:
        if not self.said and getattr(event, "minibatches", 0) > 20:
            self.said = True
            print("READY", *wrapper.worker_pids(), flush=True)


class CheckpointListener(ReadyListener):
    """A listener that prints READY and the workers' process ids at each checkpoint."""

    def on_iteration(self, event: object) -> None:
        pass

    def on_checkpoint(self, event: object) -> None:
        print("READY", *wrapper.worker_pids(), flush=True)


def fit(**options: object) -> object:
    return wrapper.fit((features, labels), run_log="", **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    chance = np.random.default_rng(0)
    features = chance.normal(size=(ROWS, 8)).astype(np.float32)
    labels = (features.sum(axis=1) > 0).astype(int)
    fits = sys.argv[1] == "fits"
    model = own_module() if fits else DenseNetwork([8, 64, 2], updater=Adam(0.01), seed=1)
    sleep = 0 if fits else 20
    kept = {"checkpoint_directory": "checkpoints", "checkpoint_every": "0.3 s", "keep_last": 100}
    wrapper = ParallelWrapper(
        model, 2, progress=False, batch_size_per_worker=8, debug_longer_iterations=sleep,
        **(kept if sys.argv[1] == "kept" else {}),
        **(
            {"checkpoint_directory": "checkpoints", "checkpoint_every": "1 h"}
            if sys.argv[1] == "interrupted"
            else {}
        ),
    )  # fmt: skip
    initial, found = wrapper.parameters, {}
    if fits:
        summaries = [fit(epochs=4) for _ in range(2)]
        found["equal"] = [summary.replicas_equal for summary in summaries]
        found["minibatches"] = [summary.minibatches for summary in summaries]
        found["bytes_wire"] = [summary.bytes_wire for summary in summaries]
        found["bytes_sent"] = [summary.bytes_sent for summary in summaries]
        found["hashes"] = [len(set(summary.hashes.values())) for summary in summaries]
        found["accuracy"] = wrapper.evaluate((features, labels)).classification.accuracy
        found["own"] = float(np.abs(wrapper.module.layers[0].weight.detach().numpy()).sum())
    elif sys.argv[1] == "kept":
        summary = fit(epochs=8, listeners=[CheckpointListener()])
        found["equal"], found["resumed_from"] = summary.replicas_equal, summary.resumed_from
        found["minibatches"] = [summary.minibatches_resumed, summary.minibatches]
        found["examples"], found["warnings"] = summary.examples, summary.warnings
    else:
        try:
            fit(epochs=1000, listeners=[ReadyListener()])
        except KeyboardInterrupt:
            found["moved"] = float(np.abs(wrapper.parameters - initial).max())
            found["left"] = wrapper.worker_pids()
            [saved] = Path("checkpoints").glob("*.npz")
            with np.load(saved) as file:
                found["saved"] = bool((file["parameters"] == wrapper.parameters).all())
        for place in range(2):
            wrapper._context.pool.drop(place)
        found["equal"] = fit(epochs=1).replicas_equal
    found["spark"] = sorted(name for name in sys.modules if name.startswith(("pyspark.", "py4j")))
    print(json.dumps(found))
