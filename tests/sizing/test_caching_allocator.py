"""The model of CUDA's caching allocator: each documented rule by hand, a recorded snapshot, and any order at random."""

import random
import time

import pytest

from ogc.errors import InputError
from ogc.sizing.allocator import AllocatorSettings, CachingAllocator, DeviceFullError, State
from ogc.sizing.allocator import _settings_of as settings_of_texts

KIB, MIB = 2**10, 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def blocks_of(allocator):
    """Of each segment, by address, the size and the state of each block."""
    return [[(b.size, b.state.name.lower()) for b in head.region()] for _, head in sorted(allocator.segments.items())]


def address_of(allocator, handle):
    return allocator._alive[handle].address


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1000 * 10 * 4, 40448), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_units(size, rounded):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.now.requested == size
    assert allocator.now.allocated == rounded


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (4, 1200, 1536),  # at most 512 * divisions: as ever
        (4, 2048, 2048),
        (4, 2049, 2560),  # 2048, 2560, 3072, 3584, 4096
        (4, 1200 * KIB, 1280 * KIB),  # the example of PyTorch's notes on CUDA semantics: 1024, 1280, 1536, 1792
        (4, 1280 * KIB, 1280 * KIB),
        (1, 1200 * KIB + 1, 1200 * KIB + 512),
        (16, 100 * MIB + 1, 104 * MIB),
    ],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(divisions, size, rounded):
    assert AllocatorSettings(roundup_power2_divisions=divisions).rounded(size) == rounded


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_segments_are_of_two_twenty_or_whole_sizes(size, reserved):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.now.reserved == reserved


def test_nothing_is_allocated_for_no_bytes():
    allocator = CachingAllocator()
    handle = allocator.allocate(0)
    assert allocator.peak == (0, 0, 0)
    with pytest.raises(InputError, match="has no bytes, or was freed before"):
        allocator.free(handle)


def test_small_blocks_are_split_to_the_last_unit():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.allocate(700 * KIB - 512)
    allocator.allocate(MIB)
    assert blocks_of(allocator) == [
        [(700 * KIB - 512, "allocated"), (700 * KIB - 512, "allocated"), (648 * KIB + 1024, "free")],
        [(700 * KIB - 512, "allocated"), (MIB, "allocated"), (2 * MIB - MIB - 700 * KIB + 512, "free")],
    ]
    allocator.allocate(648 * KIB + 512)
    assert blocks_of(allocator)[1][2] == (324 * KIB + 512, "free")  # 648 KiB and 1 KiB is the better fit of the two
    assert blocks_of(allocator)[0][2:] == [(648 * KIB + 512, "allocated"), (512, "free")]


def test_large_blocks_are_split_where_more_than_one_mib_is_left():
    allocator = CachingAllocator()
    first = allocator.allocate(100 * MIB)
    allocator.free(first)
    allocator.free(allocator.allocate(99 * MIB))
    held = allocator.allocate(99 * MIB)  # leaves exactly one MiB, which is too little
    assert blocks_of(allocator) == [[(100 * MIB, "allocated")]]
    assert allocator.now == (99 * MIB, 100 * MIB, 100 * MIB)
    allocator.free(held)
    allocator.allocate(99 * MIB - 512)
    assert blocks_of(allocator) == [[(99 * MIB - 512, "allocated"), (MIB + 512, "free")]]


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_first():
    allocator = CachingAllocator()
    handles = [allocator.allocate(size * MIB) for size in (40, 20, 30, 20)]
    places = [address_of(allocator, handle) for handle in handles]
    for handle in handles:
        allocator.free(handle)
    assert address_of(allocator, allocator.allocate(25 * MIB)) == places[2]
    assert address_of(allocator, allocator.allocate(20 * MIB)) == places[1]
    assert address_of(allocator, allocator.allocate(20 * MIB)) == places[3]
    assert allocator.now.reserved == 110 * MIB


def test_free_neighbours_are_merged_on_both_sides():
    allocator = CachingAllocator()
    handles = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert blocks_of(allocator) == [[(4 * MIB, "allocated")] * 5]
    allocator.free(handles[1])
    allocator.free(handles[3])
    assert [size for size, state in blocks_of(allocator)[0] if state == "free"] == [4 * MIB, 4 * MIB]
    allocator.free(handles[2])
    assert blocks_of(allocator) == [[(4 * MIB, "allocated"), (12 * MIB, "free"), (4 * MIB, "allocated")]]
    allocator.free(handles[0])
    allocator.free(handles[4])
    assert blocks_of(allocator) == [[(20 * MIB, "free")]]


def test_small_and_large_requests_do_not_share_segments():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(MIB)
    assert allocator.now.reserved == 52 * MIB


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB, stream=0))
    allocator.allocate(50 * MIB, stream=1)
    assert allocator.now.reserved == 100 * MIB
    allocator.allocate(50 * MIB, stream=0)
    assert allocator.now.reserved == 100 * MIB


def test_a_full_device_gets_free_segments_back():
    allocator = CachingAllocator(device_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.free(allocator.allocate(MIB))
    allocator.allocate(70 * MIB)
    assert allocator.now.reserved == 70 * MIB and allocator.releases == 1
    assert allocator.peak.reserved == 70 * MIB


def test_segments_that_are_in_use_in_part_stay():
    allocator = CachingAllocator(device_bytes=100 * MIB)
    whole = [allocator.allocate(30 * MIB) for _ in range(2)]
    for handle in whole:
        allocator.free(handle)
    allocator.allocate(12 * MIB)  # in the first of the two, which it splits
    with pytest.raises(DeviceFullError, match=r"75497472 bytes do not fit on a device of 104857600, of which 12582912"):
        allocator.allocate(72 * MIB)
    assert blocks_of(allocator) == [[(12 * MIB, "allocated"), (18 * MIB, "free")]]
    allocator.allocate(70 * MIB)
    assert allocator.now.reserved == 100 * MIB


def test_blocks_above_a_limit_are_neither_split_nor_given_to_small_requests():
    allocator = CachingAllocator(AllocatorSettings(max_split_size_mb=50))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(40 * MIB)  # not in it
    assert allocator.now.reserved == 140 * MIB
    allocator.allocate(80 * MIB)  # nor what leaves 20 MiB
    assert allocator.now.reserved == 220 * MIB
    allocator.allocate(81 * MIB)
    assert allocator.now == (201 * MIB, 220 * MIB, 220 * MIB)


def test_blocks_above_a_limit_go_back_first_and_no_more_than_it_takes():
    allocator = CachingAllocator(AllocatorSettings(max_split_size_mb=50), device_bytes=200 * MIB)
    for handle in [allocator.allocate(size * MIB) for size in (90, 60, 30)]:
        allocator.free(handle)
    allocator.allocate(40 * MIB)  # releases the first block from 50 MiB on
    assert sorted(size for ((size, _),) in blocks_of(allocator)) == [30 * MIB, 40 * MIB, 90 * MIB]
    assert not allocator.releases
    allocator.allocate(120 * MIB)  # the largest is not enough: all go
    assert sorted(size for ((size, _),) in blocks_of(allocator)) == [40 * MIB, 120 * MIB]
    assert allocator.releases == 1


def test_an_expandable_segment_grows_by_pages():
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(25 * MIB)
    assert allocator.now.reserved == 40 * MIB
    second = allocator.allocate(30 * MIB)  # 15 MiB are there
    assert allocator.now == (55 * MIB, 55 * MIB, 60 * MIB)
    allocator.allocate(KIB)
    assert allocator.now.reserved == 62 * MIB  # pages of two MiB for small ones
    assert len(allocator.segments) == 2
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(58 * MIB)
    assert allocator.now.reserved == 62 * MIB


def test_an_expandable_segment_is_split_to_the_last_unit():
    allocator = CachingAllocator(EXPANDABLE)
    handle = allocator.allocate(20 * MIB)
    allocator.free(handle)
    allocator.allocate(20 * MIB - 512)
    assert [block for block in blocks_of(allocator)[0] if block[1] != "unmapped"] == [
        (20 * MIB - 512, "allocated"),
        (512, "free"),
    ]


def test_pages_that_are_free_go_back_when_the_device_is_full():
    allocator = CachingAllocator(EXPANDABLE, device_bytes=200 * MIB)  # and addresses for 225, in whole pages
    handles = [allocator.allocate(20 * MIB) for _ in range(10)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    allocator.allocate(32 * MIB)  # which no free block holds: two pages move to the end
    assert allocator.now == (192 * MIB, 192 * MIB, 200 * MIB)
    kinds = [state for _, state in blocks_of(allocator)[0]]
    assert kinds == ["unmapped", "allocated", "unmapped", *["allocated"] * 8, "free"]
    with pytest.raises(DeviceFullError):
        allocator.allocate(9 * MIB)
    fixed = CachingAllocator(device_bytes=100 * MIB)
    handles = [fixed.allocate(10 * MIB - 512) for _ in range(10)]
    for handle in handles[::2]:
        fixed.free(handle)
    with pytest.raises(DeviceFullError):  # half of all is free, in pieces
        fixed.allocate(11 * MIB)


def test_unmapped_addresses_in_the_middle_are_used_before_the_end():
    allocator = CachingAllocator(EXPANDABLE, device_bytes=200 * MIB)
    handles = [allocator.allocate(20 * MIB) for _ in range(3)]
    place = address_of(allocator, handles[1])
    allocator.free(handles[1])
    allocator.release_cached()
    assert allocator.now.reserved == 40 * MIB
    assert address_of(allocator, allocator.allocate(12 * MIB)) == place
    assert allocator.now.reserved == 60 * MIB


def test_a_page_that_is_in_use_in_part_stays():
    allocator = CachingAllocator(EXPANDABLE)
    held, large = allocator.allocate(5 * MIB), allocator.allocate(50 * MIB)
    allocator.free(large)
    allocator.release_cached()
    assert allocator.now == (5 * MIB, 5 * MIB, 20 * MIB)
    allocator.free(held)
    allocator.release_cached()
    assert allocator.now == (0, 0, 0) and not allocator.segments


def test_a_recorded_snapshot():
    """``torch.cuda.memory_snapshot()`` after ``X @ W + b``, as a user recorded it.

    Source: https://discuss.pytorch.org/t/178671 (W is 1000 x 10, b 10, X 1000 floats; the first product brings cuBLAS'
    workspace of 8 519 680 bytes).
    """
    allocator = CachingAllocator()
    for size in (40_000, 40, 4_000):
        allocator.allocate(size)
    product = allocator.allocate(40)
    allocator.allocate(8_519_680)
    allocator.allocate(40)
    allocator.free(product)
    small = [(40448, "allocated"), (512, "allocated"), (4096, "allocated"), (512, "free"), (512, "allocated")]
    assert blocks_of(allocator) == [
        [*small, (2051072, "free")],
        [(8519680, "allocated"), (12451840, "free")],
    ]
    assert allocator.now.allocated == 45568 + 8519680
    assert allocator.now.reserved == 2097152 + 20971520


@pytest.mark.parametrize(
    "settings",
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings(max_split_size_mb=30),
        AllocatorSettings(roundup_power2_divisions=4),
        AllocatorSettings(expandable_segments=True, roundup_power2_divisions=8),
    ],
    ids=["plain", "expandable", "limited", "rounded", "expandable and rounded"],
)
@pytest.mark.parametrize("device_bytes", [None, 300 * MIB])
def test_any_order_keeps_what_must_hold(settings, device_bytes):
    rng = random.Random(0)
    allocator, alive, full = CachingAllocator(settings, device_bytes), {}, 0
    for number in range(3000):
        if alive and rng.random() < 0.48:
            handle = rng.choice(list(alive))
            allocator.free(handle)
            del alive[handle]
        else:
            size = int(2 ** rng.uniform(0, 25.5))
            try:
                alive[allocator.allocate(size, stream=rng.choice([0, 0, 0, 1]))] = size
            except DeviceFullError:
                full += 1
                handle = max(alive, key=alive.__getitem__)
                allocator.free(handle)
                del alive[handle]
        if number % 20 == 0:
            assert_sound(allocator, sum(alive.values()))
    assert (full > 0) == (device_bytes is not None)
    for handle in alive:
        allocator.free(handle)
    assert_sound(allocator, 0)
    assert allocator.now.allocated == 0
    allocator.release_cached()
    assert allocator.now.reserved == 0
    assert not allocator.segments or settings.expandable_segments


def assert_sound(allocator, requested):
    now = allocator.now
    assert now.reserved >= now.allocated >= now.requested == requested
    assert now.reserved <= allocator.device_bytes
    assert all(a <= b for a, b in zip(now, allocator.peak, strict=True))
    mapped = allocated = 0
    free, unmapped = set(), set()
    for start, head in allocator.segments.items():
        place, before = start, None
        for block in head.region():
            assert block.address == place and block.segment == start and block.size > 0 and block.before is before
            assert before is None or not before.state == block.state != State.ALLOCATED  # else they would be merged
            place, before = place + block.size, block
            mapped += block.size if block.state is not State.UNMAPPED else 0
            allocated += block.size if block.state is State.ALLOCATED else 0
            if block.state is not State.ALLOCATED:
                (free if block.state is State.FREE else unmapped).add(block)
    assert (mapped, allocated) == (now.reserved, now.allocated)
    assert set(allocator._alive.values()).isdisjoint(free | unmapped)
    pools = allocator._pools.values()
    assert {entry[-1] for pool in pools for entry in pool.free} == free
    assert {entry[-1] for pool in pools for entry in pool.unmapped} == unmapped
    for pool in pools:
        assert pool.free == sorted(pool.free) and pool.unmapped == sorted(pool.unmapped)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["plain", "expandable"])
def test_ten_thousand_events_take_no_second(settings):
    rng, allocator, alive = random.Random(1), CachingAllocator(settings), []
    begin = time.process_time()
    for _ in range(10_000):
        if len(alive) > 500 or (alive and rng.random() < 0.4):
            allocator.free(alive.pop(rng.randrange(len(alive))))
        else:
            alive.append(allocator.allocate(int(2 ** rng.uniform(5, 27))))
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("size", [-1, 1.5, True, "8MB", None])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(InputError, match="must be a number of bytes"):
        CachingAllocator().allocate(size)


@pytest.mark.parametrize("size", [-1, 1.5, True, "8MB"])
def test_what_is_no_device_is_refused(size):
    with pytest.raises(InputError, match="device_bytes must"):
        CachingAllocator(device_bytes=size)


def test_what_is_not_allocated_is_not_freed():
    allocator = CachingAllocator()
    handle = allocator.allocate(100)
    allocator.free(handle)
    with pytest.raises(InputError, match="was freed before"):
        allocator.free(handle)
    for other in (0, 7, -1, "1"):
        with pytest.raises(InputError, match="was never made"):
            allocator.free(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expandable_segments": 1}, "expandable_segments must be True or False"),
        ({"max_split_size_mb": 20}, "max_split_size_mb must be a whole number of MiB above 20"),
        ({"max_split_size_mb": 64.0}, "max_split_size_mb"),
        ({"roundup_power2_divisions": 3}, "must be a power of two"),
        ({"roundup_power2_divisions": True}, "must be a power of two"),
        ({"roundup_power2_divisions": 0}, "must be a power of two"),
    ],
)
def test_settings_that_pytorch_would_refuse_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        AllocatorSettings(**settings)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        (
            "backend:native, max_split_size_mb:128,roundup_power2_divisions:8,expandable_segments:False",
            {"max_split_size_mb": 128, "roundup_power2_divisions": 8},
        ),
        ("roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:64", {"max_split_size_mb": 64}),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_are_read_from_the_environment(monkeypatch, caplog, name, text, settings):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, text)
    settings_of_texts.cache_clear()
    assert AllocatorSettings.of_environment() == AllocatorSettings(**settings)
    assert ("is left out" in caplog.text) == ("[" in text)
