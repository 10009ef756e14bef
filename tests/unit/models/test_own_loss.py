"""Tests of modules that return their own loss, as Hugging Face's do: named columns, no label."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.evaluation import evaluate_batch, select_metrics
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.models.output_interpretation import predict_flattened

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
transformers = pytest.importorskip("transformers", reason="the extra test-all brings it")
cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")

from sparkstrom.models.torch import TorchModel  # noqa: E402

CHANCE = np.random.default_rng(2)
TOKENS = CHANCE.integers(0, 30, (12, 7))
MASK = np.ones((12, 7), np.int64)
LABELS = CHANCE.integers(0, 3, 12)
SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SGD = partial(torch.optim.SGD, lr=0.1)


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=3,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return transformers.GPT2LMHeadModel(config)


def made(module: Any, **options: Any) -> TorchModel:
    return TorchModel(module, lambda out, _: out.loss, SGD, **options)


def load_on_executor(model: TorchModel) -> tuple[TorchModel, np.ndarray]:
    """Return the model as an executor gets it, and the parameters that it is bound to."""
    twin, params = cloudpickle.loads(cloudpickle.dumps(model)), model.initial()
    twin.bind(params)
    return twin, params


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (bert, {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}),
        (gpt2, {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS}),
    ],
)
def test_step_of_transformer_equals_torch(make: Any, columns: dict[str, Any]) -> None:
    model, params = load_on_executor(made(make()))
    model.check(columns, ())
    loss = model.step(Batch(columns, ()))
    alone = make().train()
    optimizer = SGD(alone.parameters())
    wanted = alone(**{name: torch.from_numpy(array) for name, array in columns.items()}).loss
    wanted.backward()
    optimizer.step()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    flat = np.concatenate([p.detach().numpy().reshape(-1) for p in alone.parameters()])
    np.testing.assert_allclose(params, flat, rtol=1e-4, atol=1e-6)
    total, weight = model.loss(Batch(columns, ()))
    assert (weight, total / weight) == (12, pytest.approx(loss, rel=0.2))


def test_predictions_are_named_outputs_without_loss_and_cache() -> None:
    model, _ = load_on_executor(made(gpt2()))
    outputs = model.predict({"input_ids": TOKENS, "labels": TOKENS})
    assert {name: array.shape for name, array in outputs.items()} == {"logits": (12, 7, 30)}


def test_outputs_option_selects_named_output_for_metrics() -> None:
    """Metrics use the output with the name that the option ``outputs`` has."""
    batch = Batch({"input_ids": TOKENS, "attention_mask": MASK}, LABELS)
    model, _ = load_on_executor(made(bert(), outputs="logits"))
    found = evaluate_batch(model, select_metrics(model, None, 1), batch)
    guesses = model.predict(batch.features)["logits"].argmax(axis=1)
    assert found.classification is not None
    assert found.classification.accuracy == pytest.approx((guesses == LABELS).mean())
    other, _ = load_on_executor(made(bert()))
    with pytest.raises(UsageError, match=r"returns a dict of logits: .*option outputs= names"):
        predict_flattened(other, batch.features)


def test_loss_that_needs_labels_refuses_data_without_labels() -> None:
    """Models whose loss needs labels refuse data without any."""
    with pytest.raises(UsageError, match="no labels were given, and this model needs them"):
        DenseNetwork([7, 3]).check(TOKENS.astype(np.float32), ())
    model = TorchModel(torch.nn.Linear(7, 3), torch.nn.functional.cross_entropy, SGD)
    with pytest.raises(UsageError, match="the loss cross_entropy needs labels: name their column"):
        model.check(TOKENS.astype(np.float32), ())


def test_output_dict_without_row_tensors_is_refused() -> None:
    class Loss(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"loss": super().forward(x).mean()}

    model = TorchModel(Loss(7, 3), lambda out, _: out["loss"], SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match="a dict without tensors of rows"):
        model.predict(TOKENS.astype(np.float32))
