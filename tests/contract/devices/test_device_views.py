"""Tensors over device memory: nothing is copied, and the view goes with the last tensor."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.devices.views import DeviceView, device_tensor
from teacher_logits.layout import Column, ColumnKind, ElementType
from teacher_logits.tensors import column_tensor, column_tensors

SIZE = 4096
CPU = (1, 0)
FLOAT8 = torch.float8_e4m3fn


class Memory:
    """Plain memory with an address, and a view of it that can be watched."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_uint8 * SIZE)()
        self.address = ctypes.addressof(self.bytes)

    def view(self, size: int = SIZE) -> DeviceView:
        return DeviceView(self.address, size, device=CPU, owner=self)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def column(kind: ColumnKind, element_type: ElementType, *shape: int, offset: int) -> Column:
    return Column(kind=kind, element_type=element_type, shape=shape, offset_bytes=offset)


LOGPROBS = column(ColumnKind.TOPK_LOGPROBS, ElementType.BFLOAT16, 4, 8, offset=256)


class TestATensor:
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            FLOAT8,
        ],
    )
    def test_shows_the_bytes_that_are_there(self, memory: Memory, dtype: torch.dtype) -> None:
        written = torch.arange(1, 25).to(dtype).view(4, 6)
        ctypes.memmove(memory.address + 256, written.data_ptr(), written.nbytes)

        seen = device_tensor(memory.view(), dtype=dtype, shape=(4, 6), offset_bytes=256)

        assert seen.dtype is dtype
        assert seen.data_ptr() == memory.address + 256
        assert torch.equal(seen.view(torch.uint8), written.view(torch.uint8))

    def test_writes_into_them(self, memory: Memory) -> None:
        device_tensor(memory.view(), dtype=torch.int32, shape=(2,), offset_bytes=8).fill_(7)

        assert bytes(memory.bytes)[:20] == bytes(8) + b"\7\0\0\0\7\0\0\0" + bytes(4)

    def test_may_be_empty(self, memory: Memory) -> None:
        assert device_tensor(memory.view(), dtype=torch.int64, shape=(0, 8)).shape == (0, 8)

    @given(
        shape=st.lists(st.integers(-1, 40), max_size=3),
        offset=st.integers(-4, SIZE) | st.sampled_from([2**31, 2**63, 2**64]),
    )
    def test_never_reaches_beyond_the_view(self, shape: list[int], offset: int) -> None:
        size = 2
        for axis in shape:
            size *= axis
        view = Memory().view()
        is_inside = min([0, offset, *shape]) >= 0 and offset + size <= SIZE and not offset % 2
        try:
            seen = device_tensor(view, dtype=torch.float16, shape=shape, offset_bytes=offset)
        except ValueError:
            assert not is_inside
        else:
            assert is_inside
            assert list(seen.shape) == shape

    def test_starts_at_a_whole_element(self, memory: Memory) -> None:
        with pytest.raises(ValueError, match="starts no element"):
            device_tensor(memory.view(), dtype=torch.int64, shape=(1,), offset_bytes=4)

    def test_of_a_device_that_torch_does_not_have_is_an_error(self, memory: Memory) -> None:
        if torch.cuda.is_available():
            pytest.skip("torch has a CUDA device here")
        view = DeviceView(memory.address, SIZE, device=(2, 0))

        with pytest.raises((AssertionError, RuntimeError)):
            device_tensor(view, dtype=torch.int32, shape=(8,))


class TestAView:
    def test_lives_as_long_as_a_tensor_over_it(self, memory: Memory) -> None:
        view = memory.view()
        gone = weakref.ref(view)
        part = device_tensor(view, dtype=torch.float32, shape=(4, 8))[1].view(torch.int32)
        del view
        gc.collect()

        assert gone() is not None
        del part
        assert gone() is None

    def test_lives_as_long_as_autograd_has_it(self, memory: Memory) -> None:
        view = memory.view()
        gone = weakref.ref(view)
        weight = torch.zeros(8, requires_grad=True)
        loss = (weight * device_tensor(view, dtype=torch.float32, shape=(8,))).sum()
        del view

        assert gone() is not None
        loss.backward()
        del loss
        assert gone() is None

    def test_keeps_its_owner(self) -> None:
        memory = Memory()
        gone = weakref.ref(memory)
        tensor = device_tensor(memory.view(), dtype=torch.uint8, shape=(8,))
        del memory
        gc.collect()

        assert gone() is not None
        del tensor
        assert gone() is None

    def test_goes_although_an_exception_is_on_its_way(self, memory: Memory) -> None:
        gone: list[weakref.ref[DeviceView]] = []

        def made() -> torch.Tensor:
            view = memory.view()
            gone.append(weakref.ref(view))
            return device_tensor(view, dtype=torch.float32, shape=(8,))

        def takes_nothing() -> None:
            pass

        # The only reference is that of the call which fails: C drops it with the error set.
        with pytest.raises(TypeError, match="unexpected keyword"):
            takes_nothing(tensor=made())  # type: ignore[call-arg]

        assert gone[0]() is None

    def test_goes_in_whatever_thread(self, memory: Memory) -> None:
        gone: list[weakref.ref[DeviceView]] = []

        def make_many() -> None:
            for _ in range(200):
                view = memory.view()
                gone.append(weakref.ref(view))
                device_tensor(view, dtype=torch.uint8, shape=(SIZE,))

        threads = [threading.Thread(target=make_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(gone) == 800
        assert {ref() for ref in gone} == {None}

    @pytest.mark.parametrize(("address", "size"), [(-1, 8), (8, -1), (2**64 - 8, 9)])
    def test_is_of_memory_that_can_be(self, address: int, size: int) -> None:
        with pytest.raises(ValueError, match="no memory"):
            DeviceView(address, size, device=CPU)


class TestAColumn:
    def test_is_shown_where_its_description_has_it(self, memory: Memory) -> None:
        tensor = column_tensor(memory.view(), LOGPROBS)

        assert tensor.dtype is torch.bfloat16
        assert tensor.shape == (4, 8)
        assert tensor.data_ptr() == memory.address + 256

    def test_over_rows_is_not_there(self, memory: Memory) -> None:
        rows = column(ColumnKind.ROW_STATUS, ElementType.UINT8, 4, offset=0)

        with pytest.raises(ValueError, match="host twin"):
            column_tensor(memory.view(), rows)

    def test_must_be_inside_the_view(self, memory: Memory) -> None:
        with pytest.raises(ValueError, match="beyond"):
            column_tensors(memory.view(LOGPROBS.end_bytes - 1), [LOGPROBS])
