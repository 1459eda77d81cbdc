"""The compute pool runs every share once, keeps their order, passes errors on and can be closed."""

import threading

import pytest

from daskps.device.pool import ComputePool


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_results_come_in_order(cores: int) -> None:
    with ComputePool(cores) as pool:
        assert pool.map(lambda x: x * x, range(50)) == [x * x for x in range(50)]
        assert pool.shares(lambda index, count: (index, count)) == [(index, cores) for index in range(cores)]
        assert pool.shares(lambda index, count: (index, count), 3) == [(0, 3), (1, 3), (2, 3)]
        assert pool.map(str, []) == []


@pytest.mark.parametrize("cores", [1, 3])
def test_the_first_error_is_raised_and_the_pool_goes_on(cores: int) -> None:
    def work(item: int) -> int:
        if item % 2:
            raise KeyError(item)
        return item

    with ComputePool(cores) as pool:
        with pytest.raises(KeyError, match="1"):
            pool.map(work, range(6))
        assert pool.map(work, [0, 2, 4]) == [0, 2, 4]


def test_many_callers_share_one_pool() -> None:
    sums: dict[int, int] = {}
    with ComputePool(2) as pool:

        def stage(number: int) -> None:
            sums[number] = sum(sum(pool.map(lambda x: x + number, range(10))) for _ in range(50))

        threads = [threading.Thread(target=stage, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == {number: 50 * (45 + 10 * number) for number in range(6)}


def test_a_closed_pool_refuses_work_and_leaves_no_thread() -> None:
    pool = ComputePool(3)
    pool.close()
    pool.close()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("daskps-compute") and thread in pool._threads
    ]
    with pytest.raises(RuntimeError, match="closed"):
        pool.map(str, [1, 2])


def test_no_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one core, got 0"):
        ComputePool(0)
