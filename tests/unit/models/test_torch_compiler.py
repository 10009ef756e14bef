"""Tests that torch's compiler is imported only by processes that compile."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)

TRAIN_THEN_COMPILE = """
import functools, inspect, pickle, sys
import numpy as np
import torch
from sparkstrom.models.base import Batch, Share
from sparkstrom.models.torch import TorchModel

adam = functools.partial(torch.optim.Adam, lr=0.1)
model = TorchModel(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, adam)
model.place(Share(threads=1, seed=0, gpu=None))
parameters = model.initial()
model.bind(parameters)
batch = Batch(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
losses = [model.step(batch)]
inspect.stack()  # looks at all modules
assert not hasattr(torch._dynamo, "__unknown__")
stand_in = torch._dynamo
imported_by_training = "torch._dynamo.eval_frame" in sys.modules

# Other calls than those of torch's optimizers have the effect that they have in torch.
assert isinstance(torch.compiler.disable(torch.nn.Linear(2, 2)), torch.nn.Module)
assert torch.compiler.disable(recursive=False)(len)([1]) == 1
assert pickle.loads(pickle.dumps(stand_in)) is torch._dynamo is not stand_in

compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
compiled(torch.ones(1, 2))
assert "torch._dynamo.eval_frame" in sys.modules
assert sys.modules["torch._dynamo"] is torch._dynamo
import torch._dynamo.config

losses.append(model.step(batch))  # with functions that were created before the import
optimizer = adam(compiled.parameters())
optimizer.zero_grad()
optimizer.step()
assert losses[1] < losses[0], losses
print(imported_by_training)
"""


def test_training_does_not_import_torch_compiler() -> None:
    """A step does not import it; ``torch.compile`` does, and training continues afterwards."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN_THEN_COMPILE],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
