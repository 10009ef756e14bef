"""Device arrays that are known by DLPack alone, as ``__cuda_array_interface__`` would say it.

DLPack hands out a capsule around a C struct. Reading pointer, shape and strides out of it takes
no library. The capsule is neither renamed nor freed by us: its owner frees it with the last
reference, so we hold one as long as anybody looks at the memory.
Source: dlpack.h, version 0.8 (the layout of unversioned capsules has not changed since).
"""

from __future__ import annotations

import ctypes
from typing import Any

from sparkstrom.base.errors import UsageError

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
KINDS = {0: "i", 1: "u", 2: "f"}  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in entries; null: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = (ctypes.py_object, ctypes.c_char_p)


def is_on_cuda(array: Any) -> bool:
    """Whether this is an array on a CUDA device, by its own word in DLPack."""
    ask = getattr(array, "__dlpack_device__", None)
    return ask is not None and int(ask()[0]) in (CUDA, CUDA_MANAGED)


class Interface:
    """Another library's array, with ``__cuda_array_interface__`` (version 3)."""

    def __init__(self, array: Any) -> None:
        self._capsule = array.__dlpack__()  # the producer synchronises with the default stream
        tensor = _Tensor.from_address(_pointer_in(self._capsule, b"dltensor"))
        if tensor.code not in KINDS or tensor.lanes != 1:
            raise UsageError(
                f"a device array with DLPack type code {tensor.code} and {tensor.lanes} lanes:"
                " must be float32"
            )
        size = tensor.bits // 8
        axes = range(tensor.ndim)
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "shape": tuple(tensor.shape[axis] for axis in axes),
            "strides": tuple(tensor.strides[axis] * size for axis in axes)
            if tensor.strides
            else None,
            "typestr": f"<{KINDS[tensor.code]}{size}",
        }
