"""What a saved description of a Keras model may name."""

from __future__ import annotations

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.keras_objects import keras, refuse_other_modules


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
def test_functions_and_lambdas_are_refused(module: str | None, name: str) -> None:
    with pytest.raises(UsageError, match="only Keras' own"):
        refuse_other_modules([{"module": module, "class_name": name, "config": {}}])


def test_own_classes_of_keras_pass() -> None:
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
        refuse_other_modules(keras.saving.serialize_keras_object(part))
