"""Tests of the classes and functions that a saved description of a Keras model may name."""

from __future__ import annotations

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.keras_support import keras, refuse_foreign_code, require_safe_keras


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("keras.layers", "Lambda"),
        ("keras.src.utils.file_utils", "get_file"),
        ("keras.utils", "get_file"),
        ("builtins", "function"),
        (None, "__lambda__"),
        (None, "function"),
        ("os", "system"),
    ],
)
def test_functions_and_lambdas_in_description_are_refused(module: str | None, name: str) -> None:
    with pytest.raises(UsageError, match="only Keras' own"):
        refuse_foreign_code([{"module": module, "class_name": name, "config": {}}])


def test_keras_classes_in_description_are_accepted() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activation="relu", kernel_regularizer="l2"),
            keras.layers.Dropout(0.1),
            keras.layers.BatchNormalization(),
        ]
    )
    inputs = keras.Input((4,))
    functional = keras.Model(inputs, keras.layers.Dense(2)(inputs) + 1.0)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    for part in (model, functional, keras.optimizers.Adam(schedule), keras.losses.Huber()):
        refuse_foreign_code(keras.saving.serialize_keras_object(part))


def test_keras_older_than_3_11_3_is_refused_for_descriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keras before 3.11.3, which may run code from a description, is refused."""
    monkeypatch.setattr(keras, "__version__", "3.8.0")
    with pytest.raises(UsageError, match=r"Keras 3\.8\.0 may run code .* keras>=3\.11\.3"):
        require_safe_keras()
    monkeypatch.setattr(keras, "__version__", "3.12.0rc1")
    require_safe_keras()
