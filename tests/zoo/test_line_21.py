"""A cache of built things keyed without strides, dtype or device. Guards: each field of caches.BufferKey."""

from __future__ import annotations

import pytest
import torch

from stepbind import CacheGroup, Caches, GroupKind
from stepbind.caches import BufferKey, KVPages, KVSpec, StateSpec

FULL = CacheGroup("full", GroupKind.ATTENTION, (0,), block_size=4, kernel_block_size=4, num_blocks=4)
STATE = CacheGroup("state", GroupKind.STATE, (0,), block_size=4, kernel_block_size=4, num_blocks=4)
WHOLE = torch.arange(4 * 2 * 2 * 2 * 4 * 8, dtype=torch.float32).reshape(8, 2, 2, 4, 8)


def key_view(buffer: torch.Tensor) -> torch.Tensor:
    spec = KVSpec(num_kv_heads=2, head_dim=8, dtype=buffer.dtype)
    CACHES.update([FULL], {0: spec}, {0: buffer})
    view = CACHES[0]
    assert isinstance(view, KVPages)
    return view.key


CACHES = Caches()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(WHOLE[::2], id="stride"),
        pytest.param(WHOLE[4:], id="offset"),
        pytest.param(WHOLE[:4].clone(), id="pointer"),
        pytest.param(WHOLE[:4].view(torch.int32), id="dtype"),
        pytest.param(WHOLE[:4].transpose(3, 4).contiguous().transpose(3, 4), id="pointer and stride"),
    ],
)
def test_a_buffer_that_differs_in_anything_gets_a_view_of_its_own(other: torch.Tensor) -> None:
    assert torch.equal(key_view(WHOLE[:4]), WHOLE[:4, 0])
    assert torch.equal(key_view(other), other[:, 0])


def test_the_same_bytes_under_another_layout_are_another_view() -> None:
    """Same pointer, shape and strides; the spec alone says where the convolution state begins."""
    buffer = torch.zeros(4, 256, dtype=torch.uint8)
    wide = StateSpec(2, 4, 4, 4, 2, torch.float32, torch.float32)
    narrow = StateSpec(2, 4, 4, 4, 2, torch.bfloat16, torch.float32)
    caches = Caches.of([STATE], {0: wide}, {0: buffer})
    first = caches[0]
    caches.update([STATE], {0: narrow}, {0: buffer})
    assert caches[0] is not first


def test_a_key_holds_all_that_a_view_bakes_in() -> None:
    tensor = WHOLE[4:].view(torch.int32)
    assert vars(BufferKey.of(tensor)) == {
        "pointer": tensor.data_ptr(),
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "storage_offset": tensor.storage_offset(),
        "dtype": torch.int32,
        "device": torch.device("cpu"),
    }
    assert BufferKey.of(WHOLE.to("meta")).device == torch.device("meta")
