"""apex.contrib.peer_memory, and the modules of memory and exchanges between neighbours."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from apex.contrib.peer_memory import PeerHaloExchanger1d, PeerMemoryPool

DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32


def check_pool(rank, world):
    """What one rank writes, all others read; the parts do not overlap."""
    pool = PeerMemoryPool(1000, 3000, device="cpu")
    assert (pool.static_size, pool.dynamic_size) == (1024, 3072)
    made = [
        pool.allocate_peer_tensors([1, 2, 3, 4], dtype, dynamic, dynamic)
        for dtype, dynamic in (
            (torch.float64, False),
            (torch.float64, True),
            (torch.float32, False),
        )
    ]
    for number, tensors in enumerate(made):
        assert len(tensors) == world
        assert not tensors[rank].any()
        tensors[rank].fill_(10 * number + rank)
    dist.barrier()
    for number, tensors in enumerate(made):
        for peer, tensor in enumerate(tensors):
            assert tensor.shape == (1, 2, 3, 4)
            assert (tensor == 10 * number + peer).all()
    assert made[1][0].is_contiguous(memory_format=torch.channels_last)
    dist.barrier()
    with pytest.raises(ValueError, match=r"static part has 512 left.* larger static_size"):
        pool.allocate_peer_tensors([200], torch.float32, False, False)
    pool.allocate_peer_tensors([700], torch.float32, False, True)
    with pytest.raises(ValueError, match="dynamic part has 0 left"):
        pool.allocate_peer_tensors([1], torch.float32, False, True)
    pool.reset()
    again = pool.allocate_peer_tensors([1, 2, 3, 4], torch.float64, True, True)
    assert torch.equal(again[0], made[1][0])
    for dtype in DTYPES:
        pool.reset()
        assert pool.allocate_peer_tensors([3], dtype, False, True)[rank].dtype == dtype
    with pytest.raises(TypeError, match=r"dtype must be one of float64, .*got torch\.int8"):
        pool.allocate_peer_tensors([1], torch.int8, False, True)
    kept = made[0][1 - rank]
    del pool, made, again, tensors
    assert (kept == 1 - rank).all()  # a tensor keeps its memory


def check_pool_errors(rank, world):
    with pytest.raises(ValueError, match=r"rank . is not in peer_ranks \[5\]"):
        PeerMemoryPool(1, 1, [5])
    with pytest.raises(ValueError, match="must not be negative"):
        PeerMemoryPool(-1, 1)
    with pytest.raises(ValueError, match="all must ask for the same"):
        PeerMemoryPool(256 * (1 + rank), 0, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no GPU is available to torch"):
            PeerMemoryPool(1, 1, device="cuda")


def test_pool(two_ranks):
    two_ranks(check_pool)
    two_ranks(check_pool_errors)


def test_pool_needs_processes():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        PeerMemoryPool(1, 1)


def check_exchanger(rank, world):
    ranks = list(range(world))
    pool = PeerMemoryPool(0, 1024, ranks, device="cpu")
    whole = torch.randn(2, 3, 4 * world, 5, generator=torch.Generator().manual_seed(0))
    expected = F.pad(whole, (0, 0, 1, 1))[:, :, 4 * rank : 4 * rank + 6]
    exchanger = PeerHaloExchanger1d(ranks, rank, pool, 1)
    for dtype in (torch.float32, torch.float16):
        padded = F.pad(whole[:, :, 4 * rank : 4 * rank + 4], (0, 0, 1, 1), value=9.0).to(dtype)
        for nhwc, h_split, dims in (
            (False, True, (0, 1, 2, 3)),
            (False, False, (0, 1, 3, 2)),
            (True, True, (0, 2, 3, 1)),
            (True, False, (0, 3, 2, 1)),
        ):
            y = padded.permute(dims).contiguous()
            assert exchanger(y, h_split, nhwc) is None
            assert torch.equal(y, expected.to(dtype).permute(dims))
    with pytest.raises(ValueError, match="must have at least 3 rows along dimension 2"):
        exchanger(torch.ones(1, 1, 2, 5))
    with pytest.raises(ValueError, match="half_halo must be positive"):
        PeerHaloExchanger1d(ranks, rank, pool, 0)
    with pytest.raises(ValueError, match="rank_in_group must be in"):
        PeerHaloExchanger1d(ranks, world, pool, 1)


def test_exchanger(four_ranks):
    four_ranks(check_exchanger)


def check_raw(rank, world):
    """The old functions: a pool by hand, and an exchange of edges in it."""
    import peer_memory_cuda as raw

    pointer = raw.allocate_raw(4096)
    raw.zero(pointer, 4096)
    mine = raw.get_raw_ipc_address(pointer)
    assert (mine.dtype, mine.shape) == (torch.uint8, (64,))
    handles = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(handles, mine)
    peers = raw.get_raw_peers(torch.stack(handles), rank, pointer)
    assert peers[rank] == pointer
    dist.barrier()
    left_tx = [raw.blob_view_float(p, [1, 3, 1, 2], True) for p in peers]
    right_tx = [raw.blob_view_float(p + 1024, [1, 3, 1, 2], True) for p in peers]
    assert raw.blob_view_half(pointer, [8], False).dtype == torch.float16
    assert raw.blob_view_int(pointer, [2, 2], False).dtype == torch.int32
    left, right = (rank - 1) % world, (rank + 1) % world
    edge = lambda r, side: torch.full((1, 3, 1, 2), 10.0 * r + side)
    for of_rocm in (False, True):
        halos = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
        top = rank == 0, edge(rank, 1), left_tx[rank], right_tx[left], halos[0]
        bottom = rank == world - 1, edge(rank, 2), right_tx[rank], left_tx[right], halos[1]
        rest = (*top, *bottom, None, None, None) if of_rocm else (rank, *top, *bottom)
        raw.push_pull_halos_1d(False, False, 1, *rest)
        assert torch.equal(halos[0], edge(left, 2) if rank else torch.zeros(1, 3, 1, 2))
        assert torch.equal(
            halos[1], edge(right, 1) if rank + 1 < world else torch.zeros(1, 3, 1, 2)
        )
    check_raw_errors(raw, mine, rank, pointer)


def check_raw_errors(raw, mine, rank, pointer):
    with pytest.raises(TypeError, match="takes 14 arguments, as NVIDIA's, or 16"):
        raw.push_pull_halos_1d(False, False, 1)
    with pytest.raises(ValueError, match=r"must be uint8 \[peers, 64\]"):
        raw.get_raw_peers(mine, rank, pointer)
    with pytest.raises(RuntimeError, match="cannot open /nowhere"):
        raw.get_raw_peers(torch.tensor([list(b"/nowhere".ljust(64, b"\0"))]).byte(), 1, pointer)
    dist.barrier()
    raw.free_raw(pointer)
    with pytest.raises(ValueError, match="nothing was allocated"):
        raw.free_raw(pointer)
    with pytest.raises(ValueError, match="no 4 bytes were allocated"):
        raw.blob_view_int(pointer, [1], False)
    with pytest.raises(ValueError, match="size must be positive"):
        raw.allocate_raw(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the module's memory is the GPU's there")
def test_raw_functions(two_ranks):
    two_ranks(check_raw)


def check_p2p(rank, world):
    import nccl_p2p_cuda as p2p

    names = p2p.get_unique_nccl_id(2) if rank == 0 else torch.empty(2, 128, dtype=torch.uint8)
    assert (names.dtype, names.shape) == (torch.uint8, (2, 128))
    dist.broadcast(names, 0)
    half = world // 2
    pair, place = rank // half, rank % half  # two communicators of neighbours
    handle = p2p.init_nccl_comm(names[pair], place, half)
    left = place - 1
    right = place + 1 if place + 1 < half else -1
    edges = torch.full((3,), 10.0 * rank + 1), torch.full((3,), 10.0 * rank + 2)
    came = p2p.left_right_halo_exchange(handle, left, right, *edges)
    expected = (
        torch.full((3,), 10.0 * (rank - 1) + 2) if left >= 0 else torch.zeros(3),
        torch.full((3,), 10.0 * (rank + 1) + 1) if right >= 0 else torch.zeros(3),
    )
    assert all(map(torch.equal, came, expected))
    filled = torch.ones(3), torch.ones(3)
    p2p.left_right_halo_exchange_inplace(handle, left, right, *edges, *filled)
    assert all(map(torch.equal, filled, expected))
    with pytest.raises(ValueError, match="needs the places 0 to 2"):
        p2p.init_nccl_comm(names[pair], place, 3)
    with pytest.raises(ValueError, match="9 is no handle"):
        p2p.left_right_halo_exchange(9, left, right, *edges)
    with pytest.raises(ValueError, match="right_rank must be below 2"):
        p2p.left_right_halo_exchange(handle, -1, 2, *edges)
    p2p.add_delay(10)


def test_neighbours_of_communicators(four_ranks):
    four_ranks(check_p2p)


def test_p2p_needs_processes():
    import nccl_p2p_cuda as p2p

    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        p2p.init_nccl_comm(p2p.get_unique_nccl_id(1), 0, 1)
    with pytest.raises(ValueError, match="n must be positive"):
        p2p.get_unique_nccl_id(0)


def test_nccl_version():
    from _nccl_version import get_nccl_version

    if dist.is_nccl_available():
        assert get_nccl_version() >= (2, 0)
    else:
        with pytest.raises(RuntimeError, match="was built without NCCL"):
            get_nccl_version()
