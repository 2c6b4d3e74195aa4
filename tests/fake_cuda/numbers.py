"""The driver's own numbers and names of what it refuses (CUDA driver API, ``CUresult``)."""

from __future__ import annotations

from teacher_logits.device_memory import DeviceError

NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    217: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}


def refusal(number: int, call: str, why: str) -> DeviceError:
    """Return the error that a call ends in. A driver gives the number alone; the rest is ours."""
    name = NAMES[number]
    return DeviceError(f"{call}: {name} ({number}): {why}", number=number, name=name, call=call)
