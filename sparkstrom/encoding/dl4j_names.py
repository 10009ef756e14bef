"""DL4J's names for gradient sharing: what each is here, or why it means nothing.

For the option classes of ``SharedTrainingMaster`` and of training on one machine: both have one
list, so that a name means the same in both. ``options(refused=..., aliases=...)`` takes the two.
"""

from __future__ import annotations

# Of SharedTrainingMaster.Builder, ParallelWrapper.Builder and EncodedGradientsAccumulator.Builder.
ALIASES: dict[str, str] = {
    "threshold_algorithm": "threshold",
}

_QUEUE = (
    "updates wait in a window of so many bytes, VoidConfiguration(window_bytes=...), and in the"
    " residual; nothing is dropped"
)
_ENCODING = (
    "encoding follows threshold=, residual_post_processor=, shake_frequency= and warm_up=; there"
    " is no handler to replace"
)

REFUSED: dict[str, str] = {
    "updates_threshold": "write threshold=AdaptiveThreshold(tau)",
    "encoding_handler": _ENCODING,
    "message_handler": _ENCODING,
    "gradients_accumulator": _ENCODING,
    "encoder_updates_queue": _QUEUE,
    "encoder_update_queue": _QUEUE,
    "queue_size": _QUEUE,
    "memory_parameters": _QUEUE,
    "initial_memory": _QUEUE,
    "temporary_memory": _QUEUE,
    "encoding_bitmap_mode": "the form of a message, sparse or bitmap, is the shorter of the two",
    "boundary": "all that reached the threshold is sent; SharedTrainingMaster's threshold='auto'"
    " holds the fraction that is sent between two limits",
    "step_trigger": "use AdaptiveThreshold, AutoThreshold or TargetSparsityThreshold, which follow"
    " the fraction that is sent",
    "step_delay": "use warm_up=WarmUp(publications), which lowers what is sent step by step",
    "threshold_step": "use AdaptiveThreshold(decay=...), which lowers and raises the threshold",
    "min_threshold": "a threshold follows what is sent; no least value is needed",
    "relative_threshold": "use TargetSparsityThreshold(sent_fraction_target=...)",
}
