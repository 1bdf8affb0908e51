"""Views look into the host's own memory, refuse what does not fit, and notice a replaced buffer."""

from __future__ import annotations

import pytest
import torch

from stepbind import CacheGroup, Caches, GroupKind, StepError
from stepbind.caches import KVPages, KVSpec, LatentSpec, StateSlots, StateSpec, kv_pages, latent_pages, state_slots

FULL = CacheGroup("full", GroupKind.ATTENTION, (0,), block_size=16, kernel_block_size=4, num_blocks=3)
STATE = CacheGroup("state", GroupKind.STATE, (1,), block_size=16, kernel_block_size=16, num_blocks=3)
LATENT = CacheGroup("latent", GroupKind.LATENT, (2,), block_size=16, kernel_block_size=4, num_blocks=3)
KV = KVSpec(num_kv_heads=2, head_dim=8, dtype=torch.float32)
MIXED = StateSpec(
    value_heads=2,
    value_dim=3,
    key_dim=4,
    conv_width=4,
    conv_channels=5,
    state_dtype=torch.float32,
    conv_dtype=torch.bfloat16,
)  # 96 bytes of recurrent state, 30 of convolution state


def kv_buffer() -> torch.Tensor:
    return torch.zeros(12, 2, 2, 4, 8)


def test_key_and_value_pages_are_the_buffers_halves() -> None:
    buffer = kv_buffer()
    pages = kv_pages(buffer, KV, FULL, layer=0)
    pages.key[5, 1, 2] = 1
    pages.value[5, 1, 2] = 2
    assert buffer[5, 0, 1, 2].tolist() == [1] * 8
    assert buffer[5, 1, 1, 2].tolist() == [2] * 8
    assert buffer.count_nonzero() == 16


def test_state_and_convolution_stand_behind_each_other_in_bytes() -> None:
    buffer = torch.zeros(3, 160, dtype=torch.uint8)
    slots = state_slots(buffer, MIXED, STATE, layer=1)
    assert slots.recurrent.shape == (3, 2, 3, 4)
    assert slots.conv.shape == (3, 3, 5)
    slots.recurrent[1, 1, 2, 3] = 7
    slots.conv[1, 0, 0] = 3
    slots.conv[1, 2, 4] = 5
    assert buffer[1, 92:96].view(torch.float32).item() == 7
    assert buffer[1, 96:98].view(torch.bfloat16).item() == 3
    assert buffer[1, 124:126].view(torch.bfloat16).item() == 5
    assert not buffer[[0, 2]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_may_be_of_any_dtype_and_strided(dtype: torch.dtype) -> None:
    whole = torch.zeros(3, 1024 // dtype.itemsize, dtype=dtype)
    buffer = whole[:, 32 : 32 + 128 // dtype.itemsize]
    state_slots(buffer, MIXED, STATE, layer=1).recurrent[2] = 1
    assert whole[2, 32 : 32 + 96 // dtype.itemsize].view(torch.float32).tolist() == [1] * 24


def test_a_short_block_is_refused_with_all_the_numbers() -> None:
    with pytest.raises(
        StepError,
        match=r"layer 1 state buffer: got 120 bytes a block, expected at least 126: 96 of recurrent state "
        r"\[2, 3, 4\] torch.float32 and 30 of convolution state \[3, 5\] torch.bfloat16",
    ):
        state_slots(torch.zeros(3, 120, dtype=torch.uint8), MIXED, STATE, layer=1)


def test_a_block_stride_that_splits_an_element_is_refused() -> None:
    with pytest.raises(StepError, match=r"got recurrent state at byte 0 with 130 bytes from block to block"):
        state_slots(torch.zeros(3, 130, dtype=torch.uint8), MIXED, STATE, layer=1)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(StepError, match=r"layer 0 attention buffer: got shape \(12, 2, 2, 8, 4\), expected \(12, 2, 2"):
        kv_pages(torch.zeros(12, 2, 2, 8, 4), KV, FULL, layer=0)
    with pytest.raises(StepError, match=r"layer 0 attention buffer: got torch.float16, expected torch.float32"):
        kv_pages(kv_buffer().half(), KV, FULL, layer=0)
    with pytest.raises(StepError, match=r"layer 2 latent buffer: got shape \(3, 16, 10\), expected \(12, 4, 10\)"):
        latent_pages(torch.zeros(3, 16, 10), LatentSpec(10, torch.float32), LATENT, layer=2)
    with pytest.raises(StepError, match=r"layer 1 state buffer: got shape \(5, 160\), expected \[3 blocks"):
        state_slots(torch.zeros(5, 160, dtype=torch.uint8), MIXED, STATE, layer=1)


def both(buffer: torch.Tensor) -> Caches:
    return Caches.of([FULL, STATE], {0: KV, 1: MIXED}, {0: buffer, 1: torch.zeros(3, 160, dtype=torch.uint8)})


def test_views_are_remembered_until_their_buffer_changes() -> None:
    buffers = {0: kv_buffer(), 1: torch.zeros(3, 160, dtype=torch.uint8)}
    specs = {0: KV, 1: MIXED}
    caches = Caches.of([FULL, STATE], specs, buffers)
    pages, slots = caches[0], caches[1]
    generation = caches.generation
    caches.update([FULL, STATE], specs, {layer: buffer.view(buffer.shape) for layer, buffer in buffers.items()})
    assert caches[0] is pages
    assert caches.generation == generation

    buffers[0] = kv_buffer()
    caches.update([FULL, STATE], specs, buffers)
    assert caches.generation == generation + 1
    assert caches[1] is slots
    assert isinstance(caches[0], KVPages)
    assert caches[0].key.data_ptr() == buffers[0].data_ptr()


def test_a_layer_without_a_buffer_or_group_is_named() -> None:
    with pytest.raises(StepError, match="layer 0: got no cache buffer, expected the host's buffer"):
        Caches.of([FULL], {0: KV}, {})
    with pytest.raises(StepError, match="layer 9: got no cache group, expected a group among"):
        Caches.of([FULL], {9: KV}, {9: kv_buffer()})
    with pytest.raises(StepError, match="layer 0: got group 'full' of kind attention, expected kind state"):
        Caches.of([FULL], {0: MIXED}, {0: kv_buffer()})
    with pytest.raises(StepError, match=r"layer: got 7, expected one with a cache view: \[0, 1\]"):
        both(kv_buffer())[7]


def test_a_refused_update_leaves_the_old_views() -> None:
    caches = both(kv_buffer())
    pages = caches[0]
    with pytest.raises(StepError):
        caches.update([FULL], {0: KV}, {0: kv_buffer().half()})
    assert caches[0] is pages
    assert isinstance(caches[1], StateSlots)
