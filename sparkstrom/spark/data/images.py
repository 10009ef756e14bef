"""Images: encoded files and Spark's image schema as arrays [rows, height, width, channels].

Channels are grey, RGB or RGBA, whatever way the image came: Spark's schema keeps OpenCV's order,
blue first, which is turned round here. PNG and JPEG are decoded by Pillow, an optional extra.
Bytes that are neither are taken as they are: uint8[rows, length].
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError

Refuse = Callable[[int, str], None]  # row, why; raises UsageError
Shape = tuple[int, ...] | None  # of earlier rows

MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # PNG, JPEG
OPENCV_DEPTHS = {0: "u1", 5: "<f4"}  # the low bits of Spark's image mode: CV_8U, CV_32F


def images_of_bytes(values: list[bytes], refuse: Refuse, expected: Shape) -> NDArray[np.uint8]:
    """Encoded images, or raw bytes, all of one size."""
    encoded = [value.startswith(MAGIC) for value in values]
    arrays = []
    for row, value in enumerate(values):
        if encoded[row] != encoded[0]:
            refuse(row, "is a PNG or JPEG, and earlier ones are not, or the other way round")
        arrays.append(_decoded(row, value, refuse) if encoded[0] else np.frombuffer(value, "u1"))
    return _stacked(arrays, refuse, expected)


def images_of_structs(
    values: list[dict[str, Any]], refuse: Refuse, expected: Shape
) -> NDArray[Any]:
    """Rows of Spark's image schema, all of one size and depth: uint8 or float32."""
    arrays = [_opened(row, value, refuse) for row, value in enumerate(values)]
    return _stacked(arrays, refuse, expected)


def _decoded(row: int, value: bytes, refuse: Refuse) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise SetupError(
            "PNG and JPEG columns need Pillow, which is not here: pip install pillow on the "
            "executors, or read the files with spark.read.format('image')"
        ) from None
    try:
        with Image.open(io.BytesIO(value)) as image:
            if image.mode[0] in "IF":
                refuse(row, f"is an image of mode {image.mode}: only 8 bits per channel are read")
            kept = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
            array = np.asarray(kept)
    except (OSError, SyntaxError) as error:  # Pillow's words for damaged files
        refuse(row, f"is an image that does not open: {error}")
        raise
    return array.reshape(array.shape[0], array.shape[1], -1)


def _opened(row: int, image: dict[str, Any], refuse: Refuse) -> NDArray[Any]:
    shape = (image["height"], image["width"], image["nChannels"])
    depth = OPENCV_DEPTHS.get(image["mode"] & 7) if image["mode"] is not None else None
    if depth is None or None in shape:
        refuse(row, f"is an image of OpenCV mode {image['mode']}: only 8 bits and floats are read")
    array = np.frombuffer(image["data"] or b"", depth)
    if array.size != np.prod(shape):
        refuse(row, f"has {array.size} values for an image of {list(shape)}")
    array = array.reshape(shape)
    if shape[2] < 3:
        return array
    return array[:, :, [2, 1, 0, *range(3, shape[2])]]


def _stacked(arrays: list[NDArray[Any]], refuse: Refuse, expected: Shape) -> NDArray[Any]:
    shape = arrays[0].shape if expected is None else expected
    for row, array in enumerate(arrays):
        if array.shape != shape or array.dtype != arrays[0].dtype:
            refuse(
                row,
                f"is {array.dtype.name}{list(array.shape)}, earlier ones are "
                f"{arrays[0].dtype.name}{list(shape)}: scale images to one size",
            )
    return np.stack(arrays)
