"""Trained network: what a network holds, whoever trains it: a model, and what it has learnt."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import path_given
from sparkstrom.checkpoint.store import local_path, save_model
from sparkstrom.models.base import Exporting, Flat, FlatModel, buffers_to_save
from sparkstrom.observe.progress_choice import progress_for
from sparkstrom.spark.driver.checkpoint_content import FitKey, Resumption
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints, Found, Use
from sparkstrom.spark.driver.learnt import Learnt
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.summary_json import skipped


class TrainedNetwork:
    """Parameters and buffers between two fits, saved, restored and assigned."""

    def __init__(self, model: FlatModel, checkpoints: FitCheckpoints, progress: bool | str) -> None:
        self._model, self._checkpoints, self._progress = model, checkpoints, progress
        self._learnt = Learnt(model)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, {self._learnt.epochs} epochs trained)"

    def _begin_with(
        self, found: Found | None, key: FitKey
    ) -> tuple[TrainingSummary | None, Resumption | None]:
        """A fit is about to begin: what it is to return instead, and what it goes on from."""
        if found is None:
            return None, None
        self._learnt.begin_with(found.checkpoint)
        if found.use is Use.SKIP:
            self._checkpoints.is_over(key.number)
            return skipped(found.checkpoint, key), None
        return None, found.checkpoint if found.use is Use.GO_ON else None

    @property
    def parameters(self) -> Flat:
        """A copy of the shared parameters, f32[n_params].

        Assigning is a warm start: what workers kept for the next fit belongs to the former
        parameters, and is not used any more.
        """
        return self._learnt.parameters.copy()

    @parameters.setter
    def parameters(self, values: Flat) -> None:
        self._learnt.assign(values)

    @property
    def checkpoint_directory(self) -> str | None:
        """Where it writes checkpoints, whichever way that was said; None: nowhere."""
        return self._checkpoints.master.checkpoint_directory

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of the shared parameters."""
        self._model.bind(self.parameters)
        return self._model

    @property
    def module(self) -> Any:
        """A TorchModel's module with a copy of the shared parameters, its buffers and own keys.

        Raises UsageError for a model that is none.
        """
        model: Any = self.model
        if not hasattr(model, "module"):
            raise UsageError(
                f"a {type(model).__name__} has no module: network.module is for a TorchModel; "
                "network.model and network.parameters are there for every model"
            )
        return model.module

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` (npz: plain NumPy opens it) and a JSON description beside it.

        A TorchModel adds ``path`` + ".pt", a state_dict that ``torch.load`` opens.
        """
        model, target = self.model, local_path(path)
        save_model(
            target,
            model.describe(),
            self._learnt.parameters,
            self._learnt.epochs,
            buffers=buffers_to_save(model),
            exported=model.exported() if isinstance(model, Exporting) else None,
        )

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Become what a checkpoint holds: a file, or the newest whole one of a directory.

        The next ``fit`` goes on with the fit that was saved, if that was not done. Raises
        UsageError where there is none, or it is of another model.
        """
        with closing(progress_for(self._progress)) as progress:
            self._learnt.begin_with(self._checkpoints.restore(path_given(path), progress.say))
