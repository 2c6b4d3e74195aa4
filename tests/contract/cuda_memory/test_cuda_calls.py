"""The driver's calls: what we give them arrives whole, by ctypes and by NVIDIA's package alike.

What they are called with is told by a stand-in library, which a C compiler makes here: what
there is to prove is that no number is cut short, swapped or passed as another type.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from teacher_logits.cuda_memory import by_bindings as cuda_bindings
from teacher_logits.cuda_memory import by_ctypes as cuda_ctypes
from teacher_logits.cuda_memory.calls import FUNCTIONS, UUID_BYTES, check, refused
from teacher_logits.device_memory import HANDLE_BYTES, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.cuda_memory.calls import DriverCalls

SOURCE = Path(__file__).with_name("cuda_stand_in.c")
FOLDER = "TEACHER_LOGITS_STAND_IN"
"""Where the stand-in lies, in the run of this file that tries NVIDIA's package: that looks for
``libcuda.so.1`` on the path of libraries, and the process that finds it there has no other."""

BIG = 0x1122334455667788
"""A number that no shorter type than ours could carry; the library gives it back."""

# Function, what it is given, what it returns, and what the library says it was called with.
Call = tuple[str, tuple[object, ...], object, str]
CALLS: list[Call] = [
    ("cuInit", (), 0, "cuInit 0"),
    ("cuDriverGetVersion", (), (0, 13000), "cuDriverGetVersion"),
    ("cuDeviceGetCount", (), (0, 2), "cuDeviceGetCount"),
    ("cuDeviceGet", (1,), (0, 8), "cuDeviceGet 1"),
    ("cuDeviceGetName", (8,), (0, "NVIDIA X MIG 1g.10gb"), "cuDeviceGetName 256 8"),
    ("cuDeviceGetUuid", (7,), (0, bytes(range(112, 128))), "cuDeviceGetUuid_v2 7"),
    ("cuDeviceGetAttribute", (113, 7), (0, 1), "cuDeviceGetAttribute 113 7"),
    ("cuDevicePrimaryCtxRetain", (7,), (0, BIG), "cuDevicePrimaryCtxRetain 7"),
    ("cuCtxPushCurrent", (BIG,), 0, f"cuCtxPushCurrent_v2 {BIG:#x}"),
    ("cuCtxPopCurrent", (), (0, BIG), "cuCtxPopCurrent_v2"),
    ("cuCtxSynchronize", (), 0, "cuCtxSynchronize"),
    ("cuMemAlloc", (BIG,), (0, BIG), f"cuMemAlloc_v2 {BIG:x}"),
    ("cuMemFree", (BIG,), 0, f"cuMemFree_v2 {BIG:x}"),
    ("cuMemGetAddressRange", (BIG,), (0, BIG, BIG + 1), f"cuMemGetAddressRange_v2 {BIG:x}"),
    (
        "cuPointerGetAttributes",
        ((2, 8, 9, 10, 11, 12, 17), BIG),
        (0, [2, 0, 1, 1, BIG, BIG + 1, 0]),
        f"cuPointerGetAttributes 7 {BIG:x} 2 8 9 10 11 12 17",
    ),
    (
        "cuPointerGetAttributes",
        ((2, 8, 9), 0),
        (0, [0, 0, 1]),
        "cuPointerGetAttributes 3 0 2 8 9",
    ),
    ("cuIpcGetMemHandle", (BIG,), (0, bytes(range(64))), f"cuIpcGetMemHandle {BIG:x}"),
    ("cuIpcOpenMemHandle", (bytes(range(64)), 1), (0, BIG), "cuIpcOpenMemHandle_v2 1 0..63"),
    ("cuIpcCloseMemHandle", (BIG,), 0, f"cuIpcCloseMemHandle {BIG:x}"),
    ("cuStreamSynchronize", (BIG,), 0, f"cuStreamSynchronize {BIG:#x}"),
    ("cuEventCreate", (2,), (0, BIG), "cuEventCreate 2"),
    ("cuEventRecord", (BIG, BIG - 1), 0, f"cuEventRecord {BIG:#x} {BIG - 1:#x}"),
    ("cuEventQuery", (BIG,), 0, f"cuEventQuery {BIG:#x}"),
    ("cuEventSynchronize", (BIG,), 0, f"cuEventSynchronize {BIG:#x}"),
    ("cuEventDestroy", (BIG,), 0, f"cuEventDestroy_v2 {BIG:#x}"),
    ("cuMemHostRegister", (BIG, 8, 9), 0, f"cuMemHostRegister_v2 {BIG:#x} 8 9"),
    ("cuMemHostUnregister", (BIG,), 0, f"cuMemHostUnregister {BIG:#x}"),
]
COPIES = {"cuMemcpyDtoH", "cuMemcpyHtoD"}
WORDS = {"cuGetErrorName", "cuGetErrorString"}


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER]) / cuda_ctypes.LIBRARY
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make the stand-in library with")
    made = tmp_path_factory.mktemp("driver") / cuda_ctypes.LIBRARY
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, SOURCE, "-ldl"], check=True
    )
    return made


@pytest.fixture(scope="module")
def library(library_path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path))
    library.stand_in_last.restype = ctypes.c_char_p
    return library


@pytest.fixture
def calls(library: ctypes.CDLL) -> Iterator[DriverCalls]:
    if FOLDER in os.environ:
        made: DriverCalls | None = cuda_bindings.load()
        assert made is not None
    else:
        made = cuda_ctypes.CtypesCalls(library)
    yield made
    library.stand_in_result(0)


def test_the_same_holds_for_nvidias_package(library_path: Path) -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda.bindings is not installed")
    folder = str(library_path.parent)

    tried = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            __file__,
            "-k",
            "TestCalls or TestErrorsOfCalls",
        ],
        env={**os.environ, FOLDER: folder, "LD_LIBRARY_PATH": folder},
        capture_output=True,
        text=True,
    )

    assert tried.returncode == 0, tried.stdout
    assert "skipped" not in tried.stdout


class TestCalls:
    @pytest.mark.parametrize("call", CALLS, ids=[name for name, *_ in CALLS])
    def test_arrives_whole_and_brings_back_what_was_found(
        self, calls: DriverCalls, library: ctypes.CDLL, call: Call
    ) -> None:
        name, given, returned, said = call

        assert getattr(calls, name)(*given) == returned
        assert library.stand_in_last().decode() == said

    def test_copies_from_and_to_host_memory(self, calls: DriverCalls, library: ctypes.CDLL) -> None:
        host = ctypes.create_string_buffer(b"\x09" * 8, 8)
        place = ctypes.addressof(host)

        assert calls.cuMemcpyHtoD(BIG, place, 8) == 0
        assert library.stand_in_last().decode() == f"cuMemcpyHtoD_v2 {BIG:x} 9 8"
        assert calls.cuMemcpyDtoH(place, BIG, 8) == 0
        assert library.stand_in_last().decode() == f"cuMemcpyDtoH_v2 {BIG:x} 8"
        assert host.raw == b"\x5a" * 8

    @pytest.mark.parametrize("call", CALLS, ids=[name for name, *_ in CALLS])
    def test_that_is_refused_returns_the_drivers_number(
        self, calls: DriverCalls, library: ctypes.CDLL, call: Call
    ) -> None:
        name, given, *_ = call
        library.stand_in_result(201)
        answer = getattr(calls, name)(*given)

        assert (answer if isinstance(answer, int) else answer[0]) == 201

    def test_that_is_refused_with_a_number_of_later_years_is_refused_all_the_same(
        self, calls: DriverCalls, library: ctypes.CDLL
    ) -> None:
        library.stand_in_result(4711)

        assert calls.cuMemAlloc(8)[0] in (4711, 999)
        assert calls.cuMemFree(BIG) in (4711, 999)

    def test_has_the_drivers_words_for_a_number(self, calls: DriverCalls) -> None:
        assert calls.cuGetErrorName(201) == "CUDA_ERROR_INVALID_CONTEXT"
        assert calls.cuGetErrorString(201) == "invalid device context"
        assert calls.cuGetErrorName(4711) == ""


class TestErrorsOfCalls:
    def test_carries_number_name_and_call(self, calls: DriverCalls) -> None:
        with pytest.raises(DeviceError, match=r"cuIpcOpenMemHandle: .*201.*of its own") as caught:
            check(calls, 201, "cuIpcOpenMemHandle")

        assert (caught.value.number, caught.value.name, caught.value.call) == (
            201,
            "CUDA_ERROR_INVALID_CONTEXT",
            "cuIpcOpenMemHandle",
        )
        assert caught.value.facts["number"] == 201

    def test_is_none_where_there_is_none(self, calls: DriverCalls) -> None:
        check(calls, 0, "cuInit")

    def test_without_words_has_its_number(self, calls: DriverCalls) -> None:
        assert "(4711)" in refused(calls, 4711, "cuInit").message


class TestBothTables:
    def test_have_the_same_functions(self) -> None:
        def functions(table: type) -> set[str]:
            return {name for name in vars(table) if name.startswith("cu")}

        assert functions(cuda_ctypes.CtypesCalls) == set(FUNCTIONS)
        assert functions(cuda_bindings.BindingsCalls) == set(FUNCTIONS)

    def test_are_tried_here_function_by_function(self) -> None:
        assert {name for name, *_ in CALLS} | COPIES | WORDS == set(FUNCTIONS)

    def test_call_no_symbol_that_the_stand_in_has_not(self, library: ctypes.CDLL) -> None:
        for name in FUNCTIONS:
            assert getattr(library, cuda_ctypes.SYMBOLS.get(name, name))


class TestSizes:
    """Golden: what the driver's headers have had since CUDA 4."""

    def test_of_a_handle(self) -> None:
        assert ctypes.sizeof(cuda_ctypes.MemoryHandle) == HANDLE_BYTES == 64

    def test_of_a_uuid(self) -> None:
        assert UUID_BYTES == 16

    @pytest.mark.parametrize("kind", [ctypes.c_size_t, ctypes.c_void_p])
    def test_of_addresses_and_sizes(self, kind: type) -> None:
        assert ctypes.sizeof(kind) == 8


def test_a_library_that_is_not_there_gives_no_calls() -> None:
    assert cuda_ctypes.load("libcuda-that-nobody-has.so.1") is None
