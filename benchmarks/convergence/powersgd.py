"""PowerSGD (Vogels et al. 2019) for all workers in one process: means of gradients of low rank.

As in torch's hook, each worker has error feedback, and the right factor of a step is the start of
the next (warm start). Arrays with fewer than two dimensions, and matrices whose factors would be
larger, are not compressed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradients = list[torch.Tensor]  # one for each parameter


class PowerSGD:
    """The state of all workers, used once per step."""

    def __init__(self, shapes: Sequence[torch.Size], workers: int, rank: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self._right: list[torch.Tensor | None] = []
        for shape in shapes:
            rows, columns = shape[0], shape[1:].numel()
            pays = len(shape) > 1 and (rows + columns) * rank < rows * columns
            right = torch.randn(columns, rank, generator=random) if pays else None
            self._right.append(right)
        self._errors = [[torch.zeros(shape) for shape in shapes] for _ in range(workers)]
        self.bytes_sent = 0

    def averaged(self, gradients: list[Gradients]) -> Gradients:
        """Return the mean gradients of all workers, whose ``gradients`` are by worker."""
        return [
            self._plain([each[index] for each in gradients])
            if right is None
            else self._factored(index, right, [each[index] for each in gradients])
            for index, right in enumerate(self._right)
        ]

    def _plain(self, parts: Gradients) -> torch.Tensor:
        self.bytes_sent += 4 * parts[0].numel() * len(parts)
        return torch.stack(parts).mean(0)

    def _factored(self, index: int, right: torch.Tensor, parts: Gradients) -> torch.Tensor:
        errors = [each[index] for each in self._errors]
        wanted = [part + error for part, error in zip(parts, errors, strict=True)]
        matrices = [each.reshape(each.shape[0], -1) for each in wanted]
        left = torch.linalg.qr(torch.stack([m @ right for m in matrices]).mean(0))[0]
        right = torch.stack([m.T @ left for m in matrices]).mean(0)
        self._right[index] = right
        shared = (left @ right.T).reshape(parts[0].shape)
        for error, each in zip(errors, wanted, strict=True):
            error.copy_(each - shared)
        self.bytes_sent += 4 * (left.numel() + right.numel()) * len(parts)
        return shared
